"""Lightning's strategy for several processes, with less to do between the steps."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from inspect import signature
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from pytorch_lightning import LightningModule
from pytorch_lightning.overrides.distributed import _sync_module_states
from pytorch_lightning.strategies import DDPStrategy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

if TYPE_CHECKING:
    from proxy_anchor.training.module import MetricLearner

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
        learner = cast("MetricLearner", self.lightning_module)
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
    """The gradients of a module's parameters that all processes hold, averaged in one piece.

    module: whose parameters, on their device; those in `_ddp_params_and_buffers_to_ignore` are left out, as by DDP.
    """

    def __init__(self, module: nn.Module) -> None:
        own = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
        shared = [p for name, p in module.named_parameters() if p.requires_grad and name not in own]
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
