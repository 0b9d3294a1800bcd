"""What tests need of processes: gloo ranks on the CPU, Triton's interpreter, a free port, permissions."""

from __future__ import annotations

import multiprocessing
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import torch


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def _enter(function: Callable[..., Any], rank: int, world_size: int, port: int, file: Path, arguments: tuple) -> None:
    os.environ |= {
        "LOCAL_RANK": str(rank),
        "RANK": str(rank),
        "NODE_RANK": "0",
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }
    torch.set_num_threads(1)
    torch.save(function(*arguments), file)


def run_processes(
    function: Callable[..., Any], *arguments: Any, world_size: int, folder: Path, timeout_s: float = 120
) -> list[Any]:
    """What `function(*arguments)`, importable by name, returned on each rank."""
    # A fork has what each process would import for seconds; it cannot use CUDA or MPS where they have begun.
    can_fork = sys.platform == "linux" and not torch.cuda.is_available()
    context, port = multiprocessing.get_context("fork" if can_fork else "spawn"), free_port()
    files = [folder / f"rank{rank}.pt" for rank in range(world_size)]
    processes = [
        context.Process(target=_enter, args=(function, rank, world_size, port, file, arguments))
        for rank, file in enumerate(files)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(timeout_s)
        assert [process.exitcode for process in processes] == [0] * world_size
    finally:
        for process in processes:
            process.kill()
    return [torch.load(file, weights_only=False) for file in files]


def run_python(code: str, *arguments: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """What this code prints in a process of its own, with these environment variables."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **variables},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def await_end(pid: int, timeout_s: float = 10) -> None:
    """Fails when a process, which may be no child of this one, still runs after this time."""
    deadline = time.monotonic() + timeout_s
    status = Path(f"/proc/{pid}/status")
    while status.exists() and "\nState:\tZ" not in status.read_text():
        assert time.monotonic() < deadline, f"process {pid} still runs"
        time.sleep(0.05)


@cache
def permissions_count() -> bool:
    """Whether a file's permissions stop this process: those of root, as a rule, do not."""
    with NamedTemporaryFile() as file:
        os.chmod(file.name, 0)
        return not os.access(file.name, os.R_OK)
