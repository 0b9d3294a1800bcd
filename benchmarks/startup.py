"""Start-up time of the commands, and of importing PyTorch alone.

    python benchmarks/startup.py

Each command runs in a separate process. Appends a row per command to results/startup.jsonl.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from statistics import median

from common import HERE, make_parser, report, where_it_ran

SRC = HERE.parent / "src"
TINY = [
    "dataset.load.train_classes=8",
    "dataset.load.test_classes=8",
    "dataset.load.images_per_class=8",
    "data.batch_size=16",
    "data.num_workers=0",
    "trainer.max_epochs=1",
    "trainer.enable_progress_bar=false",
]
IMPORTS = "import pytorch_lightning, timm"
COMMANDS: dict[str, Sequence[str]] = {
    "import torch": ["-c", "import torch"],
    "import proxy_anchor": ["-c", "import proxy_anchor"],
    "train.py --help": [str(SRC / "train.py"), "--help"],
    "train.py, a wrong key": [str(SRC / "train.py"), "optimizer.rate=1"],
    "evaluate.py --help": [str(SRC / "evaluate.py"), "--help"],
    "train.py, one tiny epoch": [str(SRC / "train.py"), *TINY],
    IMPORTS: ["-c", IMPORTS],
}


def seconds_of(command: Sequence[str], folder: str) -> float:
    """Wall time of a Python process."""
    start = time.perf_counter()
    subprocess.run([sys.executable, *command], cwd=folder, capture_output=True, check=False)
    return time.perf_counter() - start


def main() -> None:
    """Time, print, record."""
    arguments = make_parser(__doc__, repeats=5).parse_args()
    names = list(COMMANDS)[:3] if arguments.quick else list(COMMANDS)
    rounds = 1 if arguments.quick else arguments.repeats
    found: dict[str, list[float]] = {name: [] for name in names}
    with tempfile.TemporaryDirectory() as folder:
        for number in range(rounds + 1):
            for name in names:
                seconds = seconds_of(COMMANDS[name], folder)
                if number:  # the first round fills the file system's cache and draws the data set
                    found[name].append(seconds)
    reference = median(found["import torch"])
    rows = [
        {"command": name, "seconds": median(times), "ratio_to_import_torch": median(times) / reference}
        for name, times in found.items()
    ]
    report("Start-up", rows, arguments.output / "startup.jsonl", where_it_ran(arguments.device))


if __name__ == "__main__":
    main()
