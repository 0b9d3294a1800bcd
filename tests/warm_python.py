"""A Python that has imported the libraries already and runs each command in a fork of itself: seconds less per command.

What a command sees is a new process: its own arguments, folder, environment, standard streams and random numbers, the project's
own modules not yet imported. Only the hash seed and the libraries' modules come from the parent.

As a script: the parent. Reads a command per line of its input, as JSON, and answers with the exit code.
"""

from __future__ import annotations

import atexit
import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

# Read when a library or Python itself starts: a command with other values of these needs a process of its own.
_READ_AT_START = ("OMP_", "MKL_", "OPENBLAS_", "PYTHON", "LD_", "CUDA_", "MALLOC_", "KMP_")
LIBRARIES = (
    "faiss",
    "hydra",
    "matplotlib.figure",
    "matplotlib.backends.backend_agg",
    "numpy",
    "PIL.Image",
    "pytorch_lightning",
    "pytorch_metric_learning.losses",
    "timm",
    "torch.utils.tensorboard",
    "torchvision.transforms.v2",
    "tqdm",
)


def _at_start(environment: Mapping[str, str]) -> dict[str, str]:
    return {key: value for key, value in environment.items() if key.startswith(_READ_AT_START)}


class WarmPython:
    """Runs scripts in forks of one process, which starts with the first of them."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()
        self._environment = _at_start(os.environ)

    def fits(self, environment: Mapping[str, str]) -> bool:
        """Whether a fork would see this environment as a new process does."""
        return hasattr(os, "fork") and _at_start(environment) == self._environment

    def run(
        self, command: Sequence[str], *, cwd: Path, env: Mapping[str, str], timeout_s: float
    ) -> subprocess.CompletedProcess[str]:
        """`python COMMAND`, with captured output. Raises TimeoutExpired as subprocess.run does."""
        with self._lock, TemporaryDirectory() as folder:
            if self._process is None:
                pipe = subprocess.PIPE
                self._process = subprocess.Popen([sys.executable, __file__], stdin=pipe, stdout=pipe, text=True)
                atexit.register(self._process.kill)
            request = {"command": list(command), "cwd": str(cwd), "env": dict(env), "out": folder, "timeout": timeout_s}
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
            code = json.loads(self._process.stdout.readline())
            stdout, stderr = ((Path(folder) / name).read_text() for name in ("stdout", "stderr"))
        if code is None:
            raise subprocess.TimeoutExpired(list(command), timeout_s, stdout, stderr)
        return subprocess.CompletedProcess(list(command), code, stdout, stderr)


def _serve() -> dict | None:
    """In the parent: nothing, once its input ends. In a fork: what it is to run."""
    import time

    requests, answers = os.fdopen(os.dup(0)), os.fdopen(os.dup(1), "w")
    nothing = os.open(os.devnull, os.O_RDWR)
    os.dup2(nothing, 0)
    os.dup2(nothing, 1)
    for line in requests:
        request = json.loads(line)
        child = os.fork()
        if not child:
            requests.close()
            answers.close()
            return request
        deadline = time.monotonic() + request["timeout"]
        while not (ended := os.waitpid(child, os.WNOHANG))[0]:
            if time.monotonic() > deadline:
                os.kill(child, 9)
                os.waitpid(child, 0)
                break
            time.sleep(0.01)
        print(json.dumps(os.waitstatus_to_exitcode(ended[1]) if ended[0] else None), file=answers, flush=True)
    return None


def _become(request: dict) -> str:
    """Make this fork the process that the command would have started; returns the script."""
    import random

    import numpy as np

    for number, name in ((1, "stdout"), (2, "stderr")):
        file = os.open(os.path.join(request["out"], name), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    random.seed()
    np.random.seed(int.from_bytes(os.urandom(4), "little"))  # noqa: NPY002  (what a new process has)
    sys.argv = request["command"]
    sys.path[0] = os.path.dirname(request["command"][0])
    return request["command"][0]


if __name__ == "__main__":
    import gc
    import importlib
    import runpy
    import traceback

    for library in LIBRARIES:
        try:
            importlib.import_module(library)
        except ImportError:
            continue  # an optional one
    gc.freeze()  # a fork's collector leaves the libraries' memory alone, and so shared
    if (asked := _serve()) is not None:
        script, code = _become(asked), 0
        try:
            runpy.run_path(script, run_name="__main__")
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if code and not isinstance(end.code, int):
                print(end.code, file=sys.stderr)
        except BaseException:
            traceback.print_exc()
            code = 1
        # What Python does at its end, but for taking the libraries apart, which takes a second.
        threading._shutdown()
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
