"""What processes that train together decide together: none goes on, or ends, while another waits for it.

In one process all of this is the plain thing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch.distributed as dist
from torch import Tensor

from proxy_anchor.errors import AgreedError
from proxy_anchor.training.gather import world_size

T = TypeVar("T")


def decided_by_first(decide: Callable[[], T]) -> T:
    """What `decide()` returns in the first process, in all of them; the others do not call it.

    Raises what it raised, in the others as AgreedError.
    """
    if world_size() == 1:
        return decide()
    told: list[Any] = [None, None]  # the answer, or the text of the error
    failed: Exception | None = None
    if dist.get_rank() == 0:
        try:
            told[0] = decide()
        except Exception as error:  # whatever it is: the others wait for an answer
            failed, told[1] = error, str(error) or type(error).__name__
    dist.broadcast_object_list(told, src=0)
    if failed is not None:
        raise failed
    if told[1] is not None:
        raise AgreedError(told[1])
    return told[0]


def gather_objects(value: T) -> list[T]:
    """The value of every process, in order of rank, on all of them. Tensors must be on the CPU."""
    if world_size() == 1:
        return [value]
    everyone: list[Any] = [None] * world_size()
    dist.all_gather_object(everyone, value)
    return everyone


def reduce_max(values: Tensor) -> Tensor:
    """(N,) integers on this process's device: each the largest of all processes, put there without waiting for a GPU."""
    if world_size() > 1:
        dist.all_reduce(values, dist.ReduceOp.MAX)
    return values


def write_before_any_ends(trainer: pl.Trainer) -> None:
    """Have the first process write its last checkpoint before any of them ends; all call it.

    torchrun, srun and `run_ranks` end all processes soon after one has ended with an exit code that is not 0.
    """
    if world_size() > 1:
        trainer.strategy.checkpoint_io.teardown()
        trainer.strategy.barrier()
