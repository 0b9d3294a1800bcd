"""`python src/NAME.py key=value ...` as `proxy-anchor NAME key=value ...`, and from Python."""

from __future__ import annotations

import ast
import runpy
import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

from proxy_anchor.errors import USAGE_ERROR, UsageError, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel inside the package, in a checkout next to it or at the top.
CONF = str(next(each for each in (_PACKAGE / "conf", _PACKAGE.parents[1] / "conf") if each.is_dir()))
COMMANDS = next(each for each in (_PACKAGE / "commands", _PACKAGE.parent) if (each / "train.py").is_file())


def train(*overrides: str) -> dict[str, Any]:
    """Train in this process: `train("run=first", "trainer.max_epochs=5")`.

    overrides: as of `python src/train.py`.

    Returns the content of result.json. Raises as `command` does.
    """
    from proxy_anchor.utils import read_result

    folder, _ = _run("train", overrides)
    return read_result(folder) or {}  # a debug mode writes none


def command(name: str, *overrides: str) -> Any:
    """Do what `python src/NAME.py key=value ...` does, in this process.

    Returns what the entry returns: of evaluate {metric: value}, of search one {"query", "class", "hits"} per query.

    Raises:
        UsageError: where the command prints one line; Hydra's errors for overrides that do not fit the config.
    """
    return _run(name, overrides)[1]


def _run(name: str, overrides: Sequence[str]) -> tuple[Path, Any]:
    """(folder of the command, what it returns)."""
    from hydra import compose, initialize_config_dir
    from hydra.core.hydra_config import HydraConfig
    from hydra.types import RunMode
    from omegaconf import open_dict

    from proxy_anchor.cli import main as entry

    if name not in (known := _entries()):
        raise UsageError(_unknown(name))
    if str(COMMANDS) not in sys.path:
        sys.path.append(str(COMMANDS))  # entries import each other
    entry.register_plugins()
    entry.quieten()
    entry.forget_last_run()
    # The arguments stand in the result, and ranks start from them.
    with initialize_config_dir(CONF, version_base="1.3"), patch.object(sys, "argv", [str(known[name]), *overrides]):
        whole = compose(name, list(overrides), return_hydra_config=True)
        cfg, folder = whole.copy(), Path(whole.hydra.run.dir)
        with open_dict(cfg), open_dict(whole):
            del cfg["hydra"]
            whole.hydra.runtime.output_dir, whole.hydra.mode = str(folder), RunMode.RUN
        folder.mkdir(parents=True, exist_ok=True)
        module = import_module(name)
        with patch.object(HydraConfig.instance(), "cfg", whole):
            return folder, getattr(module, "main" if hasattr(module, "main") else name)(cfg)


def _entries() -> dict[str, Path]:
    return {file.stem: file for file in sorted(COMMANDS.glob("*.py"))}


def main() -> None:
    """Run the entry that the first argument names; without one, list them."""
    known = _entries()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("proxy-anchor NAME key=value ...   (proxy-anchor NAME --help lists its keys)\n")
        for each, file in known.items():
            print(f"  {each:<10}{_summary(file)}")
    elif name not in known:
        print(f"error: {_unknown(name)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    else:
        sys.argv = [str(known[name]), *sys.argv[2:]]
        sys.path.insert(0, str(COMMANDS))  # entries import each other
        runpy.run_path(str(known[name]), run_name="__main__")


def _unknown(name: str) -> str:
    known = _entries()
    return f"{name} is no command; choose one of: {', '.join(known)}.{did_you_mean(name, known)}"


def _summary(file: Path) -> str:
    described = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return described.splitlines()[0].partition(":")[0]
