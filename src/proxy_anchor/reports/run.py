"""Result, summary and files of a finished run."""

from __future__ import annotations

import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import mean, median, stdev
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from proxy_anchor.data.bad_images import BAD_IMAGES_FILE
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.figures import recall_curves
from proxy_anchor.reports.gallery import choose_queries, retrieval_gallery
from proxy_anchor.reports.model_card import model_card
from proxy_anchor.reports.pages import write_run_page
from proxy_anchor.reports.tables import write_table
from proxy_anchor.training.callbacks.memory import PeakMemory, peak_memory
from proxy_anchor.training.callbacks.recall import RecallCallback, format_recall
from proxy_anchor.utils import RESULT_FILE, write_json, write_text

_LARGE = 100e6  # bytes of a checkpoint
_SELECTED_ON = {True: "held-out classes", False: "the test classes, as in the paper"}


def versions() -> dict[str, str]:
    """Versions of the packages that a result depends on."""
    found = {"python": platform.python_version()}
    for package in ("proxy_anchor", "torch", "torchvision", "pytorch-lightning", "timm", "faiss-cpu", "faiss-gpu"):
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def commit() -> str:
    """The checked-out commit, marked '-dirty' when tracked files differ from it; 'unknown' outside a checkout.

    PROXY_ANCHOR_COMMIT names it for a copy without `.git`.
    """
    if given := os.environ.get("PROXY_ANCHOR_COMMIT"):
        return given
    git = partial(subprocess.run, cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True)
    try:
        # An installed package may lie in a folder of another project's checkout.
        if git(["git", "rev-parse", "--show-prefix"]).stdout.strip() != "src/proxy_anchor/":
            return "unknown"
        return git(["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"


def device_name(device: torch.device) -> str:
    """'NVIDIA H100 80GB HBM3' or 'cpu (2 threads)'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def make_result(
    recall: RecallCallback,
    data: ImageDataModule,
    trainer: pl.Trainer,
    startup_seconds: dict[str, float],
    memory: PeakMemory,
    resumed: bool = False,
) -> dict[str, Any]:
    """The contents of result.json, plain types.

    Speeds are medians over epochs in images per second; an epoch that ended early counts only where there is no other.
    Peak memory is that of torch on a GPU, of the whole process on a CPU, see `PeakMemory`; None for a part that did not
    run.

    Args:
        recall: with the history of evaluations.
        data: of the run.
        trainer: after `fit`.
        startup_seconds: from the command to the first step, see `Startup`.
        memory: peaks of training and evaluation.
        resumed: whether the run was continued, so the first evaluation of its history belongs to another start.

    Raises:
        UsageError: when training ended before its first evaluation.
    """
    history = recall.history
    if not (trained := [each for each in history if each.epoch > 0]):
        raise UsageError("training ended before its first evaluation: there is nothing to report. Train a whole epoch.")
    device = trainer.strategy.root_device
    num_batches = trainer.fit_loop.batch_idx + 1  # of the last epoch, which max_steps or max_time may end early
    whole = trained
    if num_batches < trainer.num_training_batches and len(trained) > 1:
        whole, num_batches = trained[:-1], int(trainer.num_training_batches)
    return {
        "untrained": history[0].as_dict() if history[0].epoch == 0 else None,
        "selected": recall.selected.as_dict(),
        "selected_by": f"Recall@{recall.k[0]} on {_SELECTED_ON['validation' in data.splits.evaluated]}",
        "searched": data.splits.searched,
        "best": recall.best.as_dict(),
        "last": history[-1].as_dict(),
        "history": [each.as_dict() for each in history],
        "max_epochs": trainer.max_epochs,
        "seconds_per_epoch": median(each.train_seconds + each.eval_seconds for each in whole),
        "train_images_per_second": num_batches * data.batch_size / median(each.train_seconds for each in whole),
        "eval_images_per_second": data.num_eval_images / median(each.eval_seconds for each in trained),
        "peak_memory_gib": memory.gib() or peak_memory(device) / 2**30,
        "peak_memory_training_gib": memory.gib("training"),
        "peak_memory_evaluation_gib": memory.gib("evaluation"),
        "num_train_images": len(data.splits.train),
        "num_train_classes": data.splits.train.num_classes,
        "num_eval_images": data.num_eval_images,
        "num_skipped_images": len(data.splits.skipped),
        "label_noise": data.splits.num_mislabelled / len(data.splits.train),
        "startup_seconds": {
            **startup_seconds,
            "images": (data.loading or {}).get("seconds", 0.0),
            "first_evaluation": history[0].eval_seconds if history[0].epoch == 0 and not resumed else 0.0,
        },
        "loading": data.loading,
        "device": device_name(device),
        "num_devices": trainer.world_size,
        "versions": versions(),
        "commit": commit(),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
    }


def summary(result: dict[str, Any], folder: Path) -> str:
    """The lines that a run prints at its end."""
    held_out = result["selected"]["validation"] is not None
    lines = ["summary"]
    for name in ("untrained", *(["selected"] if held_out else []), "best", "last"):
        if (row := result[name]) is not None:
            recall = format_recall({int(k): value for k, value in row["recall"].items()})
            at = f"epoch {row['epoch']}" if row["epoch"] else "start"
            lines.append(f"  {name:<9}  {recall}  ({at})")
    lines.append(f"  {result['searched']} classes; epoch selected by {result['selected_by']}")
    if (ended := result["last"]["epoch"]) < result.get("max_epochs", ended):
        lines.append(f"  training ended early, after epoch {ended} of {result['max_epochs']}")
    lines.append(
        f"  {result['seconds_per_epoch']:.1f} s per epoch: {result['train_images_per_second']:.0f} images/s training, "
        f"{result['eval_images_per_second']:.0f} images/s evaluating, on {result['device']}"
    )
    if None not in (peaks := [result.get(f"peak_memory_{each}_gib") for each in ("training", "evaluation")]):
        lines.append(f"  peak memory {peaks[0]:.2f} GiB training, {peaks[1]:.2f} GiB evaluating")
    if skipped := result.get("num_skipped_images"):
        lines.append(f"  {skipped} training images cannot be read and were left out ({BAD_IMAGES_FILE} lists them)")
    lines += [f"  warning: {text}" for text in result.get("warnings", [])]
    seconds = result["startup_seconds"]
    lines.append(
        f"  {seconds['total']:.1f} s from the command to the first step: images {seconds['images']:.1f}, "
        f"first evaluation {seconds['first_evaluation']:.1f}, compilation {seconds['compilation']:.1f}"
    )
    lines.append(f"  run folder: {folder} (open its index.html)")
    lines.append(f"  search with it: python src/search.py checkpoint={folder}/best.ckpt gallery=DIR query=IMAGE")
    last = folder / "last.ckpt"
    if last.is_file() and last.stat().st_size > _LARGE:
        lines.append("  last.ckpt holds the optimizer's state and is needed only to continue: without it less is kept")
    return "\n".join(lines)


def fold_summary(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best common epoch of all folds, and the last, by mean Recall.

    Returns:
        {"selected", "best" (the same), "last": {"epoch", "recall": mean over folds, "deviation"}, "folds": results}.
    """
    # Early stopping ends folds at different epochs.
    epochs = [rows for rows in zip(*(fold["history"] for fold in results), strict=False) if rows[0]["epoch"] > 0]

    def combine(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
        values = {k: [row["recall"][k] for row in rows] for k in rows[0]["recall"]}
        return {
            "epoch": rows[0]["epoch"],
            "recall": {k: mean(each) for k, each in values.items()},
            "deviation": {k: stdev(each) for k, each in values.items()},
        }

    selected = max(map(combine, epochs), key=lambda row: next(iter(row["recall"].values())))
    return {
        "selected": selected,
        "selected_by": "the mean over class-disjoint folds of the training classes, one epoch for all",
        "searched": "validation",
        "best": selected,
        "last": combine(epochs[-1]),
        "folds": list(results),
    }


def write_folds(folder: Path, combined: dict[str, Any]) -> str:
    """Write result.json, table, curve and page of `fold_summary`; returns its means in percent for a terminal."""
    folds, epoch = combined["folds"], combined["selected"]["epoch"]
    rows = []
    for number, fold in enumerate(folds):
        recall = next(each["recall"] for each in fold["history"] if each["epoch"] == epoch)
        rows.append({"fold": f"fold{number}"} | {f"R@{k}": 100 * value for k, value in recall.items()})
    curve = recall_curves({"mean of the folds": folds}, k=int(next(iter(recall))))
    lines = []
    for name in ("selected", "last"):
        values = zip(combined[name]["recall"].items(), combined[name]["deviation"].values(), strict=True)
        numbers = "  ".join(f"@{k} {100 * mean:.1f} ± {100 * sd:.1f}" for (k, mean), sd in values)
        lines.append(f"mean over folds, {name} epoch {combined[name]['epoch']}: {numbers}")
    lines.append(write_table(folder, "folds", rows, {"recall_by_epoch": curve}, "\n\n".join(lines)))
    write_json(folder / RESULT_FILE, combined)
    return "\n".join(lines)


def finish_run(
    folder: Path, config: dict[str, Any], result: dict[str, Any], data: ImageDataModule, embeddings: Sequence[Tensor]
) -> None:
    """Write gallery.png, README.md, index.html and result.json into `folder`, and print the summary.

    Args:
        folder: the run folder.
        config: of the run, plain types.
        result: see `make_result`.
        data: of the run.
        embeddings: (N, D) of the selected epoch, [query] or [query, gallery].
    """
    queries = choose_queries(data.splits.query.labels, 8)
    retrieval_gallery(data.splits, embeddings, queries).save(folder / "gallery.png")
    write_text(folder / "README.md", model_card(config, result, data.describe()))
    write_run_page(folder, config, result, data.describe(), data.splits, embeddings, queries)
    write_json(folder / RESULT_FILE, result)  # last: it marks the run as finished
    print(summary(result, folder), flush=True)
