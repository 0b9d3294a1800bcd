"""A network's first evaluation and first gradients, with nothing in them, while Python imports: on a card the first convolution of
each shape takes long, because cuDNN chooses and loads its kernels, and Python's lock is free meanwhile.

Choices are kept for each thread. Those for forward are made in the thread that will need them, while another imports; those for
gradients, of which depthwise convolutions' take longest, in the one thread in which torch computes all gradients of a card.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_anchor.training.beside import run_beside

_DTYPES = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}
_DONE: set[tuple] = set()  # in this process: a second run finds its kernels
_LAST: dict[torch.device, Thread] = {}  # which a run that failed may have left at work


def rehearse_gradients(net: nn.Module, shape: Sequence[int], device: torch.device, precision: str) -> Thread | None:
    """Run the gradients of the network's convolutions for a batch of this shape in a thread, where this process has not done so.
    None where no thread does: without a card, or without a convolution.

    net: only its shapes are looked at; no parameter, statistic, random number or gradient changes. shape: (B, 3, H, W).
    precision: as the trainer names it. Join the thread before kernels are recorded or timed. It says nothing if it fails:
    training will.
    """
    if device.type != "cuda":
        return None
    dtype = _DTYPES.get(precision, torch.float32)
    before = _LAST.get(device)
    calls = [call for call in find_convolutions(net, shape) if (device, dtype, call) not in _DONE]
    if not calls:
        return before
    _DONE.update((device, dtype, call) for call in calls)

    def rehearse() -> Generator[None]:
        if before is not None:
            before.join()  # who joins this thread has joined all
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.Stream(device)):
            for call in calls:
                run_gradients(call, device, dtype)
                yield
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()  # what this stream held, no other could use
            yield

    _LAST[device] = thread = run_beside(rehearse())
    return thread


def rehearse_evaluation(net: nn.Module, shape: Sequence[int], device: torch.device, precision: str) -> None:
    """Embed a batch of this shape (B, 3, H, W) in this thread, as an evaluation does, with values that mean nothing.

    net: on no device ("meta"), and on this one afterwards; its values are 0. What torch keeps of the card's memory for the next
    time is left to the caller.
    """
    dtype = _DTYPES.get(precision, torch.float32)
    net.to_empty(device=device).to(memory_format=torch.channels_last).eval()
    images = _blank(shape, device, torch.uint8)
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        # Not whatever was in memory: some networks (Swin, LeViT) look up biases by a buffer of indices, and one that is out of
        # range is an error that a card does not recover from.
        torch._foreach_zero_([*net.parameters(), *net.buffers()])
        net(images)


def find_convolutions(net: nn.Module, shape: Sequence[int]) -> list[tuple]:
    """What distinguishes the convolutions of a forward with uint8 images of this shape: shapes of input, weight and output, and
    the other arguments of `aten.convolution`. Each once, in their order.
    """
    seen = _Convolutions()
    held = dict((*net.named_parameters(), *net.named_buffers()))
    with torch.no_grad(), FakeTensorMode():  # tensors of shapes, without values
        state = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in held.items()}
        images = torch.empty(tuple(shape), dtype=torch.uint8)
        with seen:
            torch.func.functional_call(net, state, images)
    return list(seen.calls)


def run_gradients(call: tuple, device: torch.device, dtype: torch.dtype) -> None:
    """Those of input and weight of one of `find_convolutions`, on values that mean nothing, in channels-last order."""
    given, weight = (_blank(each, device, dtype) for each in call[:2])
    # Images have no gradient, and the kernel for it would be one more to choose.
    wanted = [weight] if given.shape[1] == 3 else [given, weight]
    for each in wanted:
        each.requires_grad_()
    out = _GradientsAlone.apply(given, weight, call[2], call[3:])
    torch.autograd.grad(out, wanted, torch.ones_like(out))


def _blank(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.zeros(tuple(shape), dtype=dtype, device=device).contiguous(memory_format=layout)


class _GradientsAlone(torch.autograd.Function):
    """A convolution that is not computed, with the gradients of one: forward's kernels are not chosen where nobody needs them."""

    @staticmethod
    def forward(ctx: Any, given: Tensor, weight: Tensor, shape: tuple[int, ...], arguments: tuple) -> Tensor:
        ctx.save_for_backward(given, weight)
        ctx.arguments = arguments
        return _blank(shape, given.device, given.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple:
        given, weight = ctx.saved_tensors
        wanted = [*ctx.needs_input_grad[:2], False]
        found = torch.ops.aten.convolution_backward(gradients[0], given, weight, None, *ctx.arguments, wanted)
        return *found[:2], None, None


class _Convolutions(TorchDispatchMode):
    """The convolutions that run while it is entered, as keys of `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.convolution.default:
            images, weight, _, *rest = args
            plain = (tuple(each) if isinstance(each, (list, tuple)) else each for each in rest)
            self.calls[(tuple(images.shape), tuple(weight.shape), tuple(out.shape), *plain)] = None
        return out
