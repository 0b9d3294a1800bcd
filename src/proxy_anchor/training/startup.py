"""What happens between the command and the first step, and how long it took."""

from __future__ import annotations

import time
from threading import Thread
from typing import TYPE_CHECKING

import pytorch_lightning as pl

from proxy_anchor.training.compile import check_compiled, prepare_compiler

if TYPE_CHECKING:
    from proxy_anchor.training.module import MetricLearner


class Startup(pl.Callback):
    """Checks a compiled network before the first step and keeps the time until then.

    started: `time.monotonic()` when the command began. rehearsal: a thread that uses the card since then.

    Attributes:
        seconds: from then to the first step, and "compilation" alone: {"total": ..., "compilation": ...}.
    """

    def __init__(self, started: float, rehearsal: Thread | None = None) -> None:
        self.started, self._rehearsal = started, rehearsal
        self.seconds = {"total": 0.0, "compilation": 0.0}  # stays so where no step was left to take

    def setup(self, trainer: pl.Trainer, pl_module: MetricLearner, stage: str) -> None:  # type: ignore[override]
        """Have the compiler get ready: not when the network is made, as evaluate.py makes one that it seldom compiles."""
        if pl_module.compiled is not None:
            prepare_compiler()

    def on_validation_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Wait for the rehearsal where an evaluation is compiled, and so recorded, before the first step."""
        if self._rehearsal is not None and pl_module.compiled is not None and pl_module.compiled.evaluates:
            self._rehearsal.join()

    def on_train_start(self, trainer: pl.Trainer, pl_module: MetricLearner) -> None:  # type: ignore[override]
        """Compile and compare; stop the clock."""
        start = time.monotonic()
        if pl_module.compiled is not None:
            cosine = check_compiled(trainer, pl_module, self._rehearsal)
            pl_module.print(f"compiled network: gradient's cosine with the plain network's {cosine:.4f}", flush=True)
        now = time.monotonic()
        self.seconds = {"total": now - self.started, "compilation": now - start}
