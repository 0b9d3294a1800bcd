"""Parameter groups, the optimizer and its schedule: the one place where learning rates are given out."""

from __future__ import annotations

import inspect
import warnings
from functools import partial
from typing import Any

import torch
from timm.optim import param_groups_layer_decay
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CyclicLR, LRScheduler, OneCycleLR, ReduceLROnPlateau, StepLR

from proxy_anchor.errors import UsageError, check_int, check_number
from proxy_anchor.models.embedding_net import EmbeddingNet

# Default betas and eps, and decay on everything, as in the released code.
DEFAULT_OPTIMIZER: partial[Any] = partial(AdamW, lr=1e-4, weight_decay=1e-4)
DEFAULT_SCHEDULER: partial[Any] = partial(StepLR, step_size=10, gamma=0.5)


def make_parameter_groups(
    net: EmbeddingNet, loss: nn.Module, *, lr: float, proxy_lr_mult: float, layer_decay: float | None = None
) -> list[dict[str, Any]]:
    """Groups backbone, head and (for a loss with learnable tensors) proxies; the last runs at lr x proxy_lr_mult.

    layer_decay: factor of the learning rate from each layer of the backbone to the one before; the groups are then
    backbone_0 (the first layer), backbone_1, ..., as timm divides the network.
    Every trainable tensor is in exactly one group; tensors that are frozen for good are in none.
    """
    layers = {"backbone": (list(net.backbone.parameters()), lr)}
    if layer_decay is not None:
        found = param_groups_layer_decay(net.backbone, layer_decay=layer_decay, weight_decay_exclude_1d=False)
        layers = {f"backbone_{n}": (each["params"], lr * each["lr_scale"]) for n, each in enumerate(found)}
    members = {
        **layers,
        "head": ([*net.pool.parameters(), *net.head.parameters()], lr),
        "proxies": (list(loss.parameters()), lr * proxy_lr_mult),
    }
    groups = [
        {"name": name, "params": [p for p in params if p.requires_grad], "lr": rate}
        for name, (params, rate) in members.items()
    ]
    grouped = [id(p) for params, _ in members.values() for p in params if p.requires_grad]
    trainable = {id(p) for p in [*net.parameters(), *loss.parameters()] if p.requires_grad}
    if len(grouped) != len(set(grouped)) or set(grouped) != trainable:
        raise RuntimeError("every trainable tensor must be in exactly one parameter group")
    return [group for group in groups if group["params"]]


def check_learning(
    optimizer: partial[Optimizer],
    scheduler: partial[LRScheduler],
    *,
    proxy_lr_mult: float,
    warmup_epochs: int,
    layer_decay: float | None = None,
) -> None:
    """Try optimizer and scheduler on one number. Raises UsageError for an argument that they do not take."""
    check_number("optimizer.lr", optimizer.keywords.get("lr"), 0, exclusive=True)
    check_number("optimizer.proxy_lr_mult", proxy_lr_mult, 0, exclusive=True)
    check_int("optimizer.warmup_epochs", warmup_epochs, 0)
    if layer_decay is not None:
        check_number("optimizer.layer_decay", layer_decay, 0, maximum=1, exclusive=True)
    name = f"optimizer={optimizer.func.__name__}"
    try:
        groups = [{"name": name, "params": [nn.Parameter(torch.zeros(1))], "lr": 1.0} for name in ("backbone", "head")]
        tried = make_optimizer(optimizer, groups, fused=True)
        name = f"scheduler={scheduler.func.__name__}"
        entry = make_scheduler(scheduler, tried, total_steps=1)
        if not isinstance(entry["scheduler"], ReduceLROnPlateau):
            with warnings.catch_warnings(action="ignore"):  # no step of the optimizer: it would look for a GPU
                entry["scheduler"].step()
    except (TypeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise UsageError(f"{name} does not take these arguments: {error}.") from error


def make_optimizer(make: partial[Optimizer], groups: list[dict[str, Any]], *, fused: bool) -> Optimizer:
    """The optimizer over these groups, fused where it can be: one kernel instead of a dozen per step."""
    can_be_fused = "fused" in inspect.signature(make.func).parameters and not make.keywords.get("foreach")
    return make(groups, **({"fused": fused} | make.keywords if can_be_fused else {}))


_RATES: dict[Any, Any] = {OneCycleLR: ["max_lr"], CyclicLR: ["base_lr", "max_lr"], ReduceLROnPlateau: ["min_lr"]}


def make_scheduler(make: partial[LRScheduler], optimizer: Optimizer, total_steps: int) -> dict[str, Any]:
    """Lightning's `lr_scheduler` entry; the schedule moves once per epoch.

    Where its `T_max` or `total_steps` is given as None, that is the number of steps of the run, and it moves once per
    step. A rate among its arguments (`_RATES`) is the network's, as the optimizer's: other groups keep their multiple.
    """
    steps = {key: max(1, total_steps) for key in ("T_max", "total_steps") if make.keywords.get(key, 0) is None}
    rates = {
        key: [value * group["lr"] / optimizer.defaults["lr"] for group in optimizer.param_groups]
        for key, value in make.keywords.items()
        if key in _RATES.get(make.func, ()) and isinstance(value, (int, float))
    }
    return {
        "scheduler": make(optimizer, **steps, **rates),
        "interval": "step" if steps else "epoch",
        "monitor": "train/loss_epoch",  # of ReduceLROnPlateau
    }
