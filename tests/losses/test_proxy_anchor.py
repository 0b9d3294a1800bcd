from __future__ import annotations

import math
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from commands import one_line
from eq_4 import proxy_anchor
from pytorch_metric_learning.losses import MultipleLosses
from pytorch_metric_learning.miners import BatchHardMiner
from torch import Tensor
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.proxy_anchor import proxy_anchor_loss

GOLDEN = np.load(Path(__file__).parents[1] / "fidelity" / "proxy_anchor.npz")
CASES = sorted({key.split("/")[0] for key in GOLDEN})
PRECISIONS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def loss_with(proxies: Tensor, alpha: float = 32.0, delta: float = 0.1) -> ProxyAnchorLoss:
    loss = ProxyAnchorLoss(*proxies.shape, alpha=alpha, delta=delta).to(proxies.dtype)
    with torch.no_grad():
        loss.proxies.copy_(proxies)
    return loss


def value_and_gradients(loss: ProxyAnchorLoss, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    x = x.clone().requires_grad_()
    value = loss(x, labels)
    grad_x, grad_proxies = torch.autograd.grad(value, [x, loss.proxies])
    return value.detach(), grad_x, grad_proxies


def random_batch(batch: int, classes: int, dim: int = 6, dtype: torch.dtype = torch.float64):
    return (
        torch.randn(batch, dim, dtype=dtype),
        torch.randn(classes, dim, dtype=dtype),
        torch.randint(classes, (batch,)),
    )


# The value and the gradients


@pytest.mark.parametrize("case", CASES)
def test_golden_value_and_gradients(case: str) -> None:
    x, proxies, labels = (torch.from_numpy(GOLDEN[f"{case}/{name}"]) for name in ("x", "proxies", "labels"))
    loss = loss_with(proxies, float(GOLDEN[f"{case}/alpha"]), float(GOLDEN[f"{case}/delta"]))
    value, grad_x, grad_proxies = value_and_gradients(loss, x, labels)
    assert value.dtype == torch.float64
    np.testing.assert_allclose(value, GOLDEN[f"{case}/loss"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(grad_x, GOLDEN[f"{case}/grad_x"], rtol=1e-9, atol=1e-9)
    np.testing.assert_allclose(grad_proxies, GOLDEN[f"{case}/grad_proxies"], rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(("batch", "classes"), [(12, 5), (3, 20), (1, 3), (4, 1)])
@pytest.mark.parametrize(("alpha", "delta"), [(32.0, 0.1), (16.0, 0.0), (4.0, 0.7)])
def test_equals_plain_loops(batch: int, classes: int, alpha: float, delta: float) -> None:
    x, proxies, labels = random_batch(batch, classes)
    value = loss_with(proxies, alpha, delta)(x, labels)
    assert value.item() == pytest.approx(proxy_anchor([*x], labels.tolist(), [*proxies], alpha, delta), rel=1e-11)


@pytest.mark.parametrize(("batch", "classes"), [(12, 5), (3, 20), (1, 3), (4, 1)])
def test_gradient_is_the_closed_form_of_eq_6(batch: int, classes: int) -> None:
    alpha, delta = 8.0, 0.1
    similarities = torch.rand(batch, classes, dtype=torch.float64) * 2 - 1
    labels = torch.randint(classes, (batch,))
    own = F.one_hot(labels, classes).bool()
    h_pull = torch.exp(-alpha * (similarities - delta)) * own
    h_push = torch.exp(alpha * (similarities + delta)) * ~own
    expected = -alpha * h_pull / (1 + h_pull.sum(0)) / own.any(0).sum()
    expected += alpha * h_push / (1 + h_push.sum(0)) / classes

    similarities.requires_grad_()
    proxy_anchor_loss(similarities, labels, alpha, delta).backward()
    torch.testing.assert_close(similarities.grad, expected, rtol=1e-12, atol=1e-14)


def test_length_of_embeddings_and_proxies_does_not_matter() -> None:
    x, proxies, labels = random_batch(12, 5)
    scaled = loss_with(proxies * torch.rand(5, 1).add(0.1))(x * torch.rand(12, 1).mul(100).add(1), labels)
    torch.testing.assert_close(scaled, loss_with(proxies)(x, labels))


# Numerics


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
@pytest.mark.parametrize(
    ("sign", "labels", "pull", "push"),
    [
        (1, [0, 1, 2], 0, 128 * 0.1 + math.log(2)),  # every image on its own proxy: two negatives at similarity 0
        (1, [1, 2, 0], 128 * 0.1, 128 * 1.1),  # on another's proxy
        (-1, [0, 1, 2], 128 * 1.1, 128 * 0.1 + math.log(2)),  # opposite its own proxy
        (-1, [1, 2, 0], 128 * 0.1, 128 * 0.1),  # opposite another's: one negative at 0, one at -1
    ],
)
def test_alpha_128_at_similarities_of_one(
    dtype: torch.dtype, sign: int, labels: list[int], pull: float, push: float
) -> None:
    x = (sign * torch.eye(3)).to(dtype)
    value, grad_x, grad_proxies = value_and_gradients(loss_with(torch.eye(3), alpha=128.0), x, torch.tensor(labels))
    assert value.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert float(value) == pytest.approx(pull + push, abs=1e-4)
    assert grad_x.dtype == dtype
    assert grad_x.isfinite().all()
    assert grad_proxies.isfinite().all()


@pytest.mark.parametrize("dtype", PRECISIONS, ids=str)
def test_zero_vectors_have_similarity_zero(dtype: torch.dtype) -> None:
    proxies = torch.eye(3)
    proxies[1] = 0
    x = torch.zeros(2, 3, dtype=dtype)
    value, grad_x, grad_proxies = value_and_gradients(loss_with(proxies), x, torch.tensor([0, 1]))
    pull = math.log(1 + math.exp(3.2))
    push = (2 * math.log(1 + math.exp(3.2)) + math.log(1 + 2 * math.exp(3.2))) / 3
    assert float(value) == pytest.approx(pull + push, rel=1e-5)
    assert grad_proxies.isfinite().all()
    # The gradient is of order 1e7: float16 cannot hold it, and overflows to what a loss scaler knows how to skip.
    assert not grad_x.isnan().any()
    assert grad_x.isfinite().all() == (dtype != torch.float16)


# The module


def test_proxies_are_drawn_as_in_the_protocol() -> None:
    for classes, norm in ((100, 3.2), (11_318, 0.30)):
        loss = ProxyAnchorLoss(classes, 512)
        assert loss.proxies.shape == (classes, 512)
        assert float(loss.proxies.detach().norm(dim=1).mean()) == pytest.approx(norm, rel=0.02)


def test_defaults_are_the_papers() -> None:
    loss = ProxyAnchorLoss(3, 2)
    assert (loss.alpha, loss.delta) == (32.0, 0.1)


def test_nothing_of_size_classes_squared_and_no_one_hot_is_kept_for_backward() -> None:
    batch, classes, dim = 6, 50, 4
    saved: list[Tensor] = []
    x = torch.randn(batch, dim, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor):
        value = ProxyAnchorLoss(classes, dim)(x, torch.randint(classes, (batch,)))
    value.backward()
    assert saved
    for tensor in saved:
        assert tensor.numel() <= (batch + 1) * classes
        if not tensor.is_floating_point():
            assert tensor.numel() <= batch**2  # indices and pairs of images, no masks of classes
        elif tensor.numel() >= batch * classes:
            assert not ((tensor == 0) | (tensor == 1)).all()  # a one-hot in float


def test_nothing_waits_for_the_device() -> None:
    class Operations(TorchDispatchMode):
        names: ClassVar[set[str]] = set()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.names.add(function.__name__.split(".")[0])
            return function(*args, **(kwargs or {}))

    loss, x = ProxyAnchorLoss(50, 16), torch.randn(12, 16, requires_grad=True)
    loss.check_labels = False
    labels = torch.randint(50, (12,))
    with Operations() as operations:
        loss(x, labels).backward()
    assert "mm" in operations.names
    # A value read by the host, a result whose shape depends on values, a number sent to the device.
    waits = {"_local_scalar_dense", "nonzero", "masked_select", "_unique2", "index", "lift_fresh"}
    assert not waits & operations.names


# Bad input


LABELS = torch.tensor([0, 1, 1])


@pytest.mark.parametrize(
    ("shape", "labels", "message"),
    [
        *[((3, 4), torch.tensor([0, label, 1]), rf"label {label} is outside \[0, 3\)") for label in (3, -1, 100)],
        *[((3, 4), LABELS.to(kind), str(kind)) for kind in (torch.float32, torch.float16, torch.bool)],
        *[(shape, LABELS, "expected embeddings") for shape in ((3, 5), (3, 4, 1), (4,), (2, 4))],
        *[((3, 4), torch.zeros(shape, dtype=torch.long), "expected embeddings") for shape in ((3, 1), ())],
        ((0, 4), torch.zeros(0, dtype=torch.long), "batch is empty"),
    ],
)
def test_batches_that_do_not_fit_are_refused(shape: tuple, labels: Tensor, message: str) -> None:
    loss = ProxyAnchorLoss(3, 4)
    for loss.check_labels in {True, "outside" in message}:  # the range alone is checked on demand
        one_line(loss, torch.randn(shape), labels, match=message)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("alpha", bad) for bad in (0, -1, math.nan, math.inf, "32", True)],
        *[("delta", bad) for bad in (-0.1, math.nan, None)],
        *[("num_classes", bad) for bad in (0, -1, 2.0, True)],
        *[("embedding_dim", bad) for bad in (0, 1.5, False)],
    ],
)
def test_arguments_out_of_range_are_named(name: str, value: object) -> None:
    one_line(ProxyAnchorLoss, **{"num_classes": 3, "embedding_dim": 4, name: value}, match=name)


def test_arguments_of_pytorch_metric_learning_are_none_or_refused() -> None:
    x, proxies, labels = random_batch(6, 5)
    loss = loss_with(proxies)
    assert MultipleLosses([loss, loss])(x, labels) == 2 * loss(x, labels) == 2 * loss(x, labels, None, ref_emb=None)
    for given, named in (((BatchHardMiner()(x, labels),), {}), ((), {"ref_emb": x, "ref_labels": labels})):
        with pytest.raises(UsageError, match=r"^ProxyAnchorLoss takes embeddings and labels alone: leave out"):
            loss(x, labels, *given, **named)


def test_functional_gradients_are_those_of_autograd() -> None:
    x, proxies, labels = random_batch(6, 5)
    loss = loss_with(proxies)
    _, grad_x, grad_proxies = value_and_gradients(loss, x, labels)

    def value(parameters: dict[str, Tensor], x: Tensor, labels: Tensor) -> Tensor:
        return torch.func.functional_call(loss, parameters, (x, labels))

    both = torch.func.grad(value, argnums=(0, 1))({"proxies": proxies}, x, labels)
    torch.testing.assert_close(both, ({"proxies": grad_proxies}, grad_x))
    loss.check_labels = False
    by_image = torch.func.vmap(torch.func.grad(value), (None, 0, 0))({"proxies": proxies}, x[:, None], labels[:, None])
    expected = [value_and_gradients(loss, x[[row]], labels[[row]])[2] for row in range(6)]
    torch.testing.assert_close(by_image["proxies"], torch.stack(expected))
