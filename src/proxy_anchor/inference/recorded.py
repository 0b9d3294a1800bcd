"""A forward recorded as a CUDA graph: the kernels of a batch are launched in one call instead of some hundred.

The card then waits for no Python, and Python is free for the threads that read and decode.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import cache
from threading import Lock
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_LOCK = Lock()  # torch records one graph at a time
_COPIES = {torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default}


class Recorded:
    """Replays a recorded function of (B, ...): takes up to B rows of the same kind and gives as many, in memory of their own.

    Any thread may call it, as long as all do so on the same stream of the card.
    """

    def __init__(self, graph: torch.cuda.CUDAGraph, given: Tensor, found: Tensor, kept: list[Tensor]) -> None:
        self._graph, self._given, self._found = graph, given, found
        self._kept = kept  # the graph holds addresses only
        self._lock = Lock()

    def __call__(self, rows: Tensor) -> Tensor:
        """rows: (b, ...) anywhere, b <= B. The others are computed from what was there before, and dropped."""
        moved = rows.to(self._given.device, non_blocking=True)
        with self._lock:
            self._given[: len(moved)].copy_(moved)
            self._graph.replay()
            return self._found[: len(moved)].clone()


def record(function: Callable[[Tensor], Tensor], example: Tensor, *, keep: nn.Module) -> Recorded | None:
    """The function recorded for the shape of `example` (B, ...) on a card; None for one that a recording would falsify.

    function: treats rows independently, and finds its weights in `keep`, which stay what they are. example: becomes the
    recording's own memory.
    """
    device = example.device
    side, pool, graph = _recording_stream(device), torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
    with _LOCK, torch.cuda.device(device):
        side.wait_stream(torch.cuda.current_stream(device))
        try:
            # Left on its own, torch forgets to leave the stream of a recording that failed.
            with torch.cuda.stream(side):
                with RefuseHostReads():  # also makes what is made at a first call: workspaces, choices of kernels
                    function(example)
                # Other threads may use the card meanwhile.
                with torch.cuda.graph(graph, pool=pool, stream=side, capture_error_mode="thread_local"):
                    found = function(example)
        except RuntimeError:
            # A recording that broke off left torch's allocator waiting for its end.
            with suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)
            return None
        finally:
            torch.cuda.current_stream(device).wait_stream(side)
    kept = [each.data for each in (*keep.parameters(), *keep.buffers())]
    return Recorded(graph, example, found, kept)


@cache
def _recording_stream(device: torch.device) -> torch.cuda.Stream:
    """One for all recordings on a card: the matrix library keeps its workspace for every stream that it has seen."""
    return torch.cuda.Stream(device)


class RefuseHostReads(TorchDispatchMode):
    """Raises RuntimeError where a function looks at numbers on the host: its recording would repeat what it did with these.

    Asked before a recording starts: one that breaks off is more trouble.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.data_dependent_output in func.tags or torch.Tag.dynamic_output_shape in func.tags:
            raise RuntimeError(f"{func} depends on numbers")
        found = func(*args, **(kwargs or {}))
        if func in _COPIES:
            tensors = [each for each in tree_leaves((args, found)) if isinstance(each, Tensor)]
            if len({each.device for each in tensors}) > 1:
                raise RuntimeError(f"{func} goes from one device to another")
        return found
