"""Proxies divided over 2 and 3 gloo processes: value and both gradients are those of the loss in one piece."""

from __future__ import annotations

import pytest
import torch
from processes import run_processes
from sharded_runs import CASES, batch, sharded

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.sharded import ShardedProxyAnchorLoss, ignored_by_ddp


@pytest.fixture(scope="module", params=[2, 3])
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[list[dict]]:
    return run_processes(sharded, world_size=request.param, folder=tmp_path_factory.mktemp("sharded"))


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_equals_the_loss_in_one_piece(ranks: list[list[dict]], case: int) -> None:
    num_classes, dtype = CASES[case]
    found = [rank[case] for rank in ranks]
    whole = ProxyAnchorLoss(num_classes, 4).to(dtype)
    whole.proxies = torch.nn.Parameter(found[0]["all"])
    embeddings, labels = batch(dtype)
    embeddings.requires_grad_()
    value = whole(embeddings, labels)
    (2 * value).backward()
    tolerance = 1e-12 if dtype == torch.float64 else 1e-6  # of the largest number
    for each in found:
        assert error(each["value"], value.detach()) < tolerance
        assert error(each["embeddings"], embeddings.grad) < tolerance
    assert [each["classes"].start for each in found[1:]] == [each["classes"].stop for each in found[:-1]]
    assert error(torch.cat([each["proxies"] for each in found]), whole.proxies.grad) < tolerance


@pytest.mark.parametrize("case", range(len(CASES)), ids=str)
def test_the_proxies_do_not_depend_on_the_number_of_processes(ranks: list[list[dict]], case: int) -> None:
    num_classes, dtype = CASES[case]
    torch.manual_seed(3)
    alone = ShardedProxyAnchorLoss(num_classes, 4).to(dtype)
    for rank in ranks:
        assert torch.equal(rank[case]["all"], alone.proxies.detach())


def test_alone_it_is_the_loss_itself() -> None:
    loss, whole = ShardedProxyAnchorLoss(5000, 4), ProxyAnchorLoss(5000, 4)
    assert float(loss.proxies.detach().std()) == pytest.approx(float(whole.proxies.detach().std()), rel=0.03)
    whole.proxies = loss.proxies
    torch.testing.assert_close(loss(*batch(torch.float32)), whole(*batch(torch.float32)))
    assert ignored_by_ddp(torch.nn.ModuleDict({"loss": loss})) == ["loss.proxies"]
    assert ignored_by_ddp(whole) == []


def test_labels_and_shapes_are_checked() -> None:
    loss = ShardedProxyAnchorLoss(4, 4)
    with pytest.raises(UsageError, match="label 6 is outside"):
        loss(*batch(torch.float32))
    with pytest.raises(UsageError, match=r"expected embeddings \(B, 4\)"):
        loss(torch.zeros(2, 3), torch.tensor([0, 1]))
