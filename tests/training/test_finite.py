"""The guard: which step is named, and that a step which is not finite leaves the weights alone."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from proxy_anchor.training.finite import FiniteGuard, NotFinite

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


def test_the_last_step_of_an_epoch_is_checked_before_its_weights_are_saved(make_learner: Callable) -> None:
    learner = make_learner()
    learner._guard.show("at step 7", FALSE, torch.tensor(1.0))  # on a GPU the next step would look at it
    with pytest.raises(NotFinite, match="the loss is not finite at step 7"):
        learner.on_train_epoch_end()
