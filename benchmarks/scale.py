"""Cost of 10 times, 1,000 times and all of the internet's images, computed from assumptions.

    python benchmarks/scale.py       # the tables of docs/scale.md

N training images in C classes, G gallery images, D dimensions, P GPUs, b images per GPU and step. After a change of an
assumption run benchmarks/tables.py; a test compares its tables with the document.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

D = 512
BATCH_PER_GPU = 180
TRAIN_RATE = 5_000  # images/s of one GPU: EfficientNet-Lite0, 224 px, speed=fast
EMBED_RATE = 10_000  # images/s of one GPU, forward only
DECODE_RATE = 100  # images/s of one core, from JPEG
EFFICIENCY = 0.85  # of P GPUs, relative to P times one
STORED_BYTES = 50_000  # of an image: JPEG, shorter side about 256
DECODED_BYTES = 256 * 256 * 3
FLOPS = 40e12  # of one GPU in a float32 matrix product
QUERIES = 100_000  # at most that many search the gallery in an evaluation
PQ_BYTES = 64 + 8  # of a vector in IVF-PQ: 64 codes of 8 bits, and its id
PROBES = 64  # lists per query
CARD_BYTES = 80e9


@dataclass(frozen=True)
class Scale:
    """One column; epochs falls with N, for a similar number of steps."""

    name: str
    images: float
    classes: float
    gallery: float
    gpus: int
    epochs: int

    @property
    def lists(self) -> int:
        """Lists of IVF: the power of two next above 4 sqrt(G)."""
        return 1 << int(4 * self.gallery**0.5).bit_length()


SCALES = (
    Scale("SOP", 59_551, 11_318, 60_502, 1, 60),
    Scale("10 x", 595_510, 113_180, 605_020, 4, 60),
    Scale("1,000 x", 59_551_000, 11_318_000, 60_502_000, 32, 5),
    Scale("internet", 1e10, 1e8, 1e10, 256, 1),
)


def size(count: float) -> str:
    """Bytes in decimal units, three digits."""
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} PB"


def duration(seconds: float) -> str:
    """Seconds in a readable unit."""
    for unit, length in (("s", 60), ("min", 60), ("h", 48), ("days", 730)):
        if seconds < length:
            return f"{seconds:.2g} {unit}" if seconds < 10 else f"{seconds:.0f} {unit}"
        seconds /= {"s": 60, "min": 60, "h": 24, "days": 365}[unit]
    return f"{seconds:.0f} years"


def number(count: float) -> str:
    """A count with thousands separated; three digits of a large one."""
    digits = len(str(int(count))) - 3 if count >= 1e6 else 0
    return f"{round(count, -digits):,.0f}"


def queries(scale: Scale) -> float:
    """Those of an evaluation."""
    return min(scale.gallery, QUERIES)


TRAINING: dict[str, Callable[[Scale], str]] = {
    "images N": lambda s: number(s.images),
    "classes C": lambda s: number(s.classes),
    "GPUs P (assumed)": lambda s: number(s.gpus),
    "epochs E (assumed)": lambda s: str(s.epochs),
    "files: N x 50 kB": lambda s: size(s.images * STORED_BYTES),
    "decoded at 256 px: N x 196,608 B": lambda s: size(s.images * DECODED_BYTES),
    "steps: E N / 180 P": lambda s: number(s.epochs * s.images / (BATCH_PER_GPU * s.gpus)),
    "training: E N / (5,000 P/s), over 0.85 if P > 1": lambda s: duration(
        s.epochs * s.images / (s.gpus * TRAIN_RATE * (EFFICIENCY if s.gpus > 1 else 1))
    ),
    "images/s to feed: 5,000 P": lambda s: number(s.gpus * TRAIN_RATE),
    "cores that decode them: / 100": lambda s: number(s.gpus * TRAIN_RATE / DECODE_RATE),
    "bytes/s to read: x 50 kB": lambda s: size(s.gpus * TRAIN_RATE * STORED_BYTES),
    "global batch B: 180 P": lambda s: number(BATCH_PER_GPU * s.gpus),
    "gathered per step: 4 B D": lambda s: size(4 * BATCH_PER_GPU * s.gpus * D),
    "proxies, gradient, moments: 16 C D": lambda s: size(16 * s.classes * D),
    "of these per GPU, divided: / P": lambda s: size(16 * s.classes * D / s.gpus),
    "similarities per GPU: 4 B C / P": lambda s: size(4 * BATCH_PER_GPU * s.classes),
}
GALLERY: dict[str, Callable[[Scale], str]] = {
    "images in the gallery G": lambda s: number(s.gallery),
    "embedding them: G / (P x 10,000/s)": lambda s: duration(s.gallery / (s.gpus * EMBED_RATE)),
    "embeddings, float32: 4 G D": lambda s: size(4 * s.gallery * D),
    "exact search, Q = min(G, 100,000): 2 Q G D / (P x 40 TFLOP/s)": lambda s: duration(
        2 * queries(s) * s.gallery * D / (s.gpus * FLOPS)
    ),
    "Q = G instead": lambda s: duration(2 * s.gallery**2 * D / (s.gpus * FLOPS)),
    "HNSW, 32 links, 8-bit: G (D + 256 B)": lambda s: size(s.gallery * (D + 256)),
    "IVF-PQ, 64 codes: 72 G": lambda s: size(s.gallery * PQ_BYTES),
    "lists L: 4 sqrt(G), to a power of two": lambda s: f"{s.lists:,}",
    "to train them: 40 L vectors of 4 D": lambda s: size(40 * s.lists * 4 * D),
    "vectors that a query meets: 64 G / L": lambda s: number(PROBES * s.gallery / s.lists),
    "shards of 64 GB": lambda s: number(-(-s.gallery * PQ_BYTES // 64e9)),
}


def table(rows: dict[str, Callable[[Scale], str]]) -> str:
    """Markdown: a row per quantity with its formula, a column per scale."""
    head = "| | " + " | ".join(scale.name for scale in SCALES) + " |"
    lines = [head, "|---|" + "---:|" * len(SCALES)]
    lines += [f"| {name} | " + " | ".join(value(scale) for scale in SCALES) + " |" for name, value in rows.items()]
    return "\n".join(lines)


if __name__ == "__main__":
    print(table(TRAINING), table(GALLERY), sep="\n\n")
