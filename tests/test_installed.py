"""The installed package, outside the repository: every command, the configuration inside, the public names."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_GLYPHS

COMMANDS = sorted(file.stem for file in (REPOSITORY / "src").glob("*.py"))


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package as pip installs it; dependencies are this environment's."""
    place = tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "-q", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation", "--target", str(place), str(REPOSITORY)], check=True)
    return place


def run(installed: Path, *command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")}
    return subprocess.run(
        [sys.executable, *command],
        cwd=cwd,
        env=environment | {"PYTHONPATH": str(installed)},  # before the links to this checkout
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_command_lists_every_entry(installed: Path, tmp_path: Path) -> None:
    listed = run(installed, f"{installed}/bin/proxy-anchor", cwd=tmp_path).stdout
    assert [line.split()[0] for line in listed.splitlines() if line.startswith("  ")] == COMMANDS
    assert "  train     Train an embedding network with its proxies.\n" in listed
    wrong = run(installed, f"{installed}/bin/proxy-anchor", "trian", cwd=tmp_path)
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert wrong.stderr.startswith("error: trian is no command; choose one of: app, ")
    assert wrong.stderr.endswith("Did you mean 'train'?\n")


def test_it_trains_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    trained = run(installed, f"{installed}/bin/proxy-anchor", "train", *TINY_GLYPHS, "run=x", cwd=tmp_path)
    assert (trained.returncode, trained.stderr) == (0, "")  # and no warning
    assert (tmp_path / "runs" / "x" / "result.json").is_file()


def test_the_package_shows_its_names_and_holds_the_whole_configuration(installed: Path, tmp_path: Path) -> None:
    code = (
        "import proxy_anchor, pathlib; home = pathlib.Path(proxy_anchor.__file__).parent; print(dir(proxy_anchor), "
        "(home / 'py.typed').is_file(), len([*(home / 'conf').rglob('*.yaml')]), home)"
    )
    printed = run(installed, "-c", code, cwd=tmp_path).stdout
    names = "['EmbeddingNet', 'ProxyAnchorLoss', 'Retriever', '__version__', 'command', 'recall_at_k', 'train']"
    number = len([*(REPOSITORY / "conf").rglob("*.yaml")])
    assert printed.startswith(f"{names} True {number} {installed}")
