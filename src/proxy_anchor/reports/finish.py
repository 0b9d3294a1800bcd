"""What a finished run leaves in its folder for people: pictures, pages, numbers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.reports.gallery import retrieval_gallery
from proxy_anchor.reports.model_card import write_model_card
from proxy_anchor.reports.run import summary
from proxy_anchor.reports.run_page import write_run_page
from proxy_anchor.utils import RESULT_FILE, write_json


def finish_run(
    folder: Path, config: dict[str, Any], result: dict[str, Any], data: ImageDataModule, embeddings: Sequence[Tensor]
) -> None:
    """Write gallery.png, README.md, index.html and, last, result.json into `folder`, and print the summary.

    config: of the run, plain types. embeddings: (N, D) of the selected epoch, [query] or [query, gallery].
    """
    retrieval_gallery(data.splits, embeddings).save(folder / "gallery.png")
    write_model_card(folder, config, result, data.describe())
    write_run_page(folder, config, result, data.describe())
    write_json(folder / RESULT_FILE, result)  # last: it says that the run is finished
    print(summary(result, folder), flush=True)
