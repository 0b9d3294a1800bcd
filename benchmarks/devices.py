"""Training and evaluation on several GPUs of one host, relative to one GPU.

    python benchmarks/devices.py --devices 1 2 4 dataset=sop dataset.root=DIR data.cache_side=256 speed=fast

Each row is a run of `src/train.py` with these overrides: first with `data.batch_size` (or the recipe's) on every GPU,
then with the same batch divided over the GPUs. benchmarks/made_up_sop.py writes a suitable data set. Appends a row
per run to results/devices.jsonl.

    kept, batch     which batch equals the first row's; the global batch
    train_per_s     images per second, the median over epochs
    efficiency      of that, relative to N times the first row's (one GPU)
    eval_per_s, eval_s  of an evaluation: embedding on all GPUs, gathering, searching
    recall_at_1     of the best epoch, in percent
    start_s         from the command to the first step
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
from common import HERE, append_rows, where_it_ran
from omegaconf import OmegaConf

from proxy_anchor.reports.tables import format_table


def train(overrides: list[str], folder: Path, devices: int, batch: int | None) -> dict[str, Any]:
    """result.json of one run, and its batch."""
    run = f"devices{devices}_batch{batch}"
    several = [f"trainer.devices={devices}"] + (["trainer.strategy=ddp"] if devices > 1 else [])
    given = [] if batch is None else [f"data.batch_size={batch}"]
    own = [*several, *given, f"run={run}", f"hydra.run.dir={folder / run}"]
    command = [sys.executable, str(HERE.parent / "src" / "train.py"), *overrides, *own]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    result = json.loads((folder / run / "result.json").read_text(encoding="utf-8"))
    return {**result, "batch": OmegaConf.load(folder / run / "config.yaml").data.batch_size}


def make_row(result: dict[str, Any], first: dict[str, Any], kept: str) -> dict[str, Any]:
    """One line of the table; `first`: the run on one GPU; `kept`: which batch both share."""
    trained = [each for each in result["history"] if each["epoch"]]
    return {
        "devices": result["num_devices"],
        "kept": kept,
        "batch": result["batch"],
        "train_per_s": result["train_images_per_second"],
        "efficiency": result["train_images_per_second"] / (result["num_devices"] * first["train_images_per_second"]),
        "eval_per_s": result["eval_images_per_second"],
        "eval_s": median(each["eval_seconds"] for each in trained),
        "s_per_epoch": result["seconds_per_epoch"],
        "recall_at_1": 100 * next(iter(result["best"]["recall"].values())),
        "start_s": result["startup_seconds"]["total"],
    }


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4], help="numbers of GPUs, 1 first")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the .jsonl record")
    parser.add_argument(
        "--keep",
        nargs="+",
        default=["gpu", "total"],
        choices=["gpu", "total"],
        help="the batch per GPU, or that of all",
    )
    # Parsed first: --devices would read the following override as a number.
    overrides = [each for each in sys.argv[1:] if "=" in each and not each.startswith("--")]
    given = parser.parse_args([each for each in sys.argv[1:] if each not in overrides])
    if given.devices[0] != 1:
        parser.error("--devices starts with 1, to which the others are compared")
    file = given.output.absolute() / "devices.jsonl"
    where = where_it_ran(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    shown = " ".join(each for each in overrides if not each.startswith("dataset.root="))
    rows: list[dict[str, Any]] = []

    def add(row: dict[str, Any]) -> None:
        print(row, flush=True)
        append_rows(file, [{"overrides": shown, **row, **where}])  # at once: a run takes minutes
        rows.append(row)

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        first = train(overrides, folder, 1, None)
        add(make_row(first, first, "-"))
        for kept in given.keep:
            for devices in given.devices[1:]:
                result = train(overrides, folder, devices, first["batch"] * (devices if kept == "gpu" else 1))
                add(make_row(result, first, kept))
    print(f"\nSeveral GPUs of one host; {where['device']}, commit {where['commit']}\n")
    print(f"{format_table(rows, decimals=2)}\n\nadded to {file}")


if __name__ == "__main__":
    main()
