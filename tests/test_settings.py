"""From the config to the card that is started early and to the strategy of several."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from cli import compose_train
from omegaconf import open_dict

import settings
from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training.ddp import LeanDDP

COMPILED = ("backbone=test_efficientnet", "backbone.pretrained=false", "compile=true", "data.batch_size=8")


@pytest.fixture
def rehearsed(monkeypatch: pytest.MonkeyPatch) -> list[tuple]:
    """What is rehearsed on a card that is not there, and done beside it: (what, network's side, shape, device, precision)."""
    calls: list[tuple] = []

    def note(what: str) -> Callable[..., str]:
        return lambda net, *given: calls.append((what, net.config["image_size"], *given)) or "rehearsed"  # type: ignore[func-returns-value]

    importing = SimpleNamespace(join=lambda: calls.append(("imported",)))
    for name in ("LOCAL_RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr("proxy_anchor.training.wake.wake_card", lambda device: "woken")
    monkeypatch.setattr("proxy_anchor.training.wake.import_beside", lambda: importing)
    monkeypatch.setattr("proxy_anchor.training.rehearsal.rehearse_gradients", note("gradients"))
    monkeypatch.setattr("proxy_anchor.training.rehearsal.rehearse_evaluation", note("evaluation"))
    return calls


def test_what_is_rehearsed_is_this_processs_part_of_a_batch(
    rehearsed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    cfg = compose_train(*COMPILED, "trainer.precision=bf16-mixed", "dataset.images.crop=64")
    torch.manual_seed(0)
    state = torch.get_rng_state()
    assert settings.wake_card(cfg) == "rehearsed"
    assert torch.equal(torch.get_rng_state(), state)
    run = (64, (8, 3, 64, 64), torch.device("cuda", 0), "bf16-mixed")
    assert rehearsed == [("gradients", *run), ("evaluation", *run), ("imported",)]
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    cfg.trainer.devices = 2
    rehearsed.clear()
    assert settings.wake_card(cfg) == "rehearsed"
    half = (64, (4, 3, 64, 64), torch.device("cuda", 1), "bf16-mixed")
    # Evaluation divides the images, not its batches.
    whole = (64, (8, 3, 64, 64), torch.device("cuda", 1), "bf16-mixed")
    assert rehearsed == [("gradients", *half), ("evaluation", *whole), ("evaluation", *half), ("imported",)]
    cfg.data.eval_batch_size = 5
    rehearsed.clear()
    settings.wake_card(cfg)
    assert [shape[0] for _, _, shape, *_ in rehearsed[:-1]] == [4, 5, 4]


def test_the_network_that_is_rehearsed_is_the_one_that_is_trained(
    rehearsed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    nets: list[EmbeddingNet] = []
    monkeypatch.setattr("proxy_anchor.training.rehearsal.rehearse_evaluation", lambda net, *given: nets.append(net))
    settings.wake_card(compose_train(*COMPILED, "backbone.pooling=gem", "embedding_dim=7"))
    expected = {"backbone": "test_efficientnet", "pooling": "gem", "embedding_dim": 7}
    assert [nets[0].config[key] for key in expected] == list(expected.values())


def test_what_the_card_refuses_is_left_to_training_and_its_memory_given_back(
    rehearsed: list[tuple], monkeypatch: pytest.MonkeyPatch
) -> None:
    held = []

    def fail(*given: object) -> None:
        activations = torch.zeros(1)  # which the error's traceback holds
        held.append(weakref.ref(activations))
        raise torch.cuda.OutOfMemoryError

    monkeypatch.setattr("proxy_anchor.training.rehearsal.rehearse_evaluation", fail)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: rehearsed.append(("emptied", held[-1]() is None)))
    assert settings.wake_card(compose_train(*COMPILED)) == "rehearsed"  # the thread that is at work all the same
    assert rehearsed[-2:] == [("imported",), ("emptied", True)]


@pytest.mark.parametrize(
    "overrides",
    [
        ["compile=false"],
        ["deterministic=true"],
        ["trainer.deterministic=warn"],
        ["trainer.benchmark=true"],
        ["float32_precision=ieee"],
        ["backbone.name=resnot50"],
        ["data.batch_size=null"],
        ["data.batch_size=many"],
        ["dataset.images.crop=0"],
        ["embedding_dim=-1"],
    ],
    ids=" ".join,
)
def test_other_kernels_and_what_is_refused_later_are_not_rehearsed(
    rehearsed: list[tuple], overrides: list[str]
) -> None:
    assert settings.wake_card(compose_train(*COMPILED, *overrides)) == "woken"
    assert rehearsed == []


def test_keys_of_the_trainer_may_be_left_out(rehearsed: list[tuple]) -> None:
    cfg = compose_train(*COMPILED, "~trainer.benchmark", "~trainer.strategy", "~trainer.num_nodes")
    assert settings.wake_card(cfg) == "rehearsed"
    assert settings.strategy(cfg) == "auto"


@pytest.mark.parametrize(
    ("environment", "given", "ours"),
    [
        ({}, {}, False),
        ({}, {"devices": 2}, False),  # this process starts the others
        ({"LOCAL_RANK": "0"}, {"devices": 2}, True),
        ({"LOCAL_RANK": "0"}, {"num_nodes": 2}, True),
        ({"LOCAL_RANK": "0"}, {}, False),  # torchrun, with one process
        ({"SLURM_STEP_NUM_TASKS": "2"}, {"devices": 2}, True),
        ({}, {"strategy": "ddp"}, True),
        ({"LOCAL_RANK": "0"}, {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}, False),
    ],
)
def test_several_processes_train_with_this_packages_form_of_ddp(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: dict[str, object], ours: bool
) -> None:
    for name in ("LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cfg = compose_train()
    with open_dict(cfg):
        cfg.trainer.update(given)
    found = settings.strategy(cfg)
    assert type(found) is LeanDDP if ours else found == cfg.trainer.strategy


@pytest.mark.parametrize("name", ["gpu", "cuda"])
def test_a_gpu_that_is_not_there_is_said_with_the_repair(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    cfg = compose_train(*COMPILED, "batch_norm=train", f"trainer.accelerator={name}")
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    settings.check_config(cfg)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UsageError, match=f"trainer.accelerator={name}: .* no GPU .*Set trainer.accelerator=cpu"):
        settings.check_config(cfg)


def test_the_former_name_of_crop_on_is_taken_and_said_once(capsys: pytest.CaptureFixture) -> None:
    cfg = compose_train(*COMPILED, "batch_norm=train", "data.decode=cpu")
    settings.check_config(cfg)
    assert (cfg.data.crop_on, "decode" in cfg.data) == ("cpu", False)
    assert capsys.readouterr().out == (
        "data.decode=cpu is now data.crop_on=cpu: it says where images are cropped; worker processes decode them.\n"
    )
    settings.check_config(cfg)  # as each process of several does
    new = compose_train(*COMPILED, "batch_norm=train", "data.crop_on=cpu")
    settings.check_config(new)
    assert new == cfg
    assert capsys.readouterr().out == ""
    with pytest.raises(UsageError, match=r"^data\.decode=cpu and data\.crop_on=gpu: .*leave it out"):
        settings.check_config(compose_train(*COMPILED, "data.decode=cpu", "data.crop_on=gpu"))
    with pytest.raises(UsageError, match=r"^data\.crop_on=fast is not known"):
        settings.check_config(compose_train(*COMPILED, "batch_norm=train", "data.decode=fast"))


def test_an_unknown_float32_precision_is_named() -> None:
    with pytest.raises(UsageError, match=r"^float32_precision=high is not known; choose one of: tf32, ieee"):
        settings.check_config(compose_train(*COMPILED, "batch_norm=train", "float32_precision=high"))
