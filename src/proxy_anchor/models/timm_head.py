"""Base class of the networks that are registered with timm."""

from __future__ import annotations

from functools import partial
from typing import Any

from timm.layers import create_classifier
from timm.models import build_model_with_cfg
from torch import Tensor, nn

build_timm = partial(build_model_with_cfg, kwargs_filter=("in_chans",))  # always 3


class TimmNetwork(nn.Module):
    """Pooling and classifier with timm's interface.

    A subclass defines `forward_features` and `classifier_name`, the attribute of its linear layer in public files.
    """

    classifier_name: str
    blocks: tuple[str, ...]  # prefix of the parameters of each block after the stem

    def add_head(self, num_features: int, num_classes: int, global_pool: str) -> None:
        """Register pooling and classifier (0 classes: none); called last in a subclass's constructor."""
        self.num_features, self.num_classes = num_features, num_classes
        self.global_pool, classifier = create_classifier(num_features, num_classes, pool_type=global_pool)
        setattr(self, self.classifier_name, classifier)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers in order, for timm's layer-wise learning rates."""
        return {"stem": r"^conv", "blocks": [(f"^{name}", (place,)) for place, name in enumerate(self.blocks)]}

    def forward_features(self, x: Tensor) -> Tensor:
        """RGB (B, 3, H, W) to the feature map (B, num_features, H / 32, W / 32)."""
        raise NotImplementedError

    def forward(self, x: Tensor) -> Tensor:
        """RGB (B, 3, H, W) to logits, pooled features or the feature map."""
        return getattr(self, self.classifier_name)(self.global_pool(self.forward_features(x)))
