"""Model card of a run: data, recipe, results, licence notes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm

from proxy_anchor.data.augment import CentralCrop, described_colors
from proxy_anchor.reports.pages import render
from proxy_anchor.reports.tables import markdown_table

# The publishers' terms, summarised; the terms at the source are binding.
_DATA_TERMS = {
    "glyphs": "drawn from the DejaVu fonts, which are free to use (Bitstream Vera and public domain)",
    "cub": "CUB-200-2011: its authors restrict the images to non-commercial research and education",
    "cars": "Cars-196: published for research without a licence; its authors do not own the photographs",
    "sop": "Stanford Online Products: product photographs of a shop's sellers, published for research",
    "inshop": "In-Shop (DeepFashion): under an agreement for non-commercial research",
    "folder": "your own images: their terms are yours to state here",
}


def model_card(config: Mapping[str, Any], result: Mapping[str, Any], data: str) -> str:
    """The card as Markdown, with front matter for the Hugging Face hub.

    Args:
        config: of the run, plain types.
        result: see `make_result`.
        data: description of images and classes.
    """
    rows = []
    for name in ("untrained", "selected", "best", "last"):
        if row := result.get(name):
            rows.append({" ": name, "epoch": row["epoch"]} | {f"Recall@{k}": 100 * v for k, v in row["recall"].items()})
    return render(
        "model_card.md",
        config=config,
        backbone={"drop_path": 0, **config["backbone"]},
        images=config["dataset"]["images"],
        loss=config["loss"]["_target_"].rpartition(".")[2],
        prepared=CentralCrop.of(config["dataset"]["images"]),
        colors=described_colors(config["dataset"]["images"]),
        data=data.removeprefix("data: ").replace("\n", "  \n"),
        result={"warnings": [], **result},
        table=markdown_table(rows),
        terms=_DATA_TERMS.get(config["dataset"]["name"], "see the data set"),
        weights=_weights_terms(config["backbone"]),
    )


def _weights_terms(backbone: Mapping[str, Any]) -> str:
    if backbone.get("weights"):
        return f"the file {Path(backbone['weights']).name}, under its own terms"
    if not backbone["pretrained"]:
        return "none, trained from scratch"
    licence = getattr(timm.models.get_pretrained_cfg(backbone["name"]), "license", None)
    terms = f"licence {licence or 'not stated by timm'}; ImageNet images are for research"
    return f"published weights of {backbone['name']}, {terms}"
