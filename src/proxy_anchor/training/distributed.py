"""The batch of all processes, with gradients: what makes a loss over pairs or classes the same on one device and on many.

Gradients are averaged over W processes (`training.distributed`). Every process computes the loss L of the whole batch, so
- the proxies' gradient is the whole one on every process, and so is its mean;
- an embedding's gradient arrives from all W losses: summed it is W x dL/dx, which the mean over processes, of which only
  one made that embedding, brings back to dL/dx.
Backbone, head and proxies therefore move as in one process; no factor is left over.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import contextmanager
from inspect import signature
from typing import Any, TypeVar

import pytorch_lightning as pl
import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.plugins.layer_sync import TorchSyncBatchNorm
from pytorch_lightning.strategies import DDPStrategy
from timm.layers import convert_sync_batchnorm
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from proxy_anchor.errors import AgreedError


def world_size() -> int:
    """Processes that train together; 1 outside distributed training."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def gather_batch(embeddings: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(b, D) embeddings and (b,) labels of each process -> (B, D) and (B,) of all, in order of rank, on every process.

    All processes hold equally many. Backward gives each process the sum over all processes' gradients of its own rows.
    In one process they are returned as they are.
    """
    if world_size() == 1:
        return embeddings, labels
    return _GatherRows.apply(embeddings), _gather(labels)


def _gather(rows: Tensor) -> Tensor:
    rows = rows.contiguous()
    everyone = rows.new_empty(world_size() * len(rows), *rows.shape[1:])
    # Newer versions of torch give the function another name, and warn of this one.
    gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    gather(everyone, rows)
    return everyone


class _GatherRows(torch.autograd.Function):
    """Concatenates the rows of all processes; backward sums."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return _gather(rows)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        # (B, D) is small beside the network's gradients: no need for the backends' various ways to sum only one's share.
        total = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total.chunk(world_size())[dist.get_rank()]


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


class SyncBatchNorms(TorchSyncBatchNorm):
    """Has every batch norm of a network with `batch_norm="train"` count over all processes' images while it is fitted.

    By timm's conversion: torch's own drops the activation that timm's fused layers (EfficientNet and others) hold, without
    an error. torch has synchronised batch norm for GPUs only: on CPUs each process counts over its own share.
    """

    def __init__(self) -> None:
        self._originals: dict[str, nn.Module] = {}

    def apply(self, model: nn.Module) -> nn.Module:
        """Exchange the layers; parameters and statistics stay the same tensors."""
        if getattr(getattr(model, "net", None), "batch_norm", "train") != "train" or not dist.is_initialized():
            return model
        if "nccl" not in dist.get_backend():
            if dist.get_rank() == 0:
                print(
                    "note: on CPUs batch norm trains on each process's part of the batch, not on all of it.", flush=True
                )
            return model
        return self.exchange(model)

    def exchange(self, model: nn.Module) -> nn.Module:
        """As `apply`, whatever the backend."""
        self._originals = {name: each for name, each in model.named_modules() if isinstance(each, _BatchNorm)}
        return convert_sync_batchnorm(model)

    def revert(self, model: nn.Module) -> nn.Module:
        """Put the network's own layers back, with what was learned."""
        for name, original in self._originals.items():
            parent, _, attribute = name.rpartition(".")
            trained = model.get_submodule(name)
            for key in (*original._parameters, *original._buffers):
                setattr(original, key, getattr(trained, key))
            setattr(model.get_submodule(parent), attribute, original.train(trained.training))
        self._originals = {}
        return model


# Torch's wrapper warns of the older name since 2.13.
_SENDS_STATISTICS = next(
    name
    for name in ("forward_sync_buffers", "broadcast_buffers")
    if name in signature(DistributedDataParallel).parameters
)


class LeanDDP(DDPStrategy):
    """Lightning's `ddp` with the same result, for a MetricLearner.

    A compiled network has all gradients at once, so there is nothing that sending some of them early could hide: they are sent
    in one piece after it. torch's wrapper would treat each by itself, at several kernels apiece, which takes as long as
    the network's step on a small batch. Lightning's `on_after_backward` sees each process's own gradients then, and all hooks
    after it the averaged ones.

    Another network is wrapped as torch does it, but
    - on the stream that computes. Lightning makes one for the wrapping, which torch takes for the one where gradients are summed:
      for every parameter they would wait for each other in each step, and torch warns of it;
    - without sending statistics before each step, where they are the same anyway: frozen, or of the batch of all processes.
    """

    _gradients: JoinedGradients | None = None

    def configure_ddp(self) -> None:
        """Start from the first process's weights, and have gradients averaged."""
        learner: Any = self.lightning_module  # a MetricLearner; its module imports this one
        # On CPUs each process's statistics are its own (see `SyncBatchNorms`).
        same_statistics = self.root_device.type == "cuda" or learner.net.batch_norm != "train"
        if same_statistics:
            _sync_module_states(learner)  # statistics too: the wrapper may leave out those that it does not send later
        if learner.compiled is not None and same_statistics:
            self._gradients = JoinedGradients(learner)
            return
        self._gradients = None
        if same_statistics:
            self._ddp_kwargs.setdefault(_SENDS_STATISTICS, False)
        super().configure_ddp()

    def _setup_model(self, model: LightningModule) -> DistributedDataParallel:  # type: ignore[override]
        return DistributedDataParallel(model, device_ids=self.determine_ddp_device_ids(), **self._ddp_kwargs)

    @contextmanager
    def block_backward_sync(self) -> Generator[None]:
        """Leave the gradients of a batch that is not the last before a step to that one: the mean of a sum is as good."""
        gradients, self._gradients = self._gradients, None
        try:
            with super().block_backward_sync():
                yield
        finally:
            self._gradients = gradients

    def teardown(self) -> None:
        """Give up the gradients' memory too."""
        self._gradients = None
        super().teardown()

    def post_backward(self, closure_loss: Tensor) -> None:
        """Average the gradients, where no wrapper has."""
        super().post_backward(closure_loss)
        if self._gradients is not None:
            self._gradients.average()


class JoinedGradients:
    """The gradients of a module's parameters, averaged over all processes in one piece.

    module: whose parameters, on their device.
    """

    def __init__(self, module: nn.Module) -> None:
        shared = [p for p in module.parameters() if p.requires_grad]
        kinds = {dtype: [p for p in shared if p.dtype == dtype] for dtype in {p.dtype: None for p in shared}}
        # For each kind one vector, and the place of each parameter's gradient in it.
        self._pieces = [(_joined(parameters), parameters) for parameters in kinds.values()]

    def average(self) -> None:
        """Replace each gradient by the mean over all processes, which all call this with gradients of the same parameters.

        Gradients that were averaged before, and to which each process has added since, come out right too.
        """
        for (whole, places), parameters in self._pieces:
            pairs = zip(parameters, places, strict=True)
            given = [(p, place, p.grad) for p, place in pairs if p.grad is not None]
            if given:
                torch._foreach_copy_([place for _, place, _ in given], [gradient for *_, gradient in given])
            whole.div_(dist.get_world_size())  # before summing: half precision could overflow
            dist.all_reduce(whole)
            for parameter, place, _ in given:
                parameter.grad = place


def _joined(parameters: list[nn.Parameter]) -> tuple[Tensor, list[Tensor]]:
    """A vector of zeros for all of them together, and views of it that are laid out as they are."""
    whole = torch.zeros(sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device)
    pieces = whole.split([p.numel() for p in parameters])
    strides = [torch.empty_like(p, device="meta").stride() for p in parameters]  # without gaps, whatever theirs are
    return whole, [
        piece.as_strided(p.shape, stride) for piece, p, stride in zip(pieces, parameters, strides, strict=True)
    ]
