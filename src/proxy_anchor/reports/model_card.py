"""The README.md of a run folder: what the network was trained on, how, how well it searches, and under which terms."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import timm

from proxy_anchor.data.augment import described_colors
from proxy_anchor.utils import write_text

# What the publishers say of their images, in our words; the terms at the source count.
_DATA_TERMS = {
    "glyphs": "drawn from the DejaVu fonts, which are free to use (Bitstream Vera and public domain)",
    "cub": "CUB-200-2011: its authors restrict the images to non-commercial research and education",
    "cars": "Cars-196: published for research without a licence; its authors do not own the photographs",
    "sop": "Stanford Online Products: product photographs of a shop's sellers, published for research",
    "inshop": "In-Shop (DeepFashion): under an agreement for non-commercial research",
    "folder": "your own images: their terms are yours to state here",
}


def write_model_card(folder: Path, config: Mapping[str, Any], result: Mapping[str, Any], data: str) -> None:
    """Write README.md with the front matter that the Hugging Face hub reads.

    config: of train.yaml, plain types. result: what `make_result` returns. data: one line on images and classes.
    """
    write_text(folder / "README.md", model_card(config, result, data))


def model_card(config: Mapping[str, Any], result: Mapping[str, Any], data: str) -> str:
    """The text of the card, see `write_model_card`."""
    backbone, dataset = config["backbone"], config["dataset"]["name"]
    images, optimizer = config["dataset"]["images"], config["optimizer"]
    colors = described_colors(images)
    lines = [
        "---",
        "library_name: proxy_anchor",
        "pipeline_tag: image-feature-extraction",
        "license: other",
        "license_name: see-licence-notes-below",
        "tags: [metric-learning, image-retrieval, proxy-anchor]",
        "---",
        "",
        f"# {backbone['name']}, {config['embedding_dim']}-d, trained on {dataset}",
        "",
        "An image embedding network: similar images get similar unit vectors (cosine similarity).",
        "",
        "```python",
        "from proxy_anchor import Retriever",
        "",
        'retriever = Retriever.from_pretrained("THIS_FOLDER").index("my_pictures")',
        'print(retriever.search("query.jpg", k=5))',
        "```",
        "",
        "## Data",
        "",
        data.removeprefix("data: ").replace("\n", "  \n"),
        "",
        "## Recipe",
        "",
        f"- loss: `{config['loss']['_target_'].rpartition('.')[2]}`"
        + _listed({key: value for key, value in config["loss"].items() if key != "_target_"}),
        f"- images: random crops of {images['crop']} x {images['crop']} in training"
        + (f", their colours varied ({colors})" if colors else "")
        + "; in evaluation the shorter side to "
        + f"{images['resize']} (bilinear), then the central {images['crop']} x {images['crop']}",
        f"- {config['trainer']['max_epochs']} epochs, {config['data']['batch_size']} images per step, AdamW"
        + _listed(optimizer),
        f"- batch norm {config['batch_norm']}, pooling {backbone['pooling']}, precision {config['trainer']['precision']}, "
        f"seed {config['seed']}"
        + (f", drop path {backbone['drop_path']:g} (stochastic depth)" if backbone.get("drop_path") else ""),
        f"- epoch selected by {result['selected_by']}",
        "",
        "config.yaml holds every setting.",
        "",
        "## Results",
        "",
        f"On {result['searched']} classes, in percent; result.json holds every epoch.",
        "",
        *_table(result),
        "",
        *[f"Warning: {text}\n" for text in result.get("warnings", [])],
        f"Made on {result['device']} with " + ", ".join(f"{k} {v}" for k, v in result["versions"].items()) + ".",
        "",
        "## Licence notes",
        "",
        f"- images: {_DATA_TERMS.get(dataset, 'see the data set')}",
        f"- starting weights: {_weights_terms(backbone)}",
        "- code: MIT",
        "",
        "Whether trained weights inherit terms of the images they were trained on is for the person who passes them on to judge.",
        "",
        "## Citation",
        "",
        "Kim, Kim, Cho and Kwak, *Proxy Anchor Loss for Deep Metric Learning*, CVPR 2020.",
        "",
    ]
    return "\n".join(lines)


def _listed(values: Mapping[str, Any]) -> str:
    return f" ({', '.join(f'{key} {value}' for key, value in values.items())})" if values else ""


def _table(result: Mapping[str, Any]) -> list[str]:
    rows = {name: result[name] for name in ("untrained", "selected", "best", "last") if result.get(name)}
    ks = list(result["last"]["recall"])
    lines = ["| | epoch | " + " | ".join(f"Recall@{k}" for k in ks) + " |", "| - " * (len(ks) + 2) + "|"]
    for name, row in rows.items():
        cells = " | ".join(f"{100 * row['recall'][k]:.1f}" for k in ks)
        lines.append(f"| {name} | {row['epoch']} | {cells} |")
    return lines


def _weights_terms(backbone: Mapping[str, Any]) -> str:
    if backbone.get("weights"):
        return f"the file {Path(backbone['weights']).name}, under its own terms"
    if not backbone["pretrained"]:
        return "none, trained from scratch"
    known = timm.models.get_pretrained_cfg(backbone["name"])
    licence = getattr(known, "license", None)
    return f"published weights of {backbone['name']}, licence {licence or 'not stated by timm'}; ImageNet images are for research"
