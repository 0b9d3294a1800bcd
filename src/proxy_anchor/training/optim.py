"""Parameter groups, the optimizer and its schedule: the one place where learning rates are given out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from proxy_anchor.errors import check_choice, check_int, check_number
from proxy_anchor.models.embedding_net import EmbeddingNet


@dataclass(frozen=True)
class OptimizerSettings:
    """How the tensors move; the keys under `optimizer` in the config.

    lr: rate of backbone and head. proxy_lr_mult: the proxies' rate over lr (paper: 100). weight_decay: on every tensor.
    schedule: "step" (times lr_gamma every lr_step_epochs), "cosine" (to zero) or "constant".
    warmup_epochs: first epochs in which only head and proxies move, at full rate; the schedule counts them.
    ema_decay: share of its old value that the running mean of the weights keeps in a step; that mean is what is evaluated and
    saved as the network. None: the weights themselves, as in the paper.
    Raises UsageError for a value out of range.
    """

    lr: float = 1e-4
    proxy_lr_mult: float = 100.0
    weight_decay: float = 1e-4
    schedule: str = "step"
    lr_step_epochs: int = 10
    lr_gamma: float = 0.5
    warmup_epochs: int = 1
    ema_decay: float | None = None

    def __post_init__(self) -> None:
        check_number("optimizer.lr", self.lr, 0, exclusive=True)
        check_number("optimizer.proxy_lr_mult", self.proxy_lr_mult, 0, exclusive=True)
        check_number("optimizer.weight_decay", self.weight_decay, 0)
        check_choice("optimizer.schedule", self.schedule, ["step", "cosine", "constant"])
        check_int("optimizer.lr_step_epochs", self.lr_step_epochs, 1)
        check_number("optimizer.lr_gamma", self.lr_gamma, 0, maximum=1, exclusive=True)
        check_int("optimizer.warmup_epochs", self.warmup_epochs, 0)
        if self.ema_decay is not None:
            check_number("optimizer.ema_decay", self.ema_decay, 0, maximum=0.99999, exclusive=True)


def make_parameter_groups(
    net: EmbeddingNet, loss: nn.Module, *, lr: float, proxy_lr_mult: float
) -> list[dict[str, Any]]:
    """Groups backbone, head and (for a loss with learnable tensors) proxies; the last runs at lr x proxy_lr_mult.

    Every trainable tensor is in exactly one group; tensors that are frozen for good are in none.
    """
    members = {
        "backbone": (list(net.backbone.parameters()), lr),
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


def make_scheduler(optimizer: Optimizer, settings: OptimizerSettings, total_steps: int) -> tuple[LRScheduler, str]:
    """(scheduler, Lightning interval): StepLR by epoch, or a half cosine to zero over all steps, or a constant rate."""
    if settings.schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(1, total_steps)), "step"
    gamma = settings.lr_gamma if settings.schedule == "step" else 1.0
    return StepLR(optimizer, step_size=settings.lr_step_epochs, gamma=gamma), "epoch"


def describe_groups(groups: list[dict[str, Any]]) -> str:
    """One line with each group's rate and size: 'backbone 0.0001 (3,371,024 parameters) | proxies 0.01 (50,176 ...)'."""
    return " | ".join(
        f"{group['name']} {group['lr']:.4g} ({sum(p.numel() for p in group['params']):,} parameters)"
        for group in groups
    )
