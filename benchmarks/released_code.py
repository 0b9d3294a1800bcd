"""The authors' released code beside this one, on the same images and network, in one run.

    python benchmarks/released_code.py CHECKOUT dataset=cars backbone=efficientnet_lite0 dataset.root=DIR speed=fast

CHECKOUT is a copy of the authors' release (github.com/tjddus9597/Proxy-Anchor-CVPR2020), which is not part of this
project. Its loss, transforms, loader and evaluation train a network of this project, with the first weights and the
settings of the config. The other run is `src/train.py` with the overrides. Seconds are of training and evaluation,
without the start. Appends a row for each to released_code.jsonl in benchmarks/results, or in the folder of
`+output=DIR`.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from statistics import median
from typing import Any

import pytorch_lightning as pl
import torch
from common import HERE, report, split_output, where_it_ran
from hydra import compose, initialize_config_dir
from omegaconf import DictConfig
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

sys.path.insert(0, str(HERE.parent / "src"))

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.data.images import fit_workers
from proxy_anchor.data.table import ImageTable
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.reports.tables import reached
from train import train

KS = (1, 2, 4, 8, 16, 32)  # what the released evaluation returns


class Images(Dataset):
    """What the released loader reads: (transformed image, label)."""

    def __init__(self, table: ImageTable, transform: Any) -> None:
        self.table, self.transform = table, transform

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        with Image.open(self.table.paths[index]) as image:
            return self.transform(image.convert("RGB")), int(self.table.labels[index])

    def nb_classes(self) -> int:
        """The released evaluation asks for it."""
        return self.table.num_classes


class WithoutPreprocessing(nn.Module):
    """The network behind the released transforms, which normalise; BN-Inception's give BGR."""

    def __init__(self, net: EmbeddingNet, bgr: bool) -> None:
        super().__init__()
        self.net, self.bgr = net, bgr

    def forward(self, pixels: Tensor) -> Tensor:
        """Normalised images (B, 3, H, W) to unit-length embeddings (B, D)."""
        return F.normalize(self.net.head(self.net.pool(self.net.backbone(pixels.flip(1) if self.bgr else pixels))))


def train_released(cfg: DictConfig, checkout: Path) -> dict[str, Any]:
    """Train and evaluate with the modules of the checkout; a result as train.py's, as far as the table needs it."""
    sys.path.insert(0, str(checkout / "code"))
    import losses as released_losses  # type: ignore[import-not-found]
    import utils as released_utils  # type: ignore[import-not-found]
    from dataset.utils import make_transform  # type: ignore[import-not-found]

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    splits, is_inception = config.load_splits(cfg), cfg.backbone.name == "bninception"
    pl.seed_everything(cfg.seed, verbose=False)
    net = config.make_network(cfg).to(device)
    model = WithoutPreprocessing(net, is_inception)
    loss = released_losses.Proxy_Anchor(splits.train.num_classes, cfg.embedding_dim, cfg.loss.delta, cfg.loss.alpha)
    loss.to(device)
    loaders = {}
    for name, table in (("train", splits.train), ("test", splits.query)):
        images = Images(table, make_transform(is_train=name == "train", is_inception=is_inception))
        loaders[name] = DataLoader(
            images,
            cfg.data.batch_size,
            shuffle=name == "train",
            drop_last=name == "train",
            num_workers=fit_workers(cfg.data.num_workers, []),
            pin_memory=device.type == "cuda",
        )

    given = config.learning(cfg)
    optimizer = given["optimizer"](
        [
            {"params": [*net.backbone.parameters(), *net.pool.parameters()]},
            {"params": net.head.parameters()},
            {"params": loss.parameters(), "lr": cfg.optimizer.lr * cfg.optimizer.proxy_lr_mult},
        ]
    )
    scheduler = given["scheduler"](optimizer)
    weights = [parameter for parameter in net.backbone.parameters() if parameter.requires_grad]
    history = []
    for epoch in range(1, cfg.trainer.max_epochs + 1):
        start = time.perf_counter()
        model.train()
        for parameter in weights:
            parameter.requires_grad_(epoch > cfg.optimizer.warmup_epochs)
        for images, labels in loaders["train"]:
            value = loss(model(images.to(device)), labels.to(device))
            optimizer.zero_grad()
            value.backward()
            nn.utils.clip_grad_value_([*model.parameters(), *loss.parameters()], cfg.trainer.gradient_clip_val)
            optimizer.step()
            value.item()  # the released loop prints it in every step
        scheduler.step()
        trained = time.perf_counter()
        recall = dict(zip(map(str, KS), released_utils.evaluate_cos(model, loaders["test"]), strict=True))
        seconds = {"train_seconds": trained - start, "eval_seconds": time.perf_counter() - trained}
        history.append({"epoch": epoch, "recall": recall, **seconds})
    images_per_epoch = len(loaders["train"]) * cfg.data.batch_size
    return {
        "history": history,
        "best": max(history, key=lambda row: row["recall"]["1"]),
        "last": history[-1],
        "train_images_per_second": images_per_epoch / median(row["train_seconds"] for row in history),
        "seconds_per_epoch": median(row["train_seconds"] + row["eval_seconds"] for row in history),
    }


def main(arguments: list[str]) -> None:
    """Train both, print and record one table."""
    overrides, output = split_output(arguments, __doc__)
    checkout, *overrides = overrides
    entry.register_plugins()
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        cfg = compose("train", overrides)
    if not (Path(checkout) / "code" / "losses.py").is_file():
        raise SystemExit(f"{checkout} holds no code/losses.py: name a checkout of the authors' release first.")
    results = {"released code": train_released(cfg.copy(), Path(checkout).resolve())}
    with tempfile.TemporaryDirectory() as folder:
        results["here"] = train(cfg, Path(folder) / "run")
    level = 100 * min(each["best"]["recall"]["1"] for each in results.values())
    rows = []
    for name, result in results.items():
        epochs, seconds = reached(result, level, "1") or (None, None)
        rows.append(
            {
                "code": name,
                "network": cfg.backbone.name,
                "seed": cfg.seed,
                "images_per_s": result["train_images_per_second"],
                "s_per_epoch": result["seconds_per_epoch"],
                "level": level,
                "epochs_to_level": epochs,
                "s_to_level": seconds,
                "best_recall_at_1": 100 * result["best"]["recall"]["1"],
                "last_recall_at_1": 100 * result["last"]["recall"]["1"],
            }
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    report("The authors' release and this code", rows, output / "released_code.jsonl", where_it_ran(device))


if __name__ == "__main__":
    main(sys.argv[1:])
