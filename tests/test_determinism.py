"""deterministic=true: the command run twice, in processes of their own, gives the same bits."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, run_entry

from proxy_anchor.cli import checks
from proxy_anchor.errors import UsageError

RUN = [*TINY_GLYPHS, "deterministic=true", "trainer.max_epochs=2"]


def trained(name: str, here: Path, *more: str) -> tuple[dict[str, torch.Tensor], list]:
    """All tensors of the last epoch, and the numbers of every evaluation without its seconds."""
    done = run_entry("train.py", *RUN, f"run={name}", *more, cwd=here, fresh=True)
    assert done.returncode == 0, done.stderr
    state = torch.load(here / "runs" / name / "last.ckpt", weights_only=True)["state_dict"]
    history = json.loads((here / "runs" / name / "result.json").read_text())["history"]
    return state, [(row["recall"], row["train_loss"]) for row in history]


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(value, other[name]) for name, value in one.items())


def test_two_runs_are_equal_to_the_bit(tmp_path):
    state, history = trained("a", tmp_path)
    for name, more in {"b": [], "workers": ["data.num_workers=2"]}.items():
        again, numbers = trained(name, tmp_path, *more)
        assert equal(again, state), name
        assert numbers == history, name


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_key_is_the_trainers(deterministic):
    trainer = compose_train(f"deterministic={deterministic}").trainer
    assert (trainer.deterministic, trainer.benchmark) == (deterministic, False)


def test_kernels_chosen_by_a_clock_are_refused():
    cfg = compose_train("deterministic=true", "speed=fast", "trainer.benchmark=true")
    with pytest.raises(
        UsageError, match=r"^deterministic=true and trainer\.benchmark=true: .*Add trainer\.benchmark=false"
    ):
        checks.check_config(cfg)
    checks.check_config(compose_train("deterministic=true", "speed=fast"))


@pytest.mark.parametrize("override", ["deterministic=yes_please", "trainer.deterministic=sometimes"])
def test_another_value_is_refused(override):
    with pytest.raises(UsageError, match="deterministic"):
        checks.check_config(compose_train(override))
