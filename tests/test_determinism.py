"""deterministic=true: the command run twice, in processes of their own, gives the same bits."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, run_entry
from hydra.utils import instantiate

from proxy_anchor.cli import checks
from proxy_anchor.errors import UsageError

RUN = [*TINY_GLYPHS, "deterministic=true", "trainer.max_epochs=2", "trainer.accelerator=cpu", "logger=csv"]


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


@pytest.fixture
def restored():
    """The switches of this process, as they were."""
    flags, benchmark = torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark
    before = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    yield
    torch.use_deterministic_algorithms(flags)
    torch.backends.cudnn.benchmark = benchmark
    os.environ.pop("CUBLAS_WORKSPACE_CONFIG", None)
    if before is not None:
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = before


@pytest.mark.parametrize("deterministic", [True, False])
def test_the_key_sets_every_switch_before_anything_is_on_the_card(deterministic, restored, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(not deterministic)  # a sweep's job before this one
    torch.backends.cudnn.benchmark = True
    cfg = compose_train(f"deterministic={deterministic}", "trainer.accelerator=cpu")
    instantiate(cfg.trainer, logger=False, enable_checkpointing=False)
    assert torch.are_deterministic_algorithms_enabled() == deterministic
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
    assert not torch.backends.cudnn.benchmark
    assert (os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8") == deterministic
    assert not torch.cuda.is_initialized()


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
