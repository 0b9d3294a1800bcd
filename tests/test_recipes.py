"""What `python src/train.py dataset=D backbone=N` resolves to, for the paper's four data sets and four networks.

The values are written out here and not derived from conf/: a change there that is not a decision shows up. Sources are
the sections of shared/PROTOCOL.md.
"""

from __future__ import annotations

import pytest
from commands import compose_train
from omegaconf import OmegaConf

from proxy_anchor.cli.config import learning
from proxy_anchor.training.optim import check_learning

# Optimisation. Its table has columns for BN-Inception and ResNet-50. GoogLeNet takes BN-Inception's ("networks outside
# the paper"; batch 180 is its own), ResNet-101 takes ResNet-50's, and the ResNets on SOP and In-Shop, where the table
# has no step, take BN-Inception's. Batch norm: "statistics frozen", as the authors': scale and shift train.
SAME = {"googlenet": "bninception", "resnet101": "resnet50"}
FROZEN, TRAIN = "frozen_statistics", "train"
RECIPES = {
    # data set, network         rate  proxies  epochs  batch  warm-up  step  gamma  batch norm
    ("cub", "bninception"):    (1e-4, 1e-2,    40,     180,   1,       10,   0.5,   FROZEN),
    ("cub", "resnet50"):       (1e-4, 1e-2,    40,     120,   5,       5,    0.5,   FROZEN),
    ("cars", "bninception"):   (1e-4, 1e-2,    40,     180,   1,       20,   0.5,   FROZEN),
    ("cars", "resnet50"):      (1e-4, 1e-2,    40,     120,   5,       10,   0.5,   FROZEN),
    ("sop", "bninception"):    (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("sop", "resnet50"):       (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
    ("inshop", "bninception"): (6e-4, 6e-2,    60,     180,   1,       20,   0.25,  TRAIN),
    ("inshop", "resnet50"):    (6e-4, 6e-2,    60,     120,   5,       20,   0.25,  TRAIN),
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

# Network: names in timm. The pixels that each of them sees: tests/models.
NAMES = {
    "bninception": "bninception",
    "googlenet": "googlenet",
    "resnet50": "resnet50.tv_in1k",
    "resnet101": "resnet101.tv_in1k",
}


@pytest.mark.parametrize("network", NAMES)
@pytest.mark.parametrize("dataset", RECALL_K)
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
    ) == RECIPES[dataset, SAME.get(network, network)]
    assert {key: OmegaConf.select(cfg, key) for key in COMMON} == COMMON
    assert cfg.recall_k == RECALL_K[dataset]
    assert cfg.backbone.name == NAMES[network]
    assert (cfg.dataset.name, cfg.dataset.allow_partial) == (dataset, False)
    check_learning(**learning(cfg))
