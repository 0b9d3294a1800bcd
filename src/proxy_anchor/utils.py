"""Small tools for every room: files, processor cores, memory, device-to-host copies."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError
from typing import TYPE_CHECKING, Any

from proxy_anchor.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor

FAILURE_FILE = "error.txt"  # in the folder of a failed run: the trace, and the reason as its last line

# To save and to stop; SIGUSR2 is submitit's, which SLURM sends to all processes of a job.
NOTICES = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]

JOBS_AT_ONCE = "PROXY_ANCHOR_JOBS_AT_ONCE"  # set by a launcher: how many jobs share this host's cores


def usable_cores() -> int:
    """Those that it may use, or all (macOS, Windows)."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def own_cores() -> int:
    """Its share of them, at least 1: they are divided among a host's ranks and a launcher's jobs."""
    return max(
        1, usable_cores() // math.prod(int(os.environ.get(each, "1")) for each in ("LOCAL_WORLD_SIZE", JOBS_AT_ONCE))
    )


@cache
def have_triton() -> bool:
    """Whether there is Triton (its wheels exist for Linux only) and what it builds its link to the card with."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # builds the link, for which it needs a C compiler
    except (ImportError, RuntimeError, OSError, CalledProcessError):
        return False
    return True


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let the C library keep what tensors free for the next tensors, instead of giving it back to the system.

    By default glibc maps every large block anew and unmaps it when it is freed, so that each layer of a network writes to
    pages that the system first has to find and clear: on a CPU that costs more than the layer. The process then holds its
    peak of memory until it ends. Returns whether it was done: only with glibc (Linux).
    """
    if not sys.platform.startswith("linux"):
        return False
    with suppress(OSError, AttributeError):  # another C library (musl) has no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    return False


class Fetch:
    """A tensor on its way to the host. The copy is queued here; only who looks at it waits, and only for this copy."""

    def __init__(self, values: Tensor) -> None:
        self._host, self._copied = values, None
        if values.is_cuda:
            import torch

            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._copied = torch.cuda.current_stream(values.device).record_event()

    def get(self) -> Tensor:
        """The tensor, on the CPU."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._host


RESULT_FILE = "result.json"
CLASSES_FILE = "classes.json"  # the classes that a run trains on and searches


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON aside and rename it, so that a reader never sees half a file."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write text aside and rename it. File names that are not UTF-8 are written with backslashes."""
    aside = file.with_name(file.name + ".tmp")
    aside.write_text(text, encoding="utf-8", errors="backslashreplace")
    aside.replace(file)


def read_result(folder: Path) -> dict[str, Any] | None:
    """The result of a finished run, or None. Raises UsageError when its file is damaged."""
    try:
        return json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # no JSON, or no text
        raise UsageError(
            f"{folder / RESULT_FILE} is damaged ({error}): remove it, and the run's own command makes it again."
        ) from error


def selecting_recall(result: Mapping[str, Any]) -> float:
    """The smallest K's Recall that selected the epoch of a finished run (held-out classes, folds, or test), in [0, 1]."""
    selected = result["selected"]
    return next(iter((selected.get("validation") or selected["recall"]).values()))


def rank() -> int:
    """This process's place among those that train together, whoever started them: this package, torchrun or SLURM."""
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def one_of_several() -> bool:
    """Whether this process trains together with others, whoever started them: this package, torchrun or srun."""
    return "LOCAL_RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
