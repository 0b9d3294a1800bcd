"""The guard: which step is named, and that a step which is not finite leaves the weights alone."""

from __future__ import annotations

import torch

from proxy_anchor.training.finite import FiniteGuard

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


def test_a_fused_optimizer_skips_the_step_by_itself() -> None:
    # What a GPU relies on, where the answer reaches the host a step later.
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = FiniteGuard()
    for gradient, moved in ((float("nan"), False), (1.0, True), (float("inf"), False)):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), gradient)
        optimizer.found_inf = guard.show("", TRUE, torch.nn.utils.get_total_norm([weight.grad]))
        optimizer.step()
        assert bool((weight != before).any()) == moved
        assert weight.isfinite().all()
    assert optimizer.state[weight]["step"] == 1
