"""What a finished run leaves behind: result.json and a summary of a few lines."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import torch

from proxy_anchor.training.recall_callback import EpochResult, format_recall


def versions() -> dict[str, str]:
    """Versions of what decides a number, for the record."""
    found = {"python": platform.python_version()}
    for package in ("proxy_anchor", "torch", "torchvision", "pytorch-lightning", "timm", "faiss-cpu", "faiss-gpu"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def device_name(device: torch.device) -> str:
    """'NVIDIA H100 80GB HBM3' or 'cpu (2 threads)'."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({torch.get_num_threads()} threads)"


def make_result(
    history: Sequence[EpochResult],
    best: EpochResult,
    *,
    images_per_epoch: int,
    eval_images: int,
    set_name: str,
    device: torch.device,
) -> dict[str, Any]:
    """Plain types: untrained, best and last evaluation, what selected the best, seconds, rates, versions.

    images_per_epoch: training images that one epoch sees. Rates are medians over epochs, in images per second.
    """
    trained = [each for each in history if each.epoch > 0]
    result: dict[str, Any] = {
        "untrained": history[0].as_dict() if history[0].epoch == 0 else None,
        "best": best.as_dict(),
        "last": history[-1].as_dict(),
        "best_selected_by": f"Recall@{next(iter(best.recall))} on the {set_name} classes",
        "history": [each.as_dict() for each in history],
        "device": device_name(device),
        "versions": versions(),
    }
    if trained:
        result["seconds_per_epoch"] = median(each.train_seconds + each.eval_seconds for each in trained)
        result["train_images_per_second"] = images_per_epoch / median(each.train_seconds for each in trained)
        result["eval_images_per_second"] = eval_images / median(each.eval_seconds for each in trained)
    return result


def summary(result: dict[str, Any], folder: Path) -> str:
    """The closing lines of a run."""
    lines = []
    for name in ("untrained", "best", "last"):
        row = result[name]
        if row is not None:
            recall = format_recall({int(k): value for k, value in row["recall"].items()})
            at = f"epoch {row['epoch']}" if row["epoch"] else "start"
            lines.append(f"  {name:<9}  {recall}  ({at})")
    lines.append(
        f"  best epoch selected by {result['best_selected_by']}, as in the paper; compare losses by the last too"
    )
    if "seconds_per_epoch" in result:
        lines.append(
            f"  {result['seconds_per_epoch']:.1f} s per epoch: {result['train_images_per_second']:.0f} images/s training, "
            f"{result['eval_images_per_second']:.0f} images/s evaluating, on {result['device']}"
        )
    lines.append(f"  run folder: {folder}")
    return "\n".join(["summary", *lines])
