"""Write a synthetic data set of the size of SOP: `python benchmarks/made_up_sop.py DIR`.

In the layout of Stanford Online Products: 59,551 training images of 11,318 classes and 60,502 searched ones of
11,316, JPEG files of 500 x 375 pixels with much detail. The files are links to --different ones: they are written in
seconds, and decoding takes as long as for different files.

    python benchmarks/throughput.py dataset=sop dataset.root=DIR data.cache_side=256 speed=fast
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from common import make_photographs

from proxy_anchor.data.benchmarks.sop import EXPECTED


def write_list(
    root: Path, name: str, folder: str, images: int, classes: int, first: int, photographs: list[Path]
) -> None:
    """Write one of the two lists and its images."""
    lines = ["image_id class_id super_class_id path"]
    (root / folder).mkdir()
    for number in range(images):
        path = f"{folder}/{first + number}.JPG"
        os.link(photographs[number % len(photographs)], root / path)
        lines.append(f"{first + number} {first + number % classes} 1 {path}")
    (root / name).write_text("\n".join(lines) + "\n", encoding="utf-8")


def main() -> None:
    """Write the data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="a new folder")
    parser.add_argument("--different", type=int, default=2000, help="photographs that differ (default 2000)")
    parser.add_argument(
        "--size", type=int, nargs=2, default=[500, 375], metavar=("WIDTH", "HEIGHT"), help="of each image"
    )
    parser.add_argument("--share", type=float, default=1.0, help="of images and classes, for a trial (default 1)")
    given = parser.parse_args()
    root = given.folder
    root.mkdir(parents=True)
    (root / "photographs").mkdir()
    make_photographs(root / "photographs", given.different, *given.size)
    photographs = sorted((root / "photographs").iterdir())
    sets = (
        ("Ebay_train.txt", "made_up_train_final", *EXPECTED["train"], 1),
        ("Ebay_test.txt", "made_up_test_final", *EXPECTED["query"], 1_000_000),
    )
    for name, folder, images, classes, first in sets:
        write_list(root, name, folder, round(given.share * images), round(given.share * classes), first, photographs)
    print(f"{root}: {round(given.share * sum(images for images, _ in EXPECTED.values())):,} images")


if __name__ == "__main__":
    main()
