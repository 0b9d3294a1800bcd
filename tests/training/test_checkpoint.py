from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from commands import one_line
from hydra.utils import instantiate

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.regulariser import Regulariser
from proxy_anchor.losses.tcm import ThresholdConsistentMargin
from proxy_anchor.training.checkpoint import CHECKPOINT_KEY, load_checkpoint, load_embedding_net, make_regularisers
from proxy_anchor.training.module import MetricLearner

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture
def trained(make_learner: Callable, fit: Callable, tmp_path: Path):
    """(learner after two epochs, its checkpoint file)."""
    learner = make_learner()
    fit(learner, max_epochs=2).save_checkpoint(tmp_path / "last.ckpt")
    return learner, tmp_path / "last.ckpt"


def test_content_is_plain_and_complete(trained) -> None:
    learner, file = trained
    content = torch.load(file, weights_only=True)
    assert content["proxy_anchor"] == {
        "format": 1,
        "model": learner.net.config,
        "config": {"seed": 1},
        "classes": ["a", "b", "c"],
    }
    assert torch.equal(content["state_dict"]["loss.proxies"], learner.loss.proxies)
    assert set(content["state_dict"]) == set(learner.state_dict())
    states = content["optimizer_states"][0]["state"]
    assert len(states) == len([p for p in learner.parameters() if p.requires_grad])


def test_the_network_comes_back_exactly(trained, make_data: Callable) -> None:
    learner, file = trained
    saved = load_checkpoint(file)
    assert saved.metadata["config"] == {"seed": 1}
    net = load_embedding_net(saved)
    assert not net.training
    images, _, _ = next(iter(make_data().val_dataloader()[0]))
    with torch.no_grad():
        assert torch.equal(net(images), learner.eval()(images))


def change(file: Path, **values: object) -> None:
    content = torch.load(file, weights_only=True)
    torch.save(content | {CHECKPOINT_KEY: content[CHECKPOINT_KEY] | values}, file)


@pytest.mark.parametrize(
    "damage",
    [
        Path.unlink,
        lambda file: file.write_bytes(file.read_bytes()[:10_000]),
        lambda file: torch.save([1], file),
        lambda file: torch.save({"state_dict": {}}, file),
        lambda file: change(file, format=2),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(trained, damage: Callable) -> None:
    _, file = trained
    damage(file)
    one_line(load_checkpoint, file, match=r"checkpoint=.*last\.ckpt")


LOSSES = {
    "own": {"_target_": "proxy_anchor.losses.proxy_anchor.ProxyAnchorLoss", "alpha": 16.0},
    "miner": {
        "_target_": "proxy_anchor.losses.pml.PMLLoss",
        "loss": {"_target_": "pytorch_metric_learning.losses.MarginLoss", "_partial_": True, "learn_beta": True},
        "miner": {"_target_": "pytorch_metric_learning.miners.BatchHardMiner"},
    },
}


@pytest.mark.parametrize("name", LOSSES)
def test_the_learner_comes_back_from_its_file_alone(
    name: str, make_learner: Callable, fit: Callable, tmp_path: Path
) -> None:
    learner = make_learner(instantiate(LOSSES[name], num_classes=3, embedding_dim=8))
    learner.metadata["config"]["loss"] = LOSSES[name]
    fit(learner).save_checkpoint(tmp_path / "last.ckpt")
    again = MetricLearner.load_from_checkpoint(tmp_path / "last.ckpt")
    assert again.metadata == learner.metadata
    state = again.state_dict()
    assert state.keys() == learner.state_dict().keys()
    assert all(torch.equal(value, state[key]) for key, value in learner.state_dict().items())
    embeddings, labels = torch.randn(6, 8), torch.arange(6) % 3
    assert torch.equal(again.loss(embeddings, labels), learner.loss(embeddings, labels))


@pytest.mark.parametrize("target", [None, "os.system", "proxy_anchor.losses.pml.inspect.os.system"])
def test_a_loss_that_the_file_cannot_be_trusted_to_make_has_to_be_given(
    target: str | None, make_learner: Callable, fit: Callable, tmp_path: Path
) -> None:
    learner = make_learner()
    learner.metadata = {} if target is None else {"config": {"loss": {"_target_": target}}, "classes": ["a"] * 3}
    fit(learner).save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match=r"last\.ckpt does not say how its loss is made .*: pass loss=\.\.\.$"):
        MetricLearner.load_from_checkpoint(tmp_path / "last.ckpt")
    again = MetricLearner.load_from_checkpoint(tmp_path / "last.ckpt", loss=ProxyAnchorLoss(3, 8), warmup_epochs=2)
    assert torch.equal(again.loss.proxies, learner.loss.proxies)
    assert again.warmup_epochs == 2


class Shrink(Regulariser):
    """One of a user's own, with a parameter."""

    def __init__(self) -> None:
        super().__init__(2.0)
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor, proxies: torch.Tensor) -> torch.Tensor:
        return self.scale * (embeddings - embeddings.mean()).square().sum()


def test_regularisers_come_back_and_their_parameters_train(make_learner: Callable, fit: Callable, tmp_path) -> None:
    learner = make_learner(regularisers={"shrink": Shrink()})
    made = {"_target_": "proxy_anchor.losses.proxy_anchor.ProxyAnchorLoss"}
    target = f"{ThresholdConsistentMargin.__module__}.ThresholdConsistentMargin"
    learner.metadata["config"] |= {"loss": made, "regulariser": {"tcm": {"_target_": target, "weight": 0.5}}}
    trainer = fit(learner)
    assert learner.regularisers["shrink"].scale < 1
    assert {"train/loss", "train/loss_term", "train/shrink_term"} <= trainer.callback_metrics.keys()
    total = sum(trainer.callback_metrics[f"train/{name}_term"] for name in ("loss", "shrink"))
    terms = learner.loss_terms(torch.zeros(4, 3, 32, 32, dtype=torch.uint8), torch.tensor([0, 1, 2, 0]))
    assert [*terms] == ["loss", "shrink"]  # outside of training too, where nothing can be logged
    assert trainer.callback_metrics["train/loss_epoch"] == pytest.approx(float(total), rel=1e-6)
    trainer.save_checkpoint(tmp_path / "last.ckpt")

    again = MetricLearner.load_from_checkpoint(tmp_path / "last.ckpt", regularisers={"shrink": Shrink()})
    assert torch.equal(again.regularisers["shrink"].scale, learner.regularisers["shrink"].scale)
    [(name, tcm)] = make_regularisers(load_checkpoint(tmp_path / "last.ckpt")).items()
    assert (name, type(tcm), tcm.weight, again.seed) == ("tcm", ThresholdConsistentMargin, 0.5, 1)
    learner.metadata["config"]["regulariser"] = {"mine": {"_target_": "os.system"}}
    trainer.save_checkpoint(tmp_path / "last.ckpt")
    with pytest.raises(UsageError, match=r"regularisers are made .*os\.system.*pass regularisers="):
        MetricLearner.load_from_checkpoint(tmp_path / "last.ckpt")
