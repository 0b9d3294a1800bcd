"""The guard: which step is named, and that a step which is not finite leaves the weights alone."""

from __future__ import annotations

import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.training.finite import FiniteGuard

TRUE, FALSE = torch.tensor(True), torch.tensor(False)


@pytest.mark.parametrize(
    ("loss_finite", "norm", "message"),
    [
        (TRUE, 1.0, None),
        (FALSE, 1.0, r"^the loss is not finite at step 4, and no step was taken"),
        (FALSE, float("nan"), r"^the loss is not finite at step 4"),
        (TRUE, float("nan"), r"^a gradient is not finite at step 4 although the loss is"),
        (TRUE, float("inf"), r"^a gradient is not finite at step 4"),
    ],
)
def test_what_was_shown_last_is_named(loss_finite: torch.Tensor, norm: float, message: str | None) -> None:
    guard = FiniteGuard()
    guard.check()  # nothing shown yet
    bad = guard.show("at step 4", loss_finite, torch.tensor(norm))
    assert float(bad) == (0.0 if message is None else 1.0)
    if message is None:
        guard.check()
        return
    with pytest.raises(UsageError, match=message):
        guard.check()


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
