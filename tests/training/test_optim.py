from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.training.optim import (
    OptimizerSettings,
    describe_groups,
    make_parameter_groups,
    make_scheduler,
)


def make_net(**arguments) -> EmbeddingNet:
    return EmbeddingNet("test_resnet", 8, pretrained=False, image_size=32, **arguments)


def test_groups_are_backbone_head_and_proxies() -> None:
    net, loss = make_net(), ProxyAnchorLoss(5, 8)
    groups = make_parameter_groups(net, loss, lr=0.01, proxy_lr_mult=100)
    assert [(group["name"], group["lr"]) for group in groups] == [("backbone", 0.01), ("head", 0.01), ("proxies", 1.0)]
    assert [id(p) for p in groups[0]["params"]] == [id(p) for p in net.backbone.parameters()]
    assert [id(p) for p in groups[1]["params"]] == [id(net.head.weight), id(net.head.bias)]
    assert [id(p) for p in groups[2]["params"]] == [id(loss.proxies)]


@pytest.mark.parametrize("batch_norm", ["train", "frozen_statistics", "frozen"])
@pytest.mark.parametrize("pooling", ["auto", "gem"])
def test_every_trainable_tensor_is_in_exactly_one_group_and_frozen_ones_in_none(batch_norm: str, pooling: str) -> None:
    net, loss = make_net(batch_norm=batch_norm, pooling=pooling), ProxyAnchorLoss(5, 8)
    groups = make_parameter_groups(net, loss, lr=0.01, proxy_lr_mult=100)
    grouped = sorted(id(p) for group in groups for p in group["params"])
    trainable = sorted(id(p) for p in [*net.parameters(), *loss.parameters()] if p.requires_grad)
    assert grouped == trainable
    assert (len(grouped) < len([*net.parameters(), *loss.parameters()])) == (batch_norm == "frozen")
    torch.optim.AdamW(groups)  # refuses doubled tensors as well


def test_a_loss_without_tensors_has_no_group() -> None:
    groups = make_parameter_groups(make_net(), nn.Identity(), lr=0.01, proxy_lr_mult=100)
    assert [group["name"] for group in groups] == ["backbone", "head"]


def test_a_tensor_outside_the_known_parts_is_noticed() -> None:
    net = make_net()
    net.extra = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match="exactly one parameter group"):
        make_parameter_groups(net, nn.Identity(), lr=0.01, proxy_lr_mult=100)
    shared = ProxyAnchorLoss(5, 8)
    shared.extra = make_net().head
    net = make_net()
    net.head = shared.extra
    with pytest.raises(RuntimeError, match="exactly one parameter group"):
        make_parameter_groups(net, shared, lr=0.01, proxy_lr_mult=100)


def test_description_gives_rates_and_sizes() -> None:
    groups = make_parameter_groups(make_net(), ProxyAnchorLoss(500, 8), lr=1e-4, proxy_lr_mult=100)
    size = sum(p.numel() for p in groups[0]["params"])
    assert describe_groups(groups) == (
        f"backbone 0.0001 ({size:,} parameters) | head 0.0001 ({96 * 8 + 8} parameters) | "
        "proxies 0.01 (4,000 parameters)"
    )


def rates(settings: OptimizerSettings, epochs: int, steps_per_epoch: int) -> list[float]:
    """The rate of each epoch's first step, and after the last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, interval = make_scheduler(optimizer, settings, epochs * steps_per_epoch)
    seen = []
    for _ in range(epochs):
        seen.append(optimizer.param_groups[0]["lr"])
        for _ in range(steps_per_epoch):
            optimizer.step()
            if interval == "step":
                scheduler.step()
        if interval == "epoch":
            scheduler.step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def test_step_schedule() -> None:
    settings = OptimizerSettings(schedule="step", lr_step_epochs=2, lr_gamma=0.25)
    assert rates(settings, 5, 3) == [1, 1, 0.25, 0.25, 0.0625, 0.0625]


def test_constant_schedule() -> None:
    assert rates(OptimizerSettings(schedule="constant", lr_step_epochs=1), 3, 2) == [1, 1, 1, 1]


def test_cosine_schedule_ends_at_zero() -> None:
    expected = [(1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(5)]
    assert rates(OptimizerSettings(schedule="cosine"), 4, 3) == pytest.approx(expected, abs=1e-9)


def test_defaults_are_the_papers() -> None:
    settings = OptimizerSettings()
    assert (settings.lr, settings.proxy_lr_mult, settings.weight_decay) == (1e-4, 100, 1e-4)
    assert (settings.schedule, settings.lr_step_epochs, settings.lr_gamma) == ("step", 10, 0.5)
    assert settings.warmup_epochs == 1
    assert settings.ema_decay is None


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("lr", bad) for bad in (0, -1e-4, math.nan, math.inf, "1e-4")],
        *[("proxy_lr_mult", bad) for bad in (0, -1)],
        ("weight_decay", -1e-4),
        ("schedule", "linear"),
        *[("lr_step_epochs", bad) for bad in (0, 1.5)],
        *[("lr_gamma", bad) for bad in (0, 1.1)],
        *[("warmup_epochs", bad) for bad in (-1, 0.5)],
        *[("ema_decay", bad) for bad in (0, 1, 1.5, "half")],
    ],
)
def test_values_out_of_range_are_named(name: str, value: object) -> None:
    with pytest.raises(UsageError, match=f"optimizer.{name}="):
        OptimizerSettings(**{name: value})
