"""Time from the command to the first step, and the check of a compiled network."""

from __future__ import annotations

import time

import pytorch_lightning as pl
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import check_range
from proxy_anchor.training.compile import check_file, check_gradients, recall_check, remember_check, run_once
from proxy_anchor.training.distributed import gather_batch, gather_objects, raise_on_all
from proxy_anchor.training.module import MetricLearner


class Startup(pl.Callback):
    """Checks a compiled network before the first step, and measures the time until then.

    Args:
        started: `time.monotonic()` when the command began.

    Attributes:
        seconds: {"total": from then to the first step, "compilation": compiling and checking alone}.
    """

    def __init__(self, started: float) -> None:
        self.started = started
        self.seconds = {"total": 0.0, "compilation": 0.0}

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Measure the time, for a run that has no step left to take."""
        self.seconds["total"] = time.monotonic() - self.started

    def on_train_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Compile, check, and measure the time."""
        start = time.monotonic()
        if pl_module.compiled is not None:
            pl_module.print(f"compiled network: {check_compiled(trainer, pl_module)}", flush=True)
        now = time.monotonic()
        self.seconds = {"total": now - self.started, "compilation": now - start}


def check_compiled(trainer: pl.Trainer, learner: MetricLearner) -> str:
    """Compile network and loss on the first training batch; check the gradient unless an earlier start did.

    Returns a description of the result. Raises UsageError where the compiled network is wrong.
    """
    assert learner.compiled is not None
    images, labels, _ = next(iter(trainer.datamodule.train_dataloader()))  # type: ignore[attr-defined]
    images, labels = images.to(learner.device), labels.to(learner.device)
    wrong: UsageError | None = None
    try:
        check_range(images)  # a compiled network does not
    except UsageError as error:
        wrong = error
    raise_on_all(wrong)
    precision = trainer.precision_plugin.train_step_context
    file = check_file(learner.net, images.shape, str(trainer.precision), learner.device)
    check = recall_check(file)
    # All ranks check or none does: synchronised batch norm computes on all of them.
    if all(each is not None for each in gather_objects(check)):
        run_once(learner.net, learner.compiled, images, precision)
        when = "checked at an earlier start; its"
    else:
        try:
            check = check_gradients(learner.net, learner.compiled, learner.loss, images, labels, precision)
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
        except UsageError as error:
            wrong = error
        raise_on_all(wrong)
        if any(each is None for each in gather_objects(check)):  # all ranks compile the loss or none does
            return "not checked: the plain float32 network of this batch does not fit in the GPU's memory"
        assert check is not None
        remember_check(file, check)
        when = "its"
    assert check is not None
    if learner.compiled_loss is not None:
        shape = len(images), learner.net.config["embedding_dim"]
        embeddings = torch.ones(shape, device=learner.device, requires_grad=True)
        with precision():
            torch.autograd.grad(learner.compiled_loss(*gather_batch(embeddings, labels)), embeddings)
    return (
        f"{when} gradient's cosine with the plain float32 network's is {check.compiled:.4f} "
        f"(the plain network's in this precision {check.plain:.4f})"
    )
