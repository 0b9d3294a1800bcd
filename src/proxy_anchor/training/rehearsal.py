"""Convolutions run once, with nothing in them, while images are read and evaluated: on a card the first of each shape takes
long, because cuDNN chooses and loads its kernels, and Python's lock is free meanwhile.

The gradients of depthwise ones take longest. What is kept: the kernels that were loaded; and the choices for gradients, as torch computes
all gradients of a card in one thread. Those for forward are kept for each thread, and so made again.
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


def rehearse_convolutions(net: nn.Module, shape: Sequence[int], device: torch.device, precision: str) -> Thread | None:
    """Run the network's convolutions for a batch of this shape in a thread, forward and backward, where this process has not
    done so. None where no thread does: without a card, or without a convolution.

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
            for gradients in (False, True):  # the first evaluation is near
                for call in calls:
                    run_convolution(call, device, dtype, gradients=gradients)
                    yield
            torch.cuda.current_stream().synchronize()
            torch.cuda.empty_cache()  # what this stream held, no other could use
            yield

    _LAST[device] = thread = run_beside(rehearse())
    return thread


def find_convolutions(net: nn.Module, shape: Sequence[int]) -> list[tuple]:
    """What distinguishes the convolutions of a forward with uint8 images of this shape: input's shape, weight's shape, and the
    other arguments of `aten.convolution`. Each once, in their order.
    """
    seen = _Convolutions()
    held = dict((*net.named_parameters(), *net.named_buffers()))
    with torch.no_grad(), FakeTensorMode():  # tensors of shapes, without values
        state = {name: torch.empty(each.shape, dtype=each.dtype) for name, each in held.items()}
        images = torch.empty(tuple(shape), dtype=torch.uint8)
        with seen:
            torch.func.functional_call(net, state, images)
    return list(seen.calls)


def run_convolution(call: tuple, device: torch.device, dtype: torch.dtype, *, gradients: bool) -> None:
    """One of `find_convolutions` on values that mean nothing, in channels-last order; with the gradients of input and weight."""
    given, weight = (_blank(each, device, dtype).requires_grad_(gradients) for each in call[:2])
    out = torch.ops.aten.convolution(given, weight, None, *call[2:])
    if gradients:
        # Images have none, and the kernel for it would be one more to choose.
        wanted = [weight] if given.shape[1] == 3 else [given, weight]
        torch.autograd.grad(out, wanted, torch.ones_like(out))


def _blank(shape: Sequence[int], device: torch.device, dtype: torch.dtype) -> Tensor:
    layout = torch.channels_last if len(shape) == 4 else torch.contiguous_format
    return torch.zeros(tuple(shape), dtype=dtype, device=device).contiguous(memory_format=layout)


class _Convolutions(TorchDispatchMode):
    """The convolutions that run while it is entered, as keys of `calls`."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[tuple, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.convolution.default:
            images, weight, _, *rest = args
            plain = (tuple(each) if isinstance(each, (list, tuple)) else each for each in rest)
            self.calls[(tuple(images.shape), tuple(weight.shape), *plain)] = None
        return func(*args, **(kwargs or {}))
