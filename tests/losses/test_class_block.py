from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses import class_block
from proxy_anchor.losses.class_block import class_block_loss
from proxy_anchor.losses.proxy_anchor import proxy_anchor_loss, unit_length

SHAPES = [(12, 5, 6), (3, 20, 6), (40, 7, 3), (1, 3, 4), (4, 1, 4), (1, 1, 2), (5, 300, 16), (8, 8, 8), (33, 2, 1)]


def random_batch(batch: int, classes: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    x, proxies = torch.randn(batch, dim).double() * 3, torch.randn(classes, dim).double()
    return x.requires_grad_(), proxies.requires_grad_(), torch.randint(classes, (batch,))


def by_definition(x: Tensor, proxies: Tensor, labels: Tensor, alpha: float, delta: float) -> Tensor:
    return proxy_anchor_loss(unit_length(x) @ unit_length(proxies).T, labels, alpha, delta)


def with_gradients(value: Tensor, x: Tensor, proxies: Tensor) -> tuple[Tensor, ...]:
    return (value.detach(), *torch.autograd.grad(value, [x, proxies]))


def assert_same(actual: tuple[Tensor, ...], expected: tuple[Tensor, ...]) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# The same numbers as the definition


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(("alpha", "delta"), [(32.0, 0.1), (4.0, 0.7), (128.0, 0.0)])
def test_equals_the_definition_and_its_automatic_gradient(shape: tuple, alpha: float, delta: float) -> None:
    x, proxies, labels = random_batch(*shape)
    actual = with_gradients(class_block_loss(x, proxies, labels, alpha, delta), x, proxies)
    assert_same(actual, with_gradients(by_definition(x, proxies, labels, alpha, delta), x, proxies))


def test_zero_rows_have_the_gradient_of_the_definition() -> None:
    x, proxies, labels = random_batch(6, 4, 5)
    with torch.no_grad():
        x[1], proxies[2], proxies[labels[0]] = 0, 0, 0
    actual = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    expected = with_gradients(by_definition(x, proxies, labels, 32.0, 0.1), x, proxies)
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES[:5], ids=str)
def test_gradcheck(shape: tuple) -> None:
    x, proxies, labels = random_batch(*shape)
    assert torch.autograd.gradcheck(lambda x, proxies: class_block_loss(x, proxies, labels, 4.0, 0.1), (x, proxies))


@pytest.mark.parametrize("chunk", [1, 40, 100])
def test_the_size_of_a_chunk_changes_nothing(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x, proxies, labels = random_batch(10, 23, 6)
    expected = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    monkeypatch.setattr(class_block, "CHUNK_ELEMENTS", chunk)
    assert_same(with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies), expected)


@pytest.mark.parametrize("cuts", [(0, 4, 5, 19), (0, 1, 18, 19), (0, 0, 7, 19)], ids=str)
@pytest.mark.parametrize("count_dtype", [torch.int64, torch.float64], ids=str)
def test_blocks_of_classes_sum_to_the_whole(cuts: tuple[int, ...], count_dtype: torch.dtype) -> None:
    x, proxies, labels = random_batch(16, 19, 6)
    num_present = torch.tensor(len(labels.unique()), dtype=count_dtype)
    parts = [
        class_block_loss(x, proxies[a:b], labels - a, 32.0, 0.1, num_classes=19, num_present=num_present)
        for a, b in pairwise(cuts)
    ]
    summed = with_gradients(torch.stack(parts).sum(), x, proxies)
    assert_same(summed, with_gradients(by_definition(x, proxies, labels, 32.0, 0.1), x, proxies))


# How autograd may use it


@pytest.mark.parametrize("wanted", ["embeddings", "proxies"])
def test_only_one_gradient_wanted(wanted: str) -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    expected = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    if wanted == "embeddings":
        proxies.requires_grad_(False)
        class_block_loss(x, proxies, labels, 32.0, 0.1).backward()
        assert torch.equal(x.grad, expected[1])
    else:
        x.requires_grad_(False)
        class_block_loss(x, proxies, labels, 32.0, 0.1).backward()
        assert torch.equal(proxies.grad, expected[2])


def test_without_gradients() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    expected = class_block_loss(x, proxies, labels, 32.0, 0.1)
    with torch.no_grad():
        value = class_block_loss(x, proxies, labels, 32.0, 0.1)
    with torch.inference_mode():
        inferred = class_block_loss(x, proxies, labels, 32.0, 0.1)
    assert not value.requires_grad
    assert torch.equal(value, expected.detach())
    assert torch.equal(inferred, expected.detach())
    assert not class_block_loss(x.detach(), proxies.detach(), labels, 32.0, 0.1).requires_grad


def test_backward_twice_and_scaled() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    value = class_block_loss(x, proxies, labels, 32.0, 0.1)
    first = torch.autograd.grad(value, [x, proxies], retain_graph=True)
    second = torch.autograd.grad(-3 * value, [x, proxies])
    assert_same(second, tuple(-3 * each for each in first))


def test_a_second_derivative_is_refused() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    with pytest.raises(UsageError, match="create_graph=True"):
        torch.autograd.grad(class_block_loss(x, proxies, labels, 32.0, 0.1), x, create_graph=True)


def test_inputs_that_are_not_contiguous() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    expected = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    for layout in (lambda t: t.T.contiguous().T, lambda t: torch.stack([t, t], 2)[:, :, 0]):
        actual = class_block_loss(layout(x), layout(proxies), torch.stack([labels, labels], 1)[:, 0], 32.0, 0.1)
        assert_same(with_gradients(actual, x, proxies), expected)


def test_a_proxy_changed_before_backward_is_noticed() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    value = class_block_loss(x, proxies, labels, 32.0, 0.1)
    with torch.no_grad():
        proxies.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        value.backward()


def test_an_embedding_changed_before_backward_does_no_harm() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    _, expected, _ = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    value = class_block_loss(x, proxies, labels, 32.0, 0.1)
    with torch.no_grad():
        x.add_(1)
    value.backward()
    assert torch.equal(x.grad, expected)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_autocast_around_forward_and_backward_changes_nothing(dtype: torch.dtype) -> None:
    x, labels, loss = torch.randn(16, 8, requires_grad=True), torch.randint(6, (16,)), ProxyAnchorLoss(6, 8)
    expected = torch.autograd.grad(loss(x, labels), [x, loss.proxies])
    with torch.autocast("cpu", dtype=dtype):
        actual = torch.autograd.grad(loss(x, labels), [x, loss.proxies])
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_embeddings_get_a_gradient_of_their_type(dtype: torch.dtype) -> None:
    x, labels = torch.randn(16, 8).to(dtype).requires_grad_(), torch.randint(6, (16,))
    loss = ProxyAnchorLoss(6, 8, alpha=128.0)
    loss(x, labels).backward()
    assert (x.grad.dtype, loss.proxies.grad.dtype) == (dtype, torch.float32)
    assert x.grad.isfinite().all()
    assert loss.proxies.grad.isfinite().all()


def test_a_not_a_number_reaches_the_loss() -> None:
    for where in ("image", "own proxy", "other proxy"):
        x, proxies, _ = random_batch(4, 5, 3)
        with torch.no_grad():
            (x if where == "image" else proxies)[0] = torch.nan
        labels = torch.full((4,), 1 if where == "other proxy" else 0)
        assert class_block_loss(x, proxies, labels, 32.0, 0.1).isnan()


# What it costs


class Operations(TorchDispatchMode):
    """Names of the operations that ran, and how many numbers each made."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        self.names[function.__name__.split(".")[0]] += 1
        if isinstance(result, Tensor) and not function.is_view and not function._schema.is_mutable:
            self.sizes.append(result.numel())
        return result


def test_nothing_waits_for_the_device_and_little_is_launched() -> None:
    loss, x = ProxyAnchorLoss(50, 16, check_labels=False), torch.randn(12, 16, requires_grad=True)
    labels = torch.randint(50, (12,))
    with Operations() as operations:
        loss(x, labels).backward()
    # A value read by the host, a result whose shape depends on values, a number sent to the device.
    assert not {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "index", "lift_fresh"} & set(
        operations.names
    )
    # No sum by index: atomic on a GPU, hence not repeatable.
    assert not {"scatter_add", "scatter_add_", "index_add", "index_add_", "index_put_"} & set(operations.names)
    assert operations.names["mm"] == 3
    assert operations.names.total() < 110  # views included


def test_deterministic_algorithms_are_all_it_needs() -> None:
    x, proxies, labels = random_batch(9, 5, 4)
    expected = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    torch.use_deterministic_algorithms(True)
    try:
        actual = with_gradients(class_block_loss(x, proxies, labels, 32.0, 0.1), x, proxies)
    finally:
        torch.use_deterministic_algorithms(False)
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)


def test_no_normalised_copy_of_the_proxies_is_made_or_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    batch, classes, dim = 8, 500, 64
    loss, x = ProxyAnchorLoss(classes, dim), torch.randn(batch, dim, requires_grad=True)
    saved: list[Tensor] = []
    monkeypatch.setattr(class_block, "CHUNK_ELEMENTS", 600)
    with (
        torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor),
        Operations() as forward,
    ):
        value = loss(x, torch.randint(classes, (batch,)))
    kept = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in saved}
    assert kept.pop(loss.proxies.untyped_storage().data_ptr())
    assert sum(kept.values()) <= 4 * ((classes + 1) * (batch + 4) + (batch + 4) * dim + 3 * (classes + batch))

    with Operations() as backward:
        value.backward()
    similarities = (classes + 1) * (batch + 4)
    assert [size for size in forward.sizes if size > max(600, (batch + 4) * dim)] == [
        similarities
    ]  # all else by the chunk
    assert [size for size in backward.sizes if size >= classes * batch] == [classes * dim]  # the gradient itself
