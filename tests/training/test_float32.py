"""The switches of torch that say what float32 is on a GPU; what they do there a GPU has to show."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, compose_entry, compose_train, one_line
from omegaconf import OmegaConf
from torch import nn

from evaluate import evaluate
from proxy_anchor.retrieval.search import full_precision
from proxy_anchor.training.checkpoint import load_checkpoint
from proxy_anchor.training.float32 import set_float32_precision
from proxy_anchor.utils import read_result
from train import train


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    before = torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision()
    yield
    torch.backends.cudnn.allow_tf32 = before[0]
    torch.set_float32_matmul_precision(before[1])


def switches() -> tuple[bool, bool, str]:
    return torch.backends.cudnn.allow_tf32, torch.backends.cuda.matmul.allow_tf32, torch.get_float32_matmul_precision()


TF32, IEEE = (True, False, "highest"), (False, False, "highest")


def test_each_name_sets_every_switch() -> None:
    for name, expected in (("ieee", IEEE), ("tf32", TF32), ("ieee", IEEE)):
        torch.set_float32_matmul_precision("high")
        set_float32_precision(name)
        assert switches() == expected
        for layer in (torch.backends.cudnn.conv, torch.backends.cudnn.rnn):
            assert (layer.fp32_precision == "tf32") == (name == "tf32")
        with full_precision(torch.device("cpu")):
            assert not switches()[1]
        assert switches() == expected
    one_line(set_float32_precision, "high", match=r"^float32_precision=high is not known")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_every_run_sets_it_and_evaluate_sets_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    seen, plain = [], nn.Linear.forward
    monkeypatch.setattr(nn.Linear, "forward", lambda *given: seen.append(switches()) or plain(*given))
    set_float32_precision("tf32")  # as of an earlier run of this process
    cfg = compose_train(*TINY_GLYPHS, "trainer.accelerator=cpu", "logger=csv", "float32_precision=ieee")
    train(cfg, tmp_path / "run")
    assert set(seen) == {IEEE}
    assert OmegaConf.load(tmp_path / "run" / "config.yaml").float32_precision == "ieee"
    assert read_result(tmp_path / "run")["float32_precision"] == "ieee"
    assert load_checkpoint(tmp_path / "run" / "best.ckpt").metadata["config"]["float32_precision"] == "ieee"
    seen.clear()
    set_float32_precision("tf32")
    evaluate(compose_entry("evaluate", f"checkpoint={tmp_path / 'run' / 'best.ckpt'}"))
    assert set(seen) == {IEEE}


@pytest.mark.gpu
def test_only_tf32_rounds_a_convolution_on_a_gpu() -> None:
    # 1 + 2**-12 needs 12 bits of mantissa; TF32 has 10.
    values = torch.full((1, 16, 32, 32), 1 + 2**-12, device="cuda")
    weights = torch.ones(16, 16, 1, 1, device="cuda") * (1 + 2**-12)
    exact = nn.functional.conv2d(values.double(), weights.double())
    errors = {}
    for name in ("tf32", "ieee"):
        set_float32_precision(name)
        errors[name] = float((nn.functional.conv2d(values, weights).double() - exact).abs().max() / exact.abs().max())
    assert errors["ieee"] < 1e-6
    assert errors["tf32"] > 1e-4
