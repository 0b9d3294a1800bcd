"""The commands from Python."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import patch

from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import open_dict

from proxy_anchor.cli import main as entry
from proxy_anchor.cli.command import COMMANDS, CONF, entries, unknown
from proxy_anchor.cli.messages import USER_ERRORS, one_line
from proxy_anchor.errors import UsageError
from proxy_anchor.utils import read_result


def train(*overrides: str) -> dict[str, Any]:
    """Train in this process: `train("run=first", "trainer.max_epochs=5")`.

    overrides: as of `python src/train.py`.

    Returns the content of result.json. Raises as `command` does.
    """
    folder, _ = _run("train", overrides)
    return read_result(folder) or {}  # a debug mode writes none


def command(name: str, *overrides: str) -> Any:
    """Do what `python src/NAME.py key=value ...` does, in this process.

    Returns what the entry returns: of evaluate {metric: value}, of search one {"query", "class", "hits"} per query.

    Raises:
        UsageError: where the command prints one line.
    """
    return _run(name, overrides)[1]


def _run(name: str, overrides: Sequence[str]) -> tuple[Path, Any]:
    """(folder of the command, what it returns)."""
    if name not in (known := entries()):
        raise UsageError(unknown(name))
    entry.register_plugins()
    entry.quieten()
    entry.forget_last_run()
    try:
        # The arguments stand in the result, and ranks start from them.
        with initialize_config_dir(CONF, version_base="1.3"), patch.object(sys, "argv", [str(known[name]), *overrides]):
            whole = compose(name, list(overrides), return_hydra_config=True)
            cfg, folder = whole.copy(), Path(whole.hydra.run.dir)
            with open_dict(cfg), open_dict(whole):
                del cfg["hydra"]
                whole.hydra.runtime.output_dir, whole.hydra.mode = str(folder), RunMode.RUN
            module = _module(name)
            folder.mkdir(parents=True, exist_ok=True)
            try:
                with patch.object(HydraConfig.instance(), "cfg", whole):
                    return folder, getattr(module, "main" if hasattr(module, "main") else name)(cfg)
            finally:
                with suppress(OSError):
                    folder.rmdir()  # only succeeds where nothing has been written
    except USER_ERRORS as error:
        raise UsageError(one_line(error)) from error


def _module(name: str) -> ModuleType:
    """The module of a command, also where the user's own train.py is imported, or would be, under that name."""
    own = {each: sys.modules.pop(each) for each in entries() if each in sys.modules}
    try:
        with patch.object(sys, "path", [str(COMMANDS), *sys.path]):  # commands import each other
            return import_module(name)
    finally:
        for each in entries():
            sys.modules.pop(each, None)
        sys.modules.update(own)
