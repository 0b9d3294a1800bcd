"""Warnings carry their figure, and a number that is not finite leaves what repeats the step."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from functools import partial
from html import escape
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import torch
from commands import compose_train
from families import LARGER, WITH_PATHS, WITHOUT_PATHS
from omegaconf import OmegaConf
from reports.test_model_card import RESULT
from torch.optim import SGD, AdamW

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.data.table import ImageTable, Splits, make_tables
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.model_card import model_card
from proxy_anchor.reports.pages import write_run_page
from proxy_anchor.reports.run import summary
from proxy_anchor.training.callbacks.health import REPLAY_FILE, Health
from proxy_anchor.training.finite import NotFinite
from proxy_anchor.training.module import MetricLearner

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def evaluate(health: Health, embeddings: torch.Tensor, fn: str = "fit") -> list[str]:
    trainer = SimpleNamespace(state=SimpleNamespace(fn=fn), current_epoch=2)
    learner = SimpleNamespace(log=health.__dict__.setdefault("logged", {}).__setitem__)
    health.on_validation_epoch_start(trainer, learner)
    for part in embeddings.split(3):
        health.on_validation_batch_end(trainer, learner, {"embeddings": part})
    health.on_validation_epoch_end(trainer, learner)
    return health.warnings


def test_collapse_is_said_with_the_mean_pairwise_similarity(tmp_path):
    near = torch.nn.functional.normalize(torch.ones(8, 4) + 0.01 * torch.randn(8, 4))
    expected = (near.double() @ near.double().T).sum().sub(8).item() / 56
    [text] = evaluate(health := Health(tmp_path), near)
    assert health.logged == {"health/mean_similarity": pytest.approx(expected)}
    assert text.startswith("epoch 3: the embeddings have collapsed")
    assert f"{expected:.4f}" in text
    assert evaluate(Health(tmp_path), near, "validate") == []
    assert evaluate(Health(tmp_path), torch.eye(4)) == []


@pytest.fixture
def watched(make_learner, fit, tmp_path):
    """watched(loss, epochs=1, data={}, callbacks=(), **optimizer) trains and returns its Health."""

    def train(loss=None, epochs=1, data=None, callbacks=(), accumulate_grad_batches=1, **optimizer) -> Health:
        health = Health(tmp_path)
        more = {"max_epochs": epochs, "accumulate_grad_batches": accumulate_grad_batches, "data": data}
        trainer = fit(make_learner(loss, **optimizer), callbacks=[health, *callbacks], **more)
        health.logged = trainer.callback_metrics
        return health

    return train


class Pull(torch.nn.Module):
    def forward(self, embeddings: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return -(embeddings[labels == labels[0]].sum(0)).square().sum()


def test_ordinary_training_has_no_warning(watched):
    for optimizer in ({}, {"warmup_epochs": 1}, {"lr": 1e-4}):
        assert watched(epochs=3, **optimizer).warnings == []
    assert watched(Pull()).warnings == []  # has no proxies


def test_a_backbone_that_stands_still_is_said_after_the_warm_up(watched, monkeypatch):
    monkeypatch.setattr(MetricLearner, "configure_gradient_clipping", keep_the_backbone)
    health = watched(epochs=3, warmup_epochs=1)
    [text] = health.warnings
    assert text.startswith("epoch 2: the backbone has not moved although the warm-up is over")
    restored = Health(Path())
    restored.load_state_dict(health.state_dict())
    assert restored.warnings == health.warnings


def keep_the_backbone(learner, optimizer, **clipping) -> None:
    for parameter in learner.net.backbone.parameters():
        parameter.grad = None


@pytest.mark.parametrize(("lr", "word"), [(10.0, "high"), (1e-7, "low")])
@pytest.mark.parametrize("warmup_epochs", [0, 1])
def test_a_rate_that_is_far_off_is_said_with_the_size_of_a_step(lr, word, warmup_epochs, watched, make_learner, capsys):
    health = watched(epochs=2, lr=lr, proxy_lr_mult=1e-3 / lr, warmup_epochs=warmup_epochs)
    [text] = [each for each in health.warnings if "optimizer.lr" in each]
    values = torch.cat([each.detach().flatten() for each in make_learner().net.backbone.parameters()])
    step = float(torch.full_like(values, lr).norm() / values.norm())  # Adam's first step, where all have a gradient
    assert text.startswith(f"epoch {warmup_epochs + 1}: optimizer.lr={lr:g} looks far too {word}: ")
    assert float(re.search(r"first step is (\S+) of", text)[1]) == pytest.approx(step, rel=0.9)
    assert f"warning: {text}" in capsys.readouterr().out


def test_the_update_ratio_is_logged_for_any_optimizer(watched, make_learner):
    before = torch.cat([each.detach().flatten() for each in make_learner().net.backbone.parameters()])
    after = []

    class Keep(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:  # the first step: two batches are accumulated
                after.append(torch.cat([each.detach().flatten() for each in pl_module.net.backbone.parameters()]))

    health = watched(optimizer=SGD, lr=1e-3, callbacks=[Keep()], accumulate_grad_batches=2)
    ratio = float((after[0] - before).norm() / before.norm())
    assert ratio > 0
    assert health.logged["health/update_ratio"] == pytest.approx(ratio, rel=1e-4)


FAST = ["vit_tiny_patch16_224", "test_resnet", "test_efficientnet", "test_convnext", "bninception"]
SLOW = [pytest.param(e, marks=pytest.mark.slow) for e in (*WITH_PATHS, *WITHOUT_PATHS, *LARGER) if e not in FAST]


@pytest.mark.parametrize("backbone", [*FAST, *SLOW])
def test_no_network_is_warned_of_at_the_usual_rate(backbone, fit, tmp_path):
    """From scratch; vision transformers start with a class token near zero."""
    torch.manual_seed(0)
    net = EmbeddingNet(backbone, 8, pretrained=False, image_size=64, batch_norm="train")
    learner = MetricLearner(net, ProxyAnchorLoss(3, 8), partial(AdamW, lr=1e-4), warmup_epochs=0)
    health = Health(tmp_path)
    fit(learner, callbacks=[health], data={"crop": 64, "resize": 64})
    assert health.warnings == []


def test_classes_that_no_batch_held_are_named_at_the_end(watched, splits):
    train = splits.train
    table = ImageTable(train.paths, train.labels, (*train.classes, "empty"))
    health = watched(ProxyAnchorLoss(4, 8), epochs=2, data={"splits": replace(splits, train=table)})
    [text] = health.warnings
    assert text == "1 of 4 classes were never in a batch of training: no full batch held them (3)."
    restored = Health(Path())
    restored.load_state_dict(health.state_dict())
    assert restored._seen.tolist() == [True, True, True, False]


def test_warnings_stand_in_everything_that_a_run_leaves_behind(tmp_path, write_images):
    [table] = make_tables(write_images({"a": 2}))
    splits = Splits("made up", table, table)
    config = OmegaConf.to_container(compose_train(), resolve=True)
    text = "epoch 1: the embeddings have collapsed (mean pairwise similarity 0.99 > 0.98)."
    for warnings in ([], [text]):
        made = RESULT | {"warnings": warnings}
        assert (f"Warning: {text}" in model_card(config, made, "data")) == bool(warnings)
        write_run_page(tmp_path, config, made, "data", splits, [torch.eye(2)], [0])
        assert (escape(text) in (tmp_path / "index.html").read_text()) == bool(warnings)
        assert (f"warning: {text}" in summary(made, Path("x"))) == bool(warnings)


def test_the_images_and_rates_of_a_step_that_is_not_finite_are_kept(tmp_path):
    health = Health(tmp_path)
    for rows in ([0, 1], [2, 3], [1, 2]):
        health.on_train_batch_start(None, None, (None, None, torch.tensor(rows)), 0)
    trainer = SimpleNamespace(
        datamodule=SimpleNamespace(splits=SimpleNamespace(train=SimpleNamespace(paths=["a", "b", "c", "d"]))),
        global_step=7,
        current_epoch=1,
        optimizers=[SimpleNamespace(param_groups=[{"name": "proxies", "lr": 0.5}])],
    )
    health.on_exception(trainer, None, UsageError("the search is not finite"))
    assert not (tmp_path / REPLAY_FILE).exists()
    health.on_exception(trainer, None, NotFinite("the loss is not finite at step 7"))
    content = json.loads((tmp_path / REPLAY_FILE).read_text())
    assert content["batches"] == [["c", "d"], ["b", "c"]]
    assert (content["step"], content["learning_rates"]) == (7, {"proxies": 0.5})
