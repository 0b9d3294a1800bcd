"""The Triton kernels of the loss: value and both gradients are the definition's in float64, to float32's precision."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses import class_block
from proxy_anchor.losses.class_block import class_block_loss

pytest.importorskip("triton")

import fused_runs
from fused_runs import CASES
from processes import run_interpreted

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
TOLERANCE = 5e-6  # of the largest number; a card takes 1 / root to 1e-7, and alpha multiplies that


@pytest.fixture(scope="module")
def interpreted(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """All cases on the CPU, in one process of Triton's interpreter."""
    if torch.cuda.is_available():
        pytest.skip("a card runs the kernels themselves, below")
    file = tmp_path_factory.mktemp("fused") / "results.pt"
    run_interpreted(fused_runs.__file__, file, timeout_s=240)
    return torch.load(file)


def assert_close(found: list[Tensor], expected: list[Tensor]) -> None:
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        assert (a.dtype, a.shape) == (torch.float32, b.shape)
        largest = b.abs().max().clamp(min=1) if b.ndim == 0 else b.abs().max()  # a value may be near 0
        assert float((a - b).abs().max() / largest) < TOLERANCE


@pytest.mark.parametrize("name", CASES)
def test_interpreted_it_is_the_definition(interpreted: dict[str, list[Tensor]], name: str) -> None:
    assert_close(interpreted[name], fused_runs.expected(CASES[name]))


def test_interpreted_it_takes_views_and_gives_the_value_alone(interpreted: dict) -> None:
    for a, b in zip(interpreted["not_contiguous"], interpreted["ordinary"], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)  # the matrix product may add in another order
    assert torch.equal(interpreted["without_gradients"], interpreted["ordinary"][0])


def test_interpreted_a_not_a_number_reaches_the_loss(interpreted: dict) -> None:
    assert all(torch.tensor(interpreted["with_a_not_a_number"]).isnan())


def test_interpreted_a_label_out_of_range_is_not_a_class_of_its_own(interpreted: dict) -> None:
    assert torch.tensor(interpreted["with_a_label_out_of_range"]).isnan().tolist() == [True, True, False, False]


@pytest.mark.parametrize(("batch", "dim"), [(180, 512), (7, 9), (1030, 16)])
def test_they_compile_for_a_card_where_there_is_none(
    batch: int, dim: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses: branches that disagree on a type, for one."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from proxy_anchor.losses import class_block_kernel as kernels

    if "nvidia" not in triton.backends.backends:
        pytest.skip("this Triton has no compiler for NVIDIA cards")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    block_b, block_d = triton.next_power_of_2(batch + 3), triton.next_power_of_2(dim)
    constants = {"dim": dim, "tile": 4, "block_b": block_b, "block_d": block_d, "differentiate": True}
    numbers = {"alpha": "fp32", "shift": "fp32", "num_classes": "fp32"}
    numbers |= dict.fromkeys(("batch", "quads", "classes", "image_programs"), "i32")
    for kernel in (kernels._normalise, kernels._weigh, kernels._finish):
        for present in (True, False):
            constants["count_present"] = present
            held = {each.name: constants[each.name] for each in kernel.params if each.is_constexpr}
            types = {"labels": "*i64", "present": "*fp32" if present else "*i64"} | numbers
            signature = {name: "constexpr" if name in held else types.get(name, "*fp32") for name in kernel.arg_names}
            made = triton.compile(ASTSource(kernel, signature, held), target=GPUTarget("cuda", 90, 32))
            assert made.asm["cubin"]


def test_a_second_derivative_is_refused() -> None:
    from proxy_anchor.losses.class_block_kernel import FusedClassBlockLoss

    with pytest.raises(UsageError, match="create_graph=True"):
        FusedClassBlockLoss.backward(None, torch.ones(()))


def test_what_the_kernels_are_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not for the CPU, float64, rows wider than a program, or nothing; decided without looking at a device."""

    class OnCard:
        is_cuda = True

        def __init__(self, *shape: int, dtype: torch.dtype = torch.float32) -> None:
            self.shape, self.dtype = shape, dtype

        def get_device(self) -> int:
            return 0

    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    fits = class_block._fits_the_kernels
    x, proxies, labels = OnCard(180, 512), OnCard(1_000_000, 512), OnCard(180)
    assert fits(x, proxies, labels, None)
    assert fits(x, proxies, labels, OnCard())
    assert not fits(x, proxies, labels, torch.tensor(3))
    assert not fits(x, proxies, torch.zeros(180), None)
    assert not fits(torch.zeros(180, 512), torch.zeros(9, 512), torch.zeros(180), None)
    assert not fits(OnCard(180, 512, dtype=torch.float64), proxies, labels, None)
    assert not fits(x, OnCard(0, 512), labels, None)
    assert fits(OnCard(4096, 4096), proxies, OnCard(4096), None)
    assert not fits(OnCard(4097, 512), proxies, OnCard(4097), None)
    assert not fits(OnCard(180, 4097), OnCard(9, 4097), labels, None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert not fits(x, proxies, labels, None)


# On a card


@needs_cuda
@pytest.mark.parametrize("name", CASES)
def test_on_a_card_it_is_the_definition(name: str) -> None:
    assert_close(fused_runs.found(CASES[name], "cuda"), fused_runs.expected(CASES[name]))


def large_batch(batch: int, classes: int, dim: int) -> tuple[Tensor, Tensor, Tensor]:
    x, proxies = (torch.randn(n, dim, device="cuda", requires_grad=True) for n in (batch, classes))
    return x, proxies, torch.randint(classes, (batch,), device="cuda")


def value_and_gradients(x: Tensor, proxies: Tensor, labels: Tensor) -> list[Tensor]:
    value = class_block_loss(x, proxies, labels, 32.0, 0.1)
    return [value.detach(), *torch.autograd.grad(value, [x, proxies])]


@needs_cuda
@pytest.mark.parametrize(
    "shape", [(180, 100, 512), (179, 11_318, 512), (4096, 300, 96), (60, 50, 4096), (4097, 300, 96)], ids=str
)
def test_on_a_card_it_is_the_torch_path_in_float64_at_every_size(shape: tuple[int, int, int]) -> None:
    x, proxies, labels = large_batch(*shape)
    x64, proxies64 = (each.detach().double().requires_grad_() for each in (x, proxies))
    found = [each.cpu() for each in value_and_gradients(x, proxies, labels)]
    assert_close(found, [each.cpu() for each in value_and_gradients(x64, proxies64, labels)])


@needs_cuda
def test_on_a_card_two_runs_give_the_same_bits_and_a_graph_too() -> None:
    x, proxies, labels = large_batch(180, 11_318, 512)
    first, second = value_and_gradients(x, proxies, labels), value_and_gradients(x, proxies, labels)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        value_and_gradients(x, proxies, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        recorded = value_and_gradients(x, proxies, labels)
    graph.replay()
    for a, b, c in zip(first, second, recorded, strict=True):
        assert torch.equal(a, b)
        torch.testing.assert_close(a, c, rtol=1e-5, atol=1e-7)  # the matrix library may choose otherwise when recorded


@needs_cuda
def test_on_a_card_a_step_launches_little_and_waits_for_none() -> None:
    x, proxies, labels = large_batch(180, 11_318, 512)
    value_and_gradients(x, proxies, labels)
    torch.cuda.set_sync_debug_mode("error")
    try:
        value_and_gradients(x, proxies, labels)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        value_and_gradients(x, proxies, labels)
        torch.cuda.synchronize()
    kernels = [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    # Three of ours, three products, a sum, the 1 that is the gradient of the value; the matrix library may split a product
    # and sum its parts, the sum clear a counter.
    assert 8 <= len(kernels) <= 14, kernels


@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_on_a_card_autocast_changes_nothing(dtype: torch.dtype) -> None:
    loss = ProxyAnchorLoss(50, 32).cuda()
    x, labels = torch.randn(16, 32, device="cuda", requires_grad=True), torch.randint(50, (16,), device="cuda")
    expected = torch.autograd.grad(loss(x, labels), [x, loss.proxies])
    with torch.autocast("cuda", dtype=dtype):
        actual = torch.autograd.grad(loss(x, labels), [x, loss.proxies])
    for a, b in zip(actual, expected, strict=True):
        assert torch.equal(a, b)
