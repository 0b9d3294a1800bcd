"""Run the entry points as a user does: as commands, from a folder of the user's own."""

from __future__ import annotations

import os
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from copy import deepcopy
from functools import cache, partial
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra import compose, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, open_dict

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError
from proxy_anchor.training import run_lock
from proxy_anchor.utils import STOP_SIGNALS

# A command composes three configs, for a tenth of a second each: the parser in C takes less, and the defaults, with
# which a command compares its own config, are composed once.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


@cache
def _defaults(name: str, overrides: tuple[str, ...], sources: str) -> DictConfig:
    return compose(name, list(overrides))


checks.compose = lambda name, overrides: deepcopy(
    _defaults(name, tuple(overrides), str(GlobalHydra.instance().config_loader().get_search_path()))
)

REPOSITORY = Path(__file__).resolve().parent.parent
SHARED = REPOSITORY.parent / "shared"

# A data set and a network that take a second: 8 + 8 classes of 8 images.
TINY_GLYPHS = [
    "dataset.load.train_classes=8",
    "dataset.load.test_classes=8",
    "dataset.load.images_per_class=8",
    "data.batch_size=16",
    "data.num_workers=0",
    "embedding_dim=16",
    "trainer.max_epochs=1",
    "trainer.accelerator=cpu",
    "logger=csv",
]

# A folder of pictures of one's own, on the CPU; dataset.root is missing.
TINY_FOLDER = [
    "dataset=folder",
    "dataset.images.crop=32",
    "dataset.images.resize=36",
    "backbone=test_resnet",
    "backbone.pretrained=false",
    "batch_norm=train",
    "optimizer.warmup_epochs=0",
    "embedding_dim=8",
    "data.batch_size=8",
    "data.num_workers=0",
    "trainer.accelerator=cpu",
    "logger=csv",
]


def run_entry(
    script: str, *arguments: str, cwd: Path, timeout_s: float = 300, fresh: bool | None = None
) -> subprocess.CompletedProcess[str]:
    """`python src/SCRIPT ARGUMENTS` with captured output, in this process; SCRIPT may begin with `../`.

    fresh: in a process of its own, which takes seconds longer, without a HYDRA_FULL_ERROR or DEBUG of the user's.
    None: where it starts several ranks, which print to the standard output of the process, not to what stands for it.
    """
    command = [str(REPOSITORY / "src" / script), *arguments]
    if fresh is None:
        fresh = any(each.startswith("trainer.devices=") and each != "trainer.devices=1" for each in arguments)
    if not fresh:
        return _run_here(command, cwd)
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env={key: value for key, value in os.environ.items() if key not in ("DEBUG", "HYDRA_FULL_ERROR")},
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def _run_here(command: list[str], cwd: Path) -> subprocess.CompletedProcess[str]:
    printed, said, code = StringIO(), StringIO(), 0
    arguments, paths, place, filters = sys.argv, sys.path[:], Path.cwd(), warnings.filters[:]
    handlers, environment = {each: signal.getsignal(each) for each in STOP_SIGNALS}, dict(os.environ)
    try:
        sys.argv = command
        sys.path.insert(0, str(Path(command[0]).resolve().parent))  # as for a script that is started
        os.chdir(cwd)
        with redirect_stdout(printed), redirect_stderr(said):
            try:
                runpy.run_path(command[0], run_name="__main__")
            except SystemExit as stop:
                code = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
            except Exception:
                traceback.print_exc()
                code = 1
    finally:
        sys.argv, sys.path[:], warnings.filters[:] = arguments, paths, filters
        os.chdir(place)
        os.environ.clear()
        os.environ.update(environment)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        GlobalHydra.instance().clear()
        HydraConfig.instance().cfg = None
        if torch.distributed.is_initialized():  # processes that are forked later would wait for this group
            torch.distributed.destroy_process_group()
        for folder in list(run_lock._held):  # the end of a process gives its folder back
            run_lock.release(folder)
    return subprocess.CompletedProcess(command, code, printed.getvalue(), said.getvalue())


def refused(script: str, *arguments: str, cwd: Path) -> str:
    """The one line with which a command refuses what it was given; its exit code is 2."""
    done = run_entry(script, *arguments, cwd=cwd, fresh=False)
    assert done.returncode == 2, done.stdout + done.stderr
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    return line


def one_line(call: Callable, *arguments: Any, match: str | None = None, **named: Any) -> str:
    """The one line with which a function refuses what it was given; match: what it must hold, as in `pytest.raises`."""
    with pytest.raises(UsageError, match=match) as caught:
        call(*arguments, **named)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def run_ok(script: str, *arguments: str, cwd: Path) -> str:
    """The command's standard output; its errors in the assertion when it fails."""
    done = run_entry(script, *arguments, cwd=cwd)
    assert done.returncode == 0, f"{script} {' '.join(arguments)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def trained_beside_pictures(folder: Path, run: str, *overrides: str) -> Path:
    """Make `folder` a user's: a run, and the 8 classes it searched as my_pictures. Returns the data set's folder."""
    run_ok("train.py", f"run={run}", *TINY_GLYPHS, *overrides, cwd=folder)
    [glyphs] = (folder / "data" / "glyphs").glob("glyphs-*")
    shutil.copytree(glyphs / "test", folder / "my_pictures")
    return glyphs


def compose_entry(name: str, *overrides: str, with_hydra: bool = False) -> DictConfig:
    """The config that `python src/NAME.py OVERRIDES` runs with, in this process."""
    entry.register_plugins()
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        return compose(name, list(overrides), return_hydra_config=with_hydra)


compose_train = partial(compose_entry, "train")


@contextmanager
def composed(name: str, *overrides: str) -> Iterator[DictConfig]:
    """The config of `python src/NAME.py OVERRIDES`, which composes others from it, in this process."""
    HydraConfig.instance().cfg = compose_entry(name, *overrides, with_hydra=True)
    cfg = deepcopy(HydraConfig.instance().cfg)
    with open_dict(cfg):
        del cfg["hydra"]
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        try:
            yield cfg
        finally:
            HydraConfig.instance().cfg = None
