from __future__ import annotations

import math
from functools import partial
from inspect import signature
from typing import Any

import pytest
import torch
from commands import compose_train, one_line
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.cli.config import learning
from proxy_anchor.training.module import MetricLearner
from proxy_anchor.training.optim import check_learning, make_optimizer, make_parameter_groups, make_scheduler


def make_net(**arguments) -> EmbeddingNet:
    return EmbeddingNet("test_resnet", 8, pretrained=False, image_size=32, **arguments)


def test_a_tensor_of_two_groups_is_refused() -> None:
    net, loss = make_net(), ProxyAnchorLoss(5, 8)
    loss.shared = net.head.weight
    with pytest.raises(RuntimeError, match="exactly one parameter group"):
        make_parameter_groups(net, loss, lr=0.01, proxy_lr_mult=100)


@pytest.mark.parametrize("backbone", ["test_vit", "test_resnet"])
def test_layers_of_the_backbone_have_rates_that_grow_towards_the_head(backbone: str) -> None:
    net, loss = EmbeddingNet(backbone, 8, pretrained=False, image_size=160), ProxyAnchorLoss(5, 8)
    *layers, head, proxies = make_parameter_groups(net, loss, lr=0.01, proxy_lr_mult=100, layer_decay=0.5)
    assert [each["name"] for each in layers] == [f"backbone_{n}" for n in range(len(layers))]
    assert sorted(each["lr"] for each in layers) == [0.01 * 0.5**n for n in reversed(range(len(layers)))]
    assert sum(len(each["params"]) for each in layers) == len([*net.backbone.parameters()])
    first = next(net.backbone.parameters())
    [slowest] = [each for each in layers if any(p is first for p in each["params"])]
    assert slowest["lr"] == min(each["lr"] for each in layers)
    assert (head["lr"], proxies["lr"]) == (0.01, 1.0)


@pytest.mark.parametrize("batch_norm", ["train", "frozen_statistics", "frozen"])
@pytest.mark.parametrize("pooling", ["auto", "gem"])
def test_every_trainable_tensor_is_in_exactly_one_group_and_frozen_ones_in_none(batch_norm: str, pooling: str) -> None:
    net, loss = make_net(batch_norm=batch_norm, pooling=pooling), ProxyAnchorLoss(5, 8)
    groups = make_parameter_groups(net, loss, lr=0.01, proxy_lr_mult=100)
    assert [(group["name"], group["lr"]) for group in groups] == [("backbone", 0.01), ("head", 0.01), ("proxies", 1.0)]
    assert {id(net.head.weight), id(net.head.bias)} <= {id(p) for p in groups[1]["params"]}
    assert [id(p) for p in groups[2]["params"]] == [id(loss.proxies)]
    grouped = sorted(id(p) for group in groups for p in group["params"])
    trainable = sorted(id(p) for p in [*net.parameters(), *loss.parameters()] if p.requires_grad)
    assert grouped == trainable
    assert (len(grouped) < len([*net.parameters(), *loss.parameters()])) == (batch_norm == "frozen")
    torch.optim.AdamW(groups)  # refuses doubled tensors as well


def rates(make: partial, epochs: int, steps_per_epoch: int) -> list[float]:
    """The learning rate of each epoch's first step, and after the last."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    entry = make_scheduler(make, optimizer, epochs * steps_per_epoch)
    seen = []
    for _ in range(epochs):
        seen.append(optimizer.param_groups[0]["lr"])
        for _ in range(steps_per_epoch):
            optimizer.step()
            if entry["interval"] == "step":
                entry["scheduler"].step()
        if entry["interval"] == "epoch":
            entry["scheduler"].step()
    return [*seen, optimizer.param_groups[0]["lr"]]


def configured(*overrides: str) -> dict[str, Any]:
    return learning(compose_train("dataset=cub", "backbone=resnet50", *overrides))


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (("scheduler.step_size=2", "scheduler.gamma=0.25"), [1, 1, 0.25, 0.25, 0.0625]),
        (("scheduler=constant",), [1] * 5),
        (("scheduler=cosine",), [(1 + math.cos(math.pi * epoch / 4)) / 2 for epoch in range(5)]),
    ],
)
def test_schedules(overrides: tuple[str, ...], expected: list[float]) -> None:
    assert rates(configured(*overrides)["scheduler"], 4, 3) == pytest.approx(expected, abs=1e-9)


@pytest.mark.parametrize(("given", "expected"), [("null", ("step", 12)), ("3", ("epoch", 3))])
def test_a_schedule_over_all_steps_moves_at_each(given: str, expected: tuple[str, int]) -> None:
    make = configured("scheduler=cosine", f"scheduler.T_max={given}")["scheduler"]
    entry = make_scheduler(make, torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0), total_steps=12)
    assert (entry["interval"], entry["scheduler"].T_max) == expected


def test_a_schedule_of_absolute_rates_leaves_the_proxies_their_multiple() -> None:
    one_cycle = ["scheduler._target_=torch.optim.lr_scheduler.OneCycleLR", "~scheduler.step_size", "~scheduler.gamma"]
    make = configured(*one_cycle, "+scheduler.total_steps=null", "+scheduler.max_lr=1e-3")["scheduler"]
    for each in (make, partial(OneCycleLR, total_steps=12, max_lr=[1e-3, 0.1])):  # of each group
        groups = [{"params": [nn.Parameter(torch.zeros(1))], "lr": rate} for rate in (0.1, 10.0)]
        make_scheduler(each, optimizer := torch.optim.SGD(groups, lr=0.1), total_steps=12)
        assert [group["max_lr"] for group in optimizer.param_groups] == pytest.approx([1e-3, 0.1])


def test_the_papers_rates_are_the_defaults_of_the_module_too() -> None:
    given = configured("scheduler.step_size=10")
    defaults = signature(MetricLearner).parameters
    for name in ("optimizer", "scheduler"):
        one, other = given[name], defaults[name].default
        assert (one.func, {key: one.keywords[key] for key in other.keywords}) == (other.func, other.keywords)
    assert given["proxy_lr_mult"] == defaults["proxy_lr_mult"].default == 100


@pytest.mark.parametrize(
    ("override", "text"),
    [
        *[(f"optimizer.lr={bad}", "optimizer.lr=") for bad in (0, -1e-4, "nan", "inf", "fast")],
        *[(f"optimizer.warmup_epochs={bad}", "optimizer.warmup_epochs=") for bad in (-1, 0.5)],
        ("optimizer.weight_decay=-1e-4", "optimizer=AdamW does not take these arguments: .*weight_decay"),
        ("+optimizer.momentun=1", "optimizer=AdamW does not take these arguments: .*'momentun'"),
        ("+scheduler.milestones=[1]", "scheduler=StepLR does not take these arguments: .*'milestones'"),
    ],
)
def test_values_out_of_range_are_named(override: str, text: str) -> None:
    one_line(check_learning, **configured(override), match=text)


def test_every_group_has_the_papers_decay_and_adams_default_moments() -> None:
    net, loss, make = make_net(), ProxyAnchorLoss(3, 8), configured()["optimizer"]
    groups = make_parameter_groups(net, loss, lr=make.keywords["lr"], proxy_lr_mult=100)
    for group in make_optimizer(make, groups, fused=False).param_groups:
        assert (group["weight_decay"], group["betas"], group["eps"]) == (1e-4, (0.9, 0.999), 1e-8), group["name"]


@pytest.mark.parametrize("name", ["SGD", "Adam", "RAdam", "Adagrad"])
def test_any_optimizer_of_torch_takes_the_groups(name: str) -> None:
    net, loss = make_net(), ProxyAnchorLoss(3, 8)
    make = configured(f"optimizer._target_=torch.optim.{name}")["optimizer"]
    groups = make_parameter_groups(net, loss, lr=make.keywords["lr"], proxy_lr_mult=100)
    optimizer = make_optimizer(make, groups, fused=True)
    assert type(optimizer).__name__ == name
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-4, 1e-4, 1e-2])


def test_an_argument_that_excludes_fused_kernels_is_taken() -> None:
    check_learning(**configured("+optimizer.foreach=true"))
