"""What PyTorch raises where a setting is the reason, as one line with the key to set."""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import nn

from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.errors import UsageError
from proxy_anchor.training.callbacks.memory import peak_memory

_UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}


@contextmanager
def explained(trainer: pl.Trainer, learner: nn.Module, data: ImageDataModule) -> Iterator[None]:
    """Raise UsageError for memory of the card that does not suffice, and for an operation that is not repeatable."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        text = _out_of_memory(error, trainer, learner, data)
        # The frames hold the step's tensors, which the next job of a sweep would find missing.
        traceback.clear_frames(error.__traceback__)
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        raise UsageError(text) from None
    except RuntimeError as error:
        if "does not have a deterministic implementation" not in str(error):
            raise
        operation = str(error).split(" does not")[0]
        raise UsageError(
            f"deterministic=true: {operation} has no repeatable form on this device; add trainer.deterministic=warn to go on "
            "where there is none, or choose another backbone or loss."
        ) from error


def largest_batch(batch: int, base: int, needed: int, capacity: int) -> int:
    """How many images would fit if memory were `base` bytes and as much again for each image, `needed` with `batch` of them.

    Below `batch`, and at least 0. As the step stopped before its end, it may have needed more than is known.
    """
    per_image = max(needed - base, 1) / batch
    return max(0, min(batch - 1, int((capacity - base) / per_image)))


def memory_without_images(learner: nn.Module, data: ImageDataModule) -> int:
    """Bytes that a step takes whatever its batch: weights, their gradients and two moments each, images kept on the card."""
    tensors = [*learner.parameters(), *learner.buffers()]
    weights = sum(each.numel() * each.element_size() for each in tensors)
    trained = sum(each.numel() * each.element_size() for each in tensors if each.requires_grad)
    kept: Any = data.loading or {"cache": "none"}
    return weights + 3 * trained + (kept["bytes"] if kept["cache"] == "gpu" else 0)


def _out_of_memory(
    error: torch.OutOfMemoryError, trainer: pl.Trainer, learner: nn.Module, data: ImageDataModule
) -> str:
    device = trainer.strategy.root_device
    peak, capacity = peak_memory(device), _capacity(device)
    figures = f"the peak was {peak / 2**30:.1f} GiB of {capacity / 2**30:.1f} GiB that this process can have"
    if data.loading is None:
        return (
            f"out of memory while the images were decoded onto the card: {figures}. Set data.cache=ram, disk or none."
        )
    evaluating = _is_evaluating(error)
    key, batch = ("eval_batch_size", data.eval_batch_size) if evaluating else ("batch_size", data.batch_size)
    here = batch if evaluating else batch // trainer.world_size  # images of this process
    asked = re.search(r"Tried to allocate ([\d.]+) (\w+)", str(error))
    needed = peak + int(float(asked[1]) * _UNITS.get(asked[2], 1)) if asked else peak
    fits = largest_batch(here, memory_without_images(learner, data), needed, capacity) * (batch // here)
    estimate = "estimated as if all but weights, optimizer and kept images grew with the batch"
    repairs = [f"data.{key}={fits} or less" if fits else "a smaller network", "trainer.precision=bf16-mixed"]
    repairs += ["data.cache=ram"] if data.loading["cache"] == "gpu" else []
    return (
        f"out of memory in {'evaluation' if evaluating else 'training'} with data.{key}={batch}: {figures}. At most {fits} "
        f"images fit ({estimate}): set {', or '.join(repairs)}."
    )


def _is_evaluating(error: BaseException) -> bool:
    """Whether the error comes out of an evaluation; the trainer has forgotten by now what it was doing."""
    files = (Path(frame.f_code.co_filename).name for frame, _ in traceback.walk_tb(error.__traceback__))
    return "evaluation_loop.py" in files


def _capacity(device: torch.device) -> int:
    """Bytes: what torch holds of a GPU and what is free on it, or the main memory."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
