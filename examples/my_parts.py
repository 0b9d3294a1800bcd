"""One part of each kind, outside the package; examples/my_train.py trains with them."""

from pathlib import Path

import pytorch_lightning as pl
import timm
import torch
from torch import Tensor, nn

from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.retrieval.search import search
from proxy_anchor.training.callbacks.recall import RecallCallback


# backbone: timm finds it by name.
class MyNet(nn.Module):
    """Two convolutions; feature maps of 32 channels."""

    num_features = 32

    def __init__(self) -> None:
        super().__init__()
        self.pretrained_cfg = {"mean": (0.5, 0.5, 0.5), "std": (0.5, 0.5, 0.5)}
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, 2), nn.ReLU(), nn.Conv2d(16, 32, 3, 2), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        """(B, 3, H, W) normalised images to (B, 32, h, w) feature maps."""
        return self.layers(images)


@timm.models.register_model
def my_net(pretrained: bool = False, **_: object) -> nn.Module:
    """timm calls this for backbone=my_net."""
    return MyNet()


# optimizer: called with the parameter groups backbone, head and proxies.
class SignSGD(torch.optim.Optimizer):
    """Steps of equal size against the sign of the gradient, with decoupled weight decay."""

    def __init__(self, params, lr: float, weight_decay: float = 0.0) -> None:
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        """One step; Lightning computes the gradients in `closure`."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter *= 1 - group["lr"] * group["weight_decay"]
                    parameter -= group["lr"] * parameter.grad.sign()
        return loss


# callback: any of Lightning's hooks.
class ProxyNorm(pl.Callback):
    """Logs the mean norm of the proxies after every epoch."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Write it to metrics.csv and the other loggers."""
        pl_module.log("proxy_norm", pl_module.loss.proxies.norm(dim=1).mean())


# metric: a function of embeddings, and a callback that logs it.
def mean_similarity_of_first(embeddings: Tensor) -> float:
    """Mean cosine similarity of (N, D) embeddings to their nearest neighbour."""
    similarities, _ = search(embeddings, embeddings, 1, exclude_self=True)
    return float(similarities.mean())


class MyMetric(pl.Callback):
    """Logs `mean_similarity_of_first` of the queries after every evaluation."""

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Further callbacks run after RecallCallback, which has gathered the embeddings."""
        recall = next(each for each in trainer.callbacks if isinstance(each, RecallCallback))
        queries = recall.metrics["test"].gathered_embeddings()[0]
        pl_module.log("test/mean_similarity_of_first", mean_similarity_of_first(queries))


# data set: a function from a folder to Splits.
def load_my_data(root: str, verify_files: bool = True) -> Splits:
    """Files CLASS_NUMBER.png in one folder; the classes of the first half of the alphabet train."""
    files = [(path, path.stem.partition("_")[0]) for path in sorted(Path(root).glob("*.png"))]
    [train] = make_tables([each for each in files if each[1] < "m"])
    [query] = make_tables([each for each in files if each[1] >= "m"])
    return Splits("my_data", train, query)
