"""Warnings carry their figure, and a number that is not finite leaves what repeats the step."""

from __future__ import annotations

import json
from types import SimpleNamespace

import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.training.guard import NotFinite
from proxy_anchor.training.health import REPLAY_FILE, Health


def evaluate(health: Health, embeddings: torch.Tensor, fn: str = "fit") -> list[str]:
    trainer = SimpleNamespace(state=SimpleNamespace(fn=fn), current_epoch=2)
    health.on_validation_epoch_start(trainer, None)
    for part in embeddings.split(3):
        health.on_validation_batch_end(trainer, None, {"embeddings": part})
    health.on_validation_epoch_end(trainer, None)
    return health.warnings


def test_collapse_is_said_with_the_mean_pairwise_similarity(tmp_path):
    near = torch.nn.functional.normalize(torch.ones(8, 4) + 0.01 * torch.randn(8, 4))
    expected = (near.double() @ near.double().T).sum().sub(8).item() / 56
    [text] = evaluate(Health(tmp_path), near)
    assert text.startswith("epoch 3: the embeddings have collapsed")
    assert f"{expected:.4f}" in text
    assert evaluate(Health(tmp_path), near, "validate") == []
    assert evaluate(Health(tmp_path), torch.eye(4)) == []


def test_a_backbone_that_stands_still_is_said_after_the_warm_up(tmp_path):
    backbone = torch.nn.Linear(2, 2)
    module = SimpleNamespace(net=SimpleNamespace(backbone=backbone), settings=SimpleNamespace(warmup_epochs=1))
    health = Health(tmp_path)
    for epoch, moves in enumerate((False, True, False)):
        trainer = SimpleNamespace(current_epoch=epoch)
        health.on_train_epoch_start(trainer, module)
        if moves:
            with torch.no_grad():
                backbone.weight.add_(0.1)
        health.on_train_epoch_end(trainer, module)
    assert [text.split(":")[0] for text in health.warnings] == ["epoch 3"]
    restored = Health(tmp_path)
    restored.load_state_dict(health.state_dict())
    assert restored.warnings == health.warnings


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
