"""In-Shop Clothes Retrieval (DeepFashion, Liu et al. 2016), split by its own list.

The paper's text gives 28,760 test images. Its query and gallery add up to 26,830, as in the list file, which is used
here.
"""

from __future__ import annotations

from pathlib import Path

from proxy_anchor.data.benchmarks.lists import read_columns, require_below
from proxy_anchor.data.table import Splits, make_splits, require_benchmark
from proxy_anchor.errors import UsageError

EXPECTED = {"train": (25882, 3997), "query": (14218, 3985), "gallery": (12612, 3985)}
_IMAGE_FOLDERS = ("Img/img", "img", "Img/img_highres", "img_highres")


def load_inshop(root: Path | str, *, allow_partial: bool = False, verify_files: bool = True) -> Splits:
    """Load In-Shop from `root`.

    Expects list_eval_partition.txt (in Eval/ or Anno/) and img/, Img/img/ or img_highres/. Queries search the gallery;
    both share one label map, and nothing is removed as a self-match.
    allow_partial: accept fewer images or classes than the protocol; results are then not comparable.
    verify_files: False also lists images that are missing or empty, for src/check.py.
    Raises UsageError when files are missing or damaged, or counts differ.
    """
    root = Path(root)
    file = require_below(root, "In-Shop", "list_eval_partition.txt")
    images = require_below(root, "In-Shop", *_IMAGE_FOLDERS)
    groups: dict[str, list[tuple[Path, str]]] = {"train": [], "query": [], "gallery": []}
    for place, (name, item, status) in read_columns(file, 3, skip_lines=2):  # their number, and the column names
        if status not in groups:
            raise UsageError(f"{place}: status {status!r} is not known; expected train, query or gallery.")
        groups[status].append((images / name.removeprefix("img/"), item))  # paths in the list start above img/
    splits = make_splits("inshop", *groups.values(), notice=f"images from {images.relative_to(root)}/")
    return require_benchmark(splits, EXPECTED, allow_partial=allow_partial, verify_files=verify_files)
