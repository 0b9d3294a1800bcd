"""Tiny copies of the benchmarks in the layouts of their official archives and of public copies, traps inside.

Each `make_*` function writes one below `root` and returns `root`. A dictionary gives the images of each class.
The traps: `._` twins of images and lists, `.DS_Store`, `__MACOSX`; CMYK, grey, palette and transparent pictures under
.jpg; a byte-order mark, CRLF and blank lines in lists; ids with gaps; classes of one image; in In-Shop a query without
a match in the gallery; on demand a doubled folder, as some unpackers make it.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from PIL import Image
from scipy.io import savemat

# {class id: images}, spread over the real ranges; class ids have gaps, and some classes have one image.
CUB_TRAIN, CUB_TEST = {1: 4, 2: 3, 50: 1, 100: 4}, {101: 4, 102: 3, 150: 1, 200: 2}
CARS_TRAIN, CARS_TEST = {1: 4, 2: 3, 50: 1, 98: 4}, {99: 4, 100: 3, 150: 1, 196: 2}
SOP_TRAIN, SOP_TEST = {1: 4, 2: 3, 700: 1, 11318: 4}, {11319: 4, 12000: 3, 20000: 1, 22634: 2}
INSHOP = {
    "train": {"id_00000002": 4, "id_00000007": 3, "id_00000010": 1, "id_00007970": 4},
    "query": {"id_00000001": 2, "id_00000004": 3, "id_00000009": 1},  # the last has no match in the gallery
    "gallery": {"id_00000001": 2, "id_00000004": 1, "id_00007982": 2},
}
MODES = ("RGB", "CMYK", "L", "P", "LA", "RGBA")
_TWIN = b"\x00\x05\x16\x07\x00\x02\x00\x00Mac OS X        "
_BOX = ("bbox_x1", "bbox_y1", "bbox_x2", "bbox_y2")


def write_picture(path: Path, number: int, *, side: int = 48) -> None:
    """A noisy picture, its mode by `number` (see MODES), with the twin that macOS archives add."""
    mode = MODES[number % len(MODES)]
    pixels = np.random.default_rng(number).integers(0, 256, (side, side + 8, 3), dtype=np.uint8)
    image = Image.fromarray(pixels).convert(mode)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, format="JPEG" if mode in ("RGB", "CMYK", "L") else "PNG")
    path.with_name(f"._{path.name}").write_bytes(_TWIN)


def write_list(file: Path, lines: Iterable[str]) -> None:
    """A list file as a Windows editor leaves it (byte-order mark, CRLF, blank lines), with its twin."""
    file.parent.mkdir(parents=True, exist_ok=True)
    ends = ("\r\n\r\n", "\r\n", "\r\n")
    text = "".join(line + ends[number % 3] for number, line in enumerate(lines))
    file.write_bytes(b"\xef\xbb\xbf" + text.encode() + b"\r\n \r\n")
    file.with_name(f"._{file.name}").write_bytes(_TWIN)


def litter(root: Path) -> Path:
    """`root`, with what a Mac leaves in folders and archives."""
    for folder in [path for path in root.rglob("*") if path.is_dir()]:
        (folder / ".DS_Store").write_bytes(b"\x00\x00\x00\x01Bud1")
        (root / "__MACOSX" / folder.relative_to(root)).mkdir(parents=True, exist_ok=True)
        (root / "__MACOSX" / folder.relative_to(root) / "._x.jpg").write_bytes(_TWIN)
    return root


def annotate(
    file: Path, name_field: str, names: list[str], classes: list[int] | None, extra: tuple[str, ...] = ()
) -> None:
    """A MATLAB struct array as in Cars-196: every value a 1 x 1 matrix or a text."""
    fields = [*([name_field] if name_field == "relative_im_path" else []), *_BOX]
    fields += [*(["class"] if classes else []), *([name_field] if name_field == "fname" else []), *extra]
    table = np.zeros((1, len(names)), dtype=[(field, object) for field in fields])
    for row, name in enumerate(names):
        for field in fields:
            table[field][0, row] = np.array([[1]], dtype=np.uint8)
        table[name_field][0, row] = name
        if classes:
            table["class"][0, row] = np.array([[classes[row]]], dtype=np.uint8)
    file.parent.mkdir(parents=True, exist_ok=True)
    savemat(file, {"annotations": table})


def _labels(*counts: dict[int, int]) -> list[int]:
    return [label for each in counts for label, count in each.items() for _ in range(count)]


def make_cub(root: Path, *, folder: str = "CUB_200_2011") -> Path:
    """CUB_200_2011.tgz: list files and images/; `folder` "" puts them into root, "a/a" doubles it."""
    base = root / folder
    rows = []
    for number, label in enumerate(_labels(CUB_TRAIN, CUB_TEST)):
        name = f"{label:03d}.Bird_{label}/Bird_{number:04d}.jpg"
        write_picture(base / "images" / name, number)
        rows.append((3 * number + 1, name, label))  # image ids with gaps
    write_list(base / "images.txt", (f"{image} {name}" for image, name, _ in rows))
    write_list(base / "image_class_labels.txt", (f"{image} {label}" for image, _, label in reversed(rows)))
    write_list(base / "train_test_split.txt", (f"{image} {image % 2}" for image, _, _ in rows))
    return litter(root)


def make_cars_joint(root: Path, *, folder: str = "car_ims") -> Path:
    """car_ims.tgz with cars_annos.mat; `folder` "car_ims/car_ims" doubles it."""
    labels = _labels(CARS_TEST, CARS_TRAIN)
    names = [f"{number:06d}.jpg" for number in range(1, len(labels) + 1)]
    for number, name in enumerate(names):
        write_picture(root / folder / name, number)
    annotate(
        root / "cars_annos.mat", "relative_im_path", [f"car_ims/{name}" for name in names], labels, extra=("test",)
    )
    return litter(root)


def make_cars_two_folders(root: Path, *, doubled: bool = False) -> Path:
    """cars_train.tgz, cars_test.tgz, car_devkit.tgz and the labels of the test part; both number from 00001."""
    labels = _labels(CARS_TRAIN, CARS_TEST)
    numbers = itertools.count()
    for part, chosen in (("cars_train", labels[0::2]), ("cars_test", labels[1::2])):
        names = [f"{number:05d}.jpg" for number in range(1, len(chosen) + 1)]
        for name in names:
            write_picture(root / (f"{part}/{part}" if doubled else part) / name, next(numbers))
        annotate(root / "devkit" / f"{part}_annos.mat", "fname", names, chosen if part == "cars_train" else None)
        if part == "cars_test":
            annotate(root / "cars_test_annos_withlabels.mat", "fname", names, chosen)
    return litter(root)


def make_sop(root: Path, *, folder: str = "Stanford_Online_Products") -> Path:
    """Stanford_Online_Products.zip: two lists and a folder per kind of product."""
    number = itertools.count()
    for file, counts in (("Ebay_train.txt", SOP_TRAIN), ("Ebay_test.txt", SOP_TEST)):
        lines = ["image_id class_id super_class_id path"]
        for label in _labels(counts):
            image = next(number)
            kind = ("bicycle", "chair", "coffee_maker")[label % 3]
            name = f"{kind}_final/{111085122871 + label}_{image}.JPG"
            write_picture(root / folder / name, image)
            lines.append(f"{2 * image + 1} {label} {label % 3 + 1} {name}")
        write_list(root / folder / file, lines)
    return litter(root)


def make_inshop(root: Path, *, images: str = "img", lists: str = "Eval") -> Path:
    """In-Shop: images in `images` (img, Img/img, img_highres, ...), the list in `lists` (Eval, Anno, "")."""
    number = itertools.count()
    rows = []
    for status, counts in INSHOP.items():
        for item, count in counts.items():
            for _ in range(count):
                name = f"WOMEN/Dresses/{item}/{next(number):02d}_1_front.jpg"
                write_picture(root / images / name, len(rows))
                rows.append(f"{'img/' + name:<70} {item} {status}")
    write_list(
        root / lists / "list_eval_partition.txt", [str(len(rows)), "image_name item_id evaluation_status", *rows]
    )
    return litter(root)
