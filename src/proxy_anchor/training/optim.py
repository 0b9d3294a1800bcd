"""Parameter groups, the optimizer and its schedule: the one place where learning rates are given out."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler, StepLR

from proxy_anchor.errors import check_choice, check_int, check_number
from proxy_anchor.models.embedding_net import EmbeddingNet


def make_parameter_groups(net: EmbeddingNet, loss: nn.Module, *, lr: float, proxy_lr_mult: float) -> list[dict]:
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
    grouped = [id(p) for group in groups for p in group["params"]]
    trainable = {id(p) for p in [*net.parameters(), *loss.parameters()] if p.requires_grad}
    if len(grouped) != len(set(grouped)) or set(grouped) != trainable:
        raise RuntimeError("every trainable tensor must be in exactly one parameter group")
    return [group for group in groups if group["params"]]


def make_optimizer(groups: list[dict], *, weight_decay: float) -> Optimizer:
    """AdamW with default betas and eps; weight decay on everything, as in the released code."""
    return AdamW(groups, weight_decay=weight_decay)


def make_scheduler(
    optimizer: Optimizer, *, schedule: str, lr_step_epochs: int, lr_gamma: float, total_steps: int
) -> tuple[LRScheduler, str]:
    """(scheduler, Lightning interval): StepLR by epoch, or a half cosine to zero over all steps, or a constant rate."""
    if schedule == "cosine":
        return CosineAnnealingLR(optimizer, T_max=max(1, total_steps)), "step"
    gamma = lr_gamma if schedule == "step" else 1.0
    return StepLR(optimizer, step_size=lr_step_epochs, gamma=gamma), "epoch"


def check_optimization(
    *,
    lr: float,
    weight_decay: float,
    proxy_lr_mult: float,
    schedule: str,
    lr_step_epochs: int,
    lr_gamma: float,
    warmup_epochs: int,
) -> None:
    """Raise UsageError for a setting out of range."""
    check_number("optimizer.lr", lr, 0, exclusive=True)
    check_number("optimizer.weight_decay", weight_decay, 0)
    check_number("optimizer.proxy_lr_mult", proxy_lr_mult, 0, exclusive=True)
    check_choice("optimizer.schedule", schedule, ["step", "cosine", "constant"])
    check_int("optimizer.lr_step_epochs", lr_step_epochs, 1)
    check_number("optimizer.lr_gamma", lr_gamma, 0, maximum=1, exclusive=True)
    check_int("optimizer.warmup_epochs", warmup_epochs, 0)


def describe_groups(groups: list[dict]) -> str:
    """One line with each group's rate and size, e.g. 'backbone 1e-04 (3,371,024) | proxies 1e-02 (50,176)'."""
    return " | ".join(
        f"{group['name']} {group['lr']:.4g} ({sum(p.numel() for p in group['params']):,} parameters)" for group in groups
    )


class FiniteLossGuard:
    """Stops training at the first loss that is not finite, before the optimizer steps on it.

    On a GPU the flag is copied to the host while the backward pass runs, so that looking at it costs no waiting.
    """

    def __init__(self) -> None:
        self._flag: torch.Tensor | None = None
        self._copied: torch.cuda.Event | None = None

    def watch(self, loss: torch.Tensor) -> None:
        """Remember whether this (scalar) loss is finite."""
        flag = torch.isfinite(loss.detach())
        if flag.is_cuda:
            self._flag = torch.empty((), dtype=torch.bool, pin_memory=True).copy_(flag, non_blocking=True)
            self._copied = torch.cuda.Event()
            self._copied.record()
        else:
            self._flag = flag

    def is_finite(self) -> bool:
        """Whether the watched loss was finite."""
        if self._copied is not None:
            self._copied.synchronize()
        return self._flag is None or bool(self._flag)
