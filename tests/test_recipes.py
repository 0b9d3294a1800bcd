"""What `python src/train.py dataset=D backbone=N` resolves to, for the paper's four data sets and four networks.

The values are written out here and not derived from conf/: a change there that is not a decision shows up. Sources are
the sections of shared/PROTOCOL.md.
"""

from __future__ import annotations

import pytest
import torch
from commands import compose_train
from omegaconf import OmegaConf
from torch import nn

from proxy_anchor.cli.config import learning
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training.optim import check_learning

# Optimisation. Its table has columns for BN-Inception and ResNet-50. GoogLeNet takes BN-Inception's ("networks outside
# the paper"; batch 180 is its own), ResNet-101 takes ResNet-50's, and the ResNets on SOP and In-Shop, where the table
# has no step, take BN-Inception's. Batch norm: "statistics frozen", as the authors': scale and shift train.
FROZEN, TRAIN = "frozen_statistics", "train"
RECIPES = {
    # data set, network         rate  proxies  epochs  batch  warm-up  step  gamma  batch norm
    ("cub", "bninception"):    (1e-4, 1e-2,    40,     180,   1,       10,   0.5,   FROZEN),
    ("cub", "googlenet"):      (1e-4, 1e-2,    40,     180,   1,       10,   0.5,   FROZEN),
    ("cub", "resnet50"):       (1e-4, 1e-2,    40,     120,   5,       5,    0.5,   FROZEN),
    ("cub", "resnet101"):      (1e-4, 1e-2,    40,     120,   5,       5,    0.5,   FROZEN),
    ("cars", "bninception"):   (1e-4, 1e-2,    40,     180,   1,       20,   0.5,   FROZEN),
    ("cars", "googlenet"):     (1e-4, 1e-2,    40,     180,   1,       20,   0.5,   FROZEN),
    ("cars", "resnet50"):      (1e-4, 1e-2,    40,     120,   5,       10,   0.5,   FROZEN),
    ("cars", "resnet101"):     (1e-4, 1e-2,    40,     120,   5,       10,   0.5,   FROZEN),
    ("sop", "bninception"):    (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("sop", "googlenet"):      (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("sop", "resnet50"):       (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
    ("sop", "resnet101"):      (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
    ("inshop", "bninception"): (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("inshop", "googlenet"):   (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("inshop", "resnet50"):    (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
    ("inshop", "resnet101"):   (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
}  # fmt: skip

# The same for all pairs: key, value, section.
COMMON = {
    "optimizer._target_": "torch.optim.AdamW",  # Optimisation
    "scheduler._target_": "torch.optim.lr_scheduler.StepLR",
    "optimizer.weight_decay": 1e-4,             # Optimisation
    "trainer.gradient_clip_val": 10,            # Optimisation
    "trainer.gradient_clip_algorithm": "value", # Optimisation
    "trainer.precision": 32,                    # Optimisation
    "dataset.images.crop": 224,                 # Images
    "dataset.images.resize": 256,               # Images
    "dataset.images.scale": [0.08, 1.0],        # Images
    "dataset.images.flip": 0.5,                 # Images
    "dataset.images.brightness": 0,             # Images: crop and mirror are all that the paper does
    "dataset.images.contrast": 0,
    "dataset.images.saturation": 0,
    "dataset.images.hue": 0,
    "dataset.images.grayscale": 0,
    "embedding_dim": 512,                       # Numbers to compare with
    "backbone.pretrained": True,                # Network
    "backbone.pooling": "auto",                 # Network: average plus maximum, for every network with a feature map
    "backbone.drop_path": 0,                    # Network: the paper drops nothing
    "loss._target_": "proxy_anchor.losses.proxy_anchor.ProxyAnchorLoss",
    "loss.alpha": 32,                           # Loss
    "loss.delta": 0.1,                          # Loss
}  # fmt: skip

# Evaluation.
RECALL_K = {
    "cub": [1, 2, 4, 8, 16, 32],
    "cars": [1, 2, 4, 8, 16, 32],
    "sop": [1, 10, 100, 1000],
    "inshop": [1, 10, 20, 30, 40, 50],
}

# Images (last two points) and Network (weights). In the order red, green, blue, for pixels in 0-255.
PREPROCESSING = {
    # network       name in timm           mean                       std
    "bninception": ("bninception",         (128.0, 117.0, 104.0),     (1.0, 1.0, 1.0)),
    "googlenet":   ("googlenet",           (127.5, 127.5, 127.5),     (127.5, 127.5, 127.5)),
    "resnet50":    ("resnet50.tv_in1k",    (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
    "resnet101":   ("resnet101.tv_in1k",   (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)),
}  # fmt: skip

# What the first convolution sees of a picture of (10, 20, 30) in red, green, blue: range and channel order.
FIRST_CONVOLUTION = {
    "bninception": (30 - 104, 20 - 117, 10 - 128),  # BGR, 0-255
    "googlenet": (-0.92157, -0.84314, -0.76471),
    "resnet50": (-1.94666, -1.68557, -1.28157),
    "resnet101": (-1.94666, -1.68557, -1.28157),
}


@pytest.mark.parametrize(("dataset", "network"), RECIPES)
def test_resolved_config_of_each_pair(dataset, network):
    cfg = compose_train(f"dataset={dataset}", f"backbone={network}")
    optimizer = cfg.optimizer
    assert (
        optimizer.lr,
        pytest.approx(optimizer.lr * optimizer.proxy_lr_mult),
        cfg.trainer.max_epochs,
        cfg.data.batch_size,
        optimizer.warmup_epochs,
        cfg.scheduler.step_size,
        cfg.scheduler.gamma,
        cfg.batch_norm,
    ) == RECIPES[dataset, network]
    assert {key: OmegaConf.select(cfg, key) for key in COMMON} == COMMON
    assert cfg.recall_k == RECALL_K[dataset]
    assert cfg.backbone.name == PREPROCESSING[network][0]
    assert (cfg.dataset.name, cfg.dataset.allow_partial) == (dataset, False)
    check_learning(**learning(cfg))


@pytest.mark.parametrize("network", PREPROCESSING)
def test_pixels_of_each_network(network):
    name, mean, std = PREPROCESSING[network]
    net = EmbeddingNet(name, 4, pretrained=False).eval()
    assert net.mean.flatten().tolist() == pytest.approx(mean, rel=1e-5)
    assert net.std.flatten().tolist() == pytest.approx(std, rel=1e-5)
    seen = []
    first = next(module for module in net.modules() if isinstance(module, nn.Conv2d))
    first.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    picture = torch.tensor([10, 20, 30], dtype=torch.uint8).view(1, 3, 1, 1).expand(1, 3, 96, 96)
    with torch.no_grad():
        net(picture)
    assert len(seen) == 1
    assert seen[0][0, :, 48, 48].tolist() == pytest.approx(FIRST_CONVOLUTION[network], abs=1e-4)
