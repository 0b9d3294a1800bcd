"""The paper's embedding network: backbone, global pooling, linear layer, L2 normalisation.

The network includes its normalisation: it takes pixels in 0-255 and holds the mean and standard deviation that its
weights were trained with.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from typing import Any

import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F
from torchvision.ops import Permute

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.errors import UsageError, check_choice, check_int, check_number, reason_of
from proxy_anchor.models.hub import SharedNet
from proxy_anchor.models.pooling import POOLINGS
from proxy_anchor.models.weights import create_pretrained

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class EmbeddingNet(SharedNet):
    """Maps RGB images to unit vectors.

    Images are (B, 3, H, W) in 0-255, uint8 or float; embeddings are (B, D) in float32.

    Args:
        backbone: any timm model name, with or without a weights tag ("resnet50.tv_in1k"), or a model of timm's form
            on a hub ("hf-hub:ORG/NAME") or in a folder ("local-dir:FOLDER").
        embedding_dim: D.
        pooling: "auto", "avg+max", "avg", "max", "gem" or "own" (the backbone's own). auto is avg+max, as in the paper,
            where timm gives a feature map (B, F, H, W), and own elsewhere: for transformers, and also for
            networks with maps (B, H, W, F) (Swin, MambaOut; the others pool these too) and for convolutional ones
            whose pooling timm does not turn off (InceptionNeXt, EfficientViT).
        image_size: side of the images in pixels; used only by networks that fix it at construction.
        pretrained: load published weights; False starts from timm's random initialisation.
        weights: a local weights file instead of the published ones.
        batch_norm: "frozen_statistics" (running statistics are fixed, scale and shift train, as in the released code on
            CUB and Cars), "frozen" (scale and shift are fixed too) or "train".
        drop_path: stochastic depth (Huang et al. 2016), in [0, 1): the largest probability that a residual block is
            skipped for an image in training; timm's rates grow with depth. All other random layers of timm (dropout,
            DropBlock) are off.
        search_with: how evaluation embeds, in place of the head alone. "features": by the pooled features before the
            head, normalised (Bordes et al. 2022, arXiv 2206.13378). "flip": by the mean of the embeddings of an image
            and its mirror image, normalised. "features+flip": both.
        mean, std: per RGB channel of pixels in [0, 1]; None uses those that the weights were trained with.

    Attributes:
        prepare: how `Retriever` and exports prepare an image: the shorter side to image_size x 8/7, then the central
            square, unless the network was read with another preprocessing, or you assign one.
        about, card: see `SharedNet`.

    Raises UsageError for an unknown backbone, a pooling or drop_path that does not fit it, or weights that cannot be
    loaded.
    """

    def __init__(
        self,
        backbone: str,
        embedding_dim: int = 512,
        *,
        pooling: str = "auto",
        image_size: int = 224,
        pretrained: bool = True,
        weights: str | None = None,
        batch_norm: str = "frozen_statistics",
        drop_path: float = 0.0,
        search_with: str | None = None,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
    ) -> None:
        super().__init__()
        check_int("embedding_dim", embedding_dim, 1)
        check_choice("backbone.pooling", pooling, ["auto", *POOLINGS, "own"])
        check_choice("batch_norm", batch_norm, ["frozen_statistics", "frozen", "train"])
        check_number("backbone.drop_path", drop_path, 0, maximum=1)
        if drop_path == 1:
            raise UsageError("backbone.drop_path=1: every block would be skipped; expected a number below 1.")
        self.batch_norm = batch_norm
        self.prepare, self.about = CentralCrop(image_size, round(image_size * 8 / 7)), {}
        # Sufficient to rebuild the network for saved weights (see `from_config`).
        self.config: dict[str, Any] = {
            "backbone": backbone,
            "embedding_dim": embedding_dim,
            "pooling": pooling,
            "image_size": image_size,
            "batch_norm": batch_norm,
        }
        if search_with is not None:  # only if it is given, as drop_path
            check_choice("backbone.search_with", search_with, ["features", "flip", "features+flip"])
            self.config["search_with"] = search_with
        feature_map, num_features, timm_kwargs = inspect_backbone(backbone, pooling, image_size)
        if drop_path:
            # Only if it is on, so that configs of other networks stay as they were before this key existed.
            self.config["drop_path"] = drop_path
            timm_kwargs["drop_path_rate"] = drop_path
            _require_drop_path(backbone, timm_kwargs)
        if pretrained or weights is not None:
            self.backbone = create_pretrained(backbone, weights, **timm_kwargs)
        else:
            self.backbone = timm.create_model(backbone, pretrained=False, **timm_kwargs)
        turn_off_dropout(self.backbone, keep_drop_path=drop_path > 0)
        trained_with: Any = self.backbone.pretrained_cfg
        if ":" in backbone:  # a checkpoint must load without its source
            self.config["backbone"] = trained_with["architecture"]
            _require_same_tensors(self.backbone, backbone, trained_with["architecture"], pooling, image_size)
        kind = "avg+max" if pooling == "auto" else pooling
        self.pool = POOLINGS[kind]() if feature_map else nn.Identity()
        if feature_map == "NHWC":
            self.pool = nn.Sequential(Permute([0, 3, 1, 2]), self.pool)
        self.head = nn.Linear(num_features, embedding_dim)
        nn.init.kaiming_normal_(self.head.weight, mode="fan_out")
        nn.init.zeros_(self.head.bias)

        for name, given in {"mean": mean, "std": std}.items():
            values = tuple(trained_with[name] if given is None else given)
            self.config[name] = list(values)
            self.register_buffer(name, torch.tensor(values).view(3, 1, 1) * 255.0, persistent=False)
        for module in self._batch_norms():
            if batch_norm == "frozen":
                module.requires_grad_(False)
        self.train(self.training)

    @classmethod
    def from_config(cls, config: dict) -> EmbeddingNet:
        """Build the network of a `.config`, with random weights."""
        return cls(**config, pretrained=False, weights=None)

    @property
    def search_with(self) -> str:
        """See the class; "" for the head."""
        return self.config.get("search_with", "")

    @property
    def embedding_dim(self) -> int:
        """D of evaluation: the head's, or F, the number of pooled features."""
        return self.head.in_features if "features" in self.search_with else self.head.out_features

    def _batch_norms(self) -> Iterator[nn.Module]:
        return (module for module in self.backbone.modules() if isinstance(module, _BATCH_NORMS))

    def train(self, mode: bool = True) -> EmbeddingNet:
        """Set training mode, except for frozen batch norm."""
        super().train(mode)
        if self.batch_norm != "train":
            for module in self._batch_norms():
                module.eval()
        return self

    def forward(self, images: Tensor, with_features: bool = False) -> Any:
        """RGB images (B, 3, H, W) in 0-255 to unit-length embeddings (B, D) in float32.

        with_features: return (embeddings, pooled features (B, F)).

        Raises UsageError for float images that are scaled to [0, 1] or normalised. This check waits for the GPU; uint8
        images are not checked.
        """
        check_range(images)
        embeddings, features = self._embed(images)
        if "flip" in self.search_with and not self.training:
            embeddings = F.normalize(embeddings + self._embed(images.flip(-1))[0])
        return (embeddings, features) if with_features else embeddings

    def _embed(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Embeddings and pooled features (B, F)."""
        pixels = (images.to(self.mean.dtype) - self.mean) / self.std  # type: ignore[operator,arg-type]
        features = self.pool(self.backbone(pixels))
        # The head and the norm are cheap and determine the ranking, so they always run in full precision.
        with torch.autocast(images.device.type, enabled=False):
            whole = features.to(self.head.weight.dtype)
            by_head = self.training or "features" not in self.search_with
            return F.normalize(self.head(whole) if by_head else whole), features


def check_range(images: Tensor) -> None:
    """Raise UsageError for float images outside 0-255; no-op in compile and export."""
    captured = images.is_cuda and torch.cuda.is_current_stream_capturing()
    unseen = torch.compiler.is_compiling() or torch.jit.is_tracing() or images.is_meta or captured
    if unseen or not images.is_floating_point() or not images.numel():
        return
    low, high = torch.stack(images.detach().aminmax()).tolist()
    if low < 0 or high <= 1:
        raise UsageError(
            f"images: float values from {low:.3g} to {high:.3g}; expected pixels in 0-255, because the network "
            "normalises them itself: pass the uint8 image, or multiply values in [0, 1] by 255."
        )


def turn_off_dropout(backbone: nn.Module, *, keep_drop_path: bool) -> None:
    """Set the rates of dropout, DropBlock and, unless kept, drop path to 0.

    timm's constructors have various defaults (0.1 in swin, 0.5 in nest) and do not all accept all rates, so the modules
    are changed instead.
    """
    for module in backbone.modules():
        if keep_drop_path and isinstance(module, DropPath):
            continue
        drops = "drop" in type(module).__name__.lower()  # nn.Dropout.p, PatchDropout.prob
        for name, value in vars(module).items():
            if keep_drop_path and "drop_path" in name:
                continue
            if isinstance(value, float) and ("drop" in name or (drops and name in ("p", "prob"))):
                setattr(module, name, 0.0)


def _without_memory(name: str, **timm_kwargs: Any) -> nn.Module:
    try:
        with torch.device("meta"):
            return timm.create_model(name, pretrained=False, **timm_kwargs)
    except NotImplementedError:  # a constructor that reads values, as RegNet's in timm 1.0.29
        return timm.create_model(name, pretrained=False, **timm_kwargs).to("meta")


def _require_drop_path(backbone: str, timm_kwargs: dict) -> None:
    """Raise UsageError if the network has no paths to drop."""
    try:
        model = _without_memory(backbone, **timm_kwargs)
        paths = [module for module in model.modules() if isinstance(module, DropPath) and module.drop_prob]
    except TypeError:  # the constructor has no such argument
        paths = []
    if not paths:
        raise UsageError(
            f"backbone.drop_path={timm_kwargs['drop_path_rate']}: {backbone} has no paths to drop; set it to 0."
        )


def _require_same_tensors(model: nn.Module, source: str, architecture: str, pooling: str, image_size: int) -> None:
    """Raise UsageError if the model differs from timm's network of that name."""
    plain = _without_memory(architecture, **inspect_backbone(architecture, pooling, image_size)[2])
    shapes = [{name: value.shape for name, value in each.state_dict().items()} for each in (model, plain)]
    if shapes[0] != shapes[1]:
        raise UsageError(
            f"backbone {source} is a modified {architecture}, which cannot be rebuilt from a checkpoint: expected "
            "one that timm builds from its name alone."
        )


def fixed_size(backbone: str) -> tuple[int, ...] | None:
    """(height, width) that a network requires, () if unknown, None if any fits."""
    architecture = backbone
    if ":" in backbone:
        try:
            architecture = _without_memory(backbone).pretrained_cfg["architecture"]  # type: ignore[index,assignment]
        except Exception as error:  # missing files, other JSON, no network, a model of another library
            raise UsageError(
                f"backbone {backbone} cannot be opened ({reason_of(error)[:300]}): expected hf-hub:ORG/NAME or "
                "local-dir:FOLDER with a config.json of timm's."
            ) from error
    if not timm.is_model(architecture):
        close = difflib.get_close_matches(backbone, timm.list_models(), n=3, cutoff=0.5)
        hint = f" Close names: {', '.join(close)}." if close else ""
        raise UsageError(f"backbone {backbone!r} is neither in conf/backbone nor a timm model.{hint}")
    config = timm.models.get_pretrained_cfg(architecture)
    if config is None or not config.fixed_input_size:
        return None
    return tuple(config.input_size[1:]) if architecture == backbone else ()


def inspect_backbone(backbone: str, pooling: str, image_size: int) -> tuple[str, int, dict]:
    """("NCHW" or "NHWC", or "" for the backbone's own pooling; F; arguments for timm.create_model).

    Found by a dry run on the meta device.
    """
    bare: dict = {"num_classes": 0}
    if fixed_size(backbone) not in (None, (image_size, image_size)):
        bare["img_size"] = image_size
    attempts = [bare] if pooling == "own" else [{**bare, "global_pool": ""}, bare]
    failures = []
    for kwargs in attempts:
        try:
            model = _without_memory(backbone, **kwargs).eval()
            with torch.device("meta"), torch.no_grad():
                output = model(torch.zeros(1, 3, image_size, image_size))
            if not isinstance(output, Tensor):
                raise TypeError("it returns several outputs")
        except Exception as error:  # networks raise various types for arguments that do not fit
            failures.append(reason_of(error)[:300])
            continue
        if output.ndim == 2 and pooling not in POOLINGS:
            return "", output.shape[1], kwargs
        if output.ndim == 4 and "global_pool" in kwargs:
            channels = getattr(model, "head_hidden_size", None) or model.num_features
            if output.shape[1] == channels:
                return "NCHW", output.shape[1], kwargs
            if output.shape[3] in (channels, model.num_features) and pooling in POOLINGS:
                return "NHWC", output.shape[3], kwargs
    if len(failures) == len(attempts):
        raise UsageError(f"backbone {backbone} does not accept {image_size} x {image_size} images ({failures[-1]}).")
    if pooling in POOLINGS:
        reason = f" ({failures[0]})" if failures else ""
        raise UsageError(
            f"backbone {backbone} has no feature map to pool{reason}: set backbone.pooling=own instead of {pooling}."
        )
    raise UsageError(
        f"backbone {backbone} gives no vector per image: set backbone.pooling=avg+max, or choose another backbone."
    )
