"""Training and evaluation end to end, relative to the network alone.

    python benchmarks/throughput.py dataset=cars dataset.root=DIR speed=fast

Trains with the code of `src/train.py` and these overrides, then times the same network, loss and optimizer, in the same
precision and also compiled, on one batch that stays on the device: the ceiling. Appends a row to throughput.jsonl in
benchmarks/results, or in the folder of `+output=DIR`.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import HERE, report, seconds_per_call, split_output, where_it_ran
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import DictConfig
from torch.optim import AdamW

sys.path.insert(0, str(HERE.parent / "src"))

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.training.compile import CompiledNet
from train import train


def ceiling(cfg: DictConfig, result: dict[str, Any], device: torch.device) -> dict[str, float]:
    """Images per second of a training step and of evaluation, without data, trainer or callbacks."""
    num_classes = result["num_train_classes"]
    torch.backends.cudnn.benchmark = cfg.trainer.benchmark
    net = config.make_network(cfg, pretrained=False, weights=None).to(device)
    loss = instantiate(cfg.loss, num_classes=num_classes, embedding_dim=cfg.embedding_dim).to(device)
    loss.check_labels = False
    embed: Any = net
    if cfg.compile:
        num_evaluated = config.compilation(cfg, result["num_eval_images"])["num_evaluated"]
        embed = CompiledNet(net.to(memory_format=torch.channels_last), num_evaluated=num_evaluated)
    optimizer = AdamW([*net.parameters(), *loss.parameters()], lr=1e-4, fused=True)
    side, batch = cfg.dataset.images.crop, cfg.data.batch_size
    images = torch.randint(0, 256, (batch, side, side, 3), dtype=torch.uint8, device=device).permute(0, 3, 1, 2)
    labels = torch.randint(num_classes, (batch,), device=device)
    half = str(cfg.trainer.precision) == "bf16-mixed"

    def train_step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            value = loss(embed(images), labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    @torch.no_grad()
    def eval_step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            embed(images)

    calls = 20 if device.type == "cuda" else 2
    rates = {}
    for name, step in (("train", train_step), ("eval", eval_step)):
        net.train(name == "train")
        seconds_per_call(step, device, calls)
        seconds = sorted(seconds_per_call(step, device, calls) for _ in range(5))[2]
        rates[name] = batch / seconds
    return rates


def main(arguments: list[str]) -> None:
    """Train, time the ceiling, print one row."""
    overrides, output = split_output(arguments, __doc__)
    entry.register_plugins()
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        cfg = compose("train", overrides)
    with tempfile.TemporaryDirectory() as folder:
        result = train(cfg, Path(folder) / "run")
    device = torch.device("cpu" if result["device"].startswith("cpu") else "cuda")
    limit = ceiling(cfg, result, device)
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
