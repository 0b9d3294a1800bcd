"""The rooms of the package: imports point down the list, never in a circle, and only cli/ sees the config.

Every import counts: those inside functions and those for type checkers too.
"""

from __future__ import annotations

import ast
from graphlib import TopologicalSorter
from pathlib import Path

import pytest
from commands import REPOSITORY

PACKAGE = REPOSITORY / "src" / "proxy_anchor"
ROOMS = (
    "",  # the package itself, which shows the public names
    "cli",
    "sweeps",
    "reports",
    "inference",
    "training",
    "retrieval",
    "losses",
    "models",
    "data",
    "utils",
    "errors",
)
CONFIG_LIBRARIES = ("hydra", "omegaconf", "hydra_plugins")


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(file): file for file in sorted(PACKAGE.rglob("*.py"))}


def room(module: str) -> str:
    """`proxy_anchor.training.module` -> `training`."""
    return f"{module}.".split(".")[1]


def imported(source: str) -> set[str]:
    """Dotted names that a module's source imports, wherever in it: `from a import b` gives `a.b`."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: a relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def dependencies(source: str) -> set[str]:
    """The modules of this package that a source imports."""
    names = {name for name in imported(source) if name.split(".")[0] == PACKAGE.name}
    return {name if name in MODULES else name.rpartition(".")[0] for name in names}


GRAPH = {name: dependencies(file.read_text()) for name, file in MODULES.items()}


@pytest.mark.parametrize("importer", MODULES)
def test_imports_point_down(importer):
    """And every module is in a room."""
    place = ROOMS.index(room(importer))
    assert [each for each in GRAPH[importer] if ROOMS.index(room(each)) < place] == []


def test_no_circle_of_imports():
    TopologicalSorter(GRAPH).prepare()


@pytest.mark.parametrize("module", [each for each in MODULES if room(each) != "cli"])
def test_only_cli_sees_the_config(module):
    assert [each for each in imported(MODULES[module].read_text()) if each.split(".")[0] in CONFIG_LIBRARIES] == []
