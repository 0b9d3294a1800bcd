"""deterministic=true: the command run twice, also in a process of its own, gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, run_entry

RUN = [*TINY_GLYPHS, "deterministic=true", "trainer.max_epochs=2"]


def trained(name: str, here: Path, *more: str, fresh: bool) -> tuple[dict[str, torch.Tensor], list]:
    """All tensors of the last epoch, and the numbers of every evaluation without its seconds."""
    done = run_entry("train.py", *RUN, f"run={name}", *more, cwd=here, fresh=fresh)
    torch.use_deterministic_algorithms(False)
    assert done.returncode == 0, done.stderr
    state = torch.load(here / "runs" / name / "last.ckpt", weights_only=True)["state_dict"]
    history = json.loads((here / "runs" / name / "result.json").read_text())["history"]
    return state, [(row["recall"], row["train_loss"]) for row in history]


@pytest.mark.parametrize("fresh", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_two_runs_are_equal_to_the_bit(fresh, tmp_path):
    state, history = trained("a", tmp_path, fresh=False)
    again, numbers = trained("workers", tmp_path, "data.num_workers=2", fresh=fresh)
    assert again.keys() == state.keys()
    assert all(torch.equal(value, again[name]) for name, value in state.items())
    assert numbers == history


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_key_is_the_trainers(deterministic):
    trainer = compose_train(f"deterministic={deterministic}").trainer
    assert (trainer.deterministic, trainer.benchmark) == (deterministic, False)
