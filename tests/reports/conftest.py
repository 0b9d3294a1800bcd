from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from hydra import compose, initialize_config_dir

import report as report_entry
from proxy_anchor.cli import main as entry
from proxy_anchor.data.table import Splits, make_tables


@pytest.fixture
def report(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """report("runs=DIR") is what `python src/report.py runs=DIR` prints, in this process."""

    def run(*overrides: str) -> str:
        entry.register_plugins()
        with initialize_config_dir(entry.CONF, version_base="1.3"):
            report_entry.main(compose("report", list(overrides)))
        return capsys.readouterr().out

    return run


def on_circle(*degrees: float) -> torch.Tensor:
    """Unit vectors at these angles."""
    angles = torch.deg2rad(torch.tensor(degrees, dtype=torch.float64))
    return torch.stack([angles.cos(), angles.sin()], dim=1).float()


# a at 0 and 10 degrees, b at 25 and 100: each a finds the other, the first b finds an a, the second b the first b.
ANGLES = (0, 10, 25, 100)


@pytest.fixture
def splits(write_images: Callable[..., Sequence[tuple[Path, str]]]) -> Splits:
    """Two images of each of two classes, a and b."""
    [table] = make_tables(write_images({"a": 2, "b": 2}))
    return Splits("made up", table, table)
