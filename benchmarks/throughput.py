"""Training and evaluation end to end, relative to the network alone.

    python benchmarks/throughput.py dataset=cars dataset.root=DIR speed=fast

Trains with the code of `src/train.py` and these overrides, then times the trained network with loss and optimizer, in
the same precision and also compiled, on one training batch that stays on the device: the ceiling. Appends a row to
throughput.jsonl in benchmarks/results, or in the folder of `+output=DIR`.
"""

from __future__ import annotations

import sys
import tempfile
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from common import HERE, report, seconds_per_call, split_output, where_it_ran
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from torch.optim import AdamW

sys.path.insert(0, str(HERE.parent / "src"))

from proxy_anchor.cli import main as entry
from proxy_anchor.training.module import MetricLearner
from train import train


class Keep(pl.Callback):
    """Keeps the learner and a batch of its training images (B, 3, H, W), labels (B,) and indices."""

    learner: MetricLearner
    batch: list[torch.Tensor]

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Keep both after the first step."""
        if trainer.global_step == 1:
            self.learner, self.batch = pl_module, [each.clone() for each in batch]


def ceiling(cfg: DictConfig, kept: Keep, device: torch.device) -> dict[str, float]:
    """Images per second of a training step and of evaluation, without data, trainer or callbacks.

    With the trained weights and real images: a GPU computes faster where activations and gradients are zero, as those
    of a deep network with random weights are.
    """
    learner = kept.learner.to(device)
    images, labels, *_ = [each.to(device) for each in kept.batch]
    optimizer = AdamW([each for each in learner.parameters() if each.requires_grad], lr=1e-6, fused=True)
    half = str(cfg.trainer.precision) == "bf16-mixed"

    def train_step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            value = reduce(add, learner.loss_terms(images, labels).values())
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def eval_step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            learner(images)

    calls = 20 if device.type == "cuda" else 2
    rates = {}
    for name, step in (("train", train_step), ("eval", eval_step)):
        learner.train(name == "train")
        seconds_per_call(step, device, calls)
        seconds = sorted(seconds_per_call(step, device, calls) for _ in range(5))[2]
        rates[name] = len(images) / seconds
    return rates


def main(arguments: list[str]) -> None:
    """Train, time the ceiling, print one row."""
    overrides, output = split_output(arguments, __doc__)
    entry.register_plugins()
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        cfg = compose("train", overrides)
    with tempfile.TemporaryDirectory() as folder:
        result = train(cfg, Path(folder) / "run", [kept := Keep()])
    device = torch.device("cpu" if result["device"].startswith("cpu") else "cuda")
    limit = ceiling(cfg, kept, device)
    row = {
        "dataset": cfg.dataset.name,
        "network": cfg.backbone.name,
        "precision": str(cfg.trainer.precision),
        "float32": cfg.float32_precision,
        "compiled": cfg.compile,
        "batch": cfg.data.batch_size,
        "loading": f"{result['loading']['crop_on']}/{result['loading']['cache']}",
        "train_per_s": result["train_images_per_second"],
        "train_ceiling": limit["train"],
        "train_share": result["train_images_per_second"] / limit["train"],
        "eval_per_s": result["eval_images_per_second"],
        "eval_ceiling": limit["eval"],
        "eval_share": result["eval_images_per_second"] / limit["eval"],
        "s_per_epoch": result["seconds_per_epoch"],
        "best_recall_at_1": 100 * next(iter(result["best"]["recall"].values())),
        "start_s": result["startup_seconds"]["total"],
    }
    report("End-to-end training against the network alone", [row], output / "throughput.jsonl", where_it_ran(device))


if __name__ == "__main__":
    main(sys.argv[1:])
