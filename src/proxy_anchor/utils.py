"""Shared helpers: files, CPU count, memory, ranks."""

from __future__ import annotations

import ctypes
import json
import math
import os
import signal
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from subprocess import CalledProcessError
from typing import Any

from proxy_anchor.errors import UsageError

FAILURE_FILE = "error.txt"  # in the folder of a failed run: the traceback; its last line is the reason

# A run saves and stops on these. SIGUSR2: submitit asks SLURM to send it to all processes of a job.
STOP_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGUSR1", "SIGUSR2") if hasattr(signal, name)]

JOBS_AT_ONCE = "PROXY_ANCHOR_JOBS_AT_ONCE"  # set by a launcher: number of jobs that share this host's CPUs


def available_cpus() -> int:
    """Number of CPUs for this process, at least 1.

    The CPUs of the host are divided among its ranks and the jobs of a launcher.
    """
    # macOS and Windows have no CPU affinity.
    total = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sharing = math.prod(int(os.environ.get(each, "1")) for each in ("LOCAL_WORLD_SIZE", JOBS_AT_ONCE))
    return max(1, total // sharing)


@cache
def have_triton() -> bool:
    """Whether Triton is installed and can compile for this GPU."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # compiles a C extension, which needs a C compiler
    except (ImportError, RuntimeError, OSError, CalledProcessError):
        return False
    return True


_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # malloc.h


def keep_freed_memory() -> bool:
    """Let glibc keep freed memory for the next tensors.

    By default glibc maps each large block anew and unmaps it when it is freed, so every layer of a network writes to
    pages that the kernel has to find and clear first. On a CPU this costs more than the layer itself. With this
    setting the process holds its peak memory until it ends. Returns whether it took effect: with glibc (Linux) only.
    """
    with suppress(OSError, AttributeError, TypeError):  # other C libraries (musl, macOS, Windows) have no mallopt
        mallopt = ctypes.CDLL(None).mallopt
        return bool(mallopt(_M_MMAP_THRESHOLD, 2**30)) and bool(mallopt(_M_TRIM_THRESHOLD, 2**31 - 1))
    return False


RESULT_FILE = "result.json"
CLASSES_FILE = "classes.json"  # the classes that a run trains on and searches


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write JSON atomically."""
    write_text(file, json.dumps(content, indent=2) + "\n")


def write_text(file: Path, text: str) -> None:
    """Write a string atomically: to a temporary file, which is then renamed.

    Characters that UTF-8 cannot encode (file names in another encoding) are escaped with backslashes.
    """
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(text, encoding="utf-8", errors="backslashreplace")
    temporary.replace(file)


def read_result(folder: Path) -> dict[str, Any] | None:
    """Result of a finished run, or None. Raises UsageError for a damaged file."""
    try:
        return json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except ValueError as error:  # not JSON, or not UTF-8
        raise UsageError(
            f"{folder / RESULT_FILE} is damaged ({error}): remove it, and the run's own command writes it again."
        ) from error


def selecting_recall(result: Mapping[str, Any]) -> float:
    """Recall in [0, 1] that selected the epoch of a finished run.

    Recall at the smallest K, on held-out classes, folds or test classes.
    """
    selected = result["selected"]
    return next(iter((selected.get("validation") or selected["recall"]).values()))


def rank() -> int:
    """Global rank of this process, for launches by this package, torchrun or SLURM."""
    for name in ("RANK", "SLURM_PROCID"):
        if name in os.environ:
            return int(os.environ[name])
    return 0


def is_distributed() -> bool:
    """Whether this process is one rank of several (this package, torchrun, srun)."""
    return "LOCAL_RANK" in os.environ or int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > 1
