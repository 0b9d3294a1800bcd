"""Seconds from the command to the first step, by compiler cache.

    python benchmarks/fast_start.py dataset=cars backbone=efficientnet_lite0 dataset.root=DIR speed=fast

Runs `src/train.py` with these overrides for four epochs, four times (`+repeats=N`: N + 1 times), each in a separate
process; they share a compiler cache that is empty at first. Appends a row to fast_start.jsonl for the first run, and
one for the run with the median start of the others, in benchmarks/results or in the folder of `+output=DIR`.

    start_s       from the command to the first step; of which
    images_s      decoding, once
    first_eval_s  the evaluation before training
    compile_s     compiling, and the comparison with the plain network's gradient
    other_s       importing, building the network, moving it to the GPU
    train_per_s   training images per second, the median over the epochs
    wall_s        the whole command with four epochs
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from common import HERE, report, split_output, where_it_ran

REPEATS = 3
OF_THIS_MACHINE = ("dataset.root=", "backbone.weights=")
CACHES = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR")


def start_once(overrides: list[str], folder: Path, name: str) -> dict[str, Any]:
    """One row; `folder`: of the caches and the run."""
    environment = {**os.environ, **{each: str(folder / each.lower()) for each in CACHES}}
    own = [f"run={name}", f"hydra.run.dir={folder / name}"]
    command = [sys.executable, str(HERE.parent / "src" / "train.py"), "trainer.max_epochs=4", *overrides, *own]
    began = time.perf_counter()
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    wall = time.perf_counter() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result = json.loads((folder / name / "result.json").read_text(encoding="utf-8"))
    seconds = result["startup_seconds"]
    parts = {
        "images_s": seconds["images"],
        "first_eval_s": seconds["first_evaluation"],
        "compile_s": seconds["compilation"],
    }
    return {
        "overrides": " ".join(each for each in overrides if not each.startswith(OF_THIS_MACHINE)),
        "compiler_cache": name,
        "start_s": seconds["total"],
        **parts,
        "other_s": seconds["total"] - sum(parts.values()),
        "train_per_s": result["train_images_per_second"],
        "wall_s": wall,
    }


def main(arguments: list[str]) -> None:
    """Run, print, record."""
    overrides, output = split_output(arguments, __doc__)
    repeats = next((int(each.partition("=")[2]) for each in overrides if each.startswith("+repeats=")), REPEATS)
    overrides = [each for each in overrides if not each.startswith("+repeats=")]
    with tempfile.TemporaryDirectory() as folder:
        first = start_once(overrides, Path(folder), "empty")
        others = [start_once(overrides, Path(folder), f"filled{i}") for i in range(repeats)]
    median = sorted(others, key=lambda row: row["start_s"])[repeats // 2]
    spread = [round(row["start_s"], 2) for row in others]
    rows = [first, {**median, "compiler_cache": "filled", "all_start_s": spread}]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report("From the command to the first step", rows, output / "fast_start.jsonl", where_it_ran(device))


if __name__ == "__main__":
    main(sys.argv[1:])
