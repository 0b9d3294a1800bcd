"""Base class of the networks that are registered with timm."""

from __future__ import annotations

from typing import Any

from timm.layers import SelectAdaptivePool2d, create_classifier
from torch import Tensor, nn


class TimmNetwork(nn.Module):
    """Pooling and classifier with timm's interface.

    A subclass defines `forward_features` and `classifier_name`, the attribute of its linear layer in public files.
    """

    classifier_name: str
    blocks: tuple[str, ...]  # prefix of the parameters of each block after the stem
    global_pool: SelectAdaptivePool2d

    def add_head(self, num_features: int, num_classes: int, global_pool: str, drop_rate: float) -> None:
        """Register pooling, dropout and classifier; called last in a subclass's constructor."""
        self.num_features = num_features
        self.head_drop = nn.Dropout(drop_rate)
        self.reset_classifier(num_classes, global_pool)

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Layers in order, for timm's layer-wise learning rates."""
        return {"stem": r"^conv", "blocks": [(f"^{name}", (place,)) for place, name in enumerate(self.blocks)]}

    def forward_features(self, x: Tensor) -> Tensor:
        """RGB (B, 3, H, W) to the feature map (B, num_features, H / 32, W / 32)."""
        raise NotImplementedError

    def forward_head(self, x: Tensor, pre_logits: bool = False) -> Tensor:
        """Pool the feature map and, unless `pre_logits`, classify it."""
        x = self.head_drop(self.global_pool(x))
        return x if pre_logits else self.get_classifier()(x)

    def forward(self, x: Tensor) -> Tensor:
        """RGB (B, 3, H, W) to logits, pooled features or the feature map."""
        return self.forward_head(self.forward_features(x))

    def get_classifier(self) -> nn.Module:
        """The linear layer, or an identity."""
        return getattr(self, self.classifier_name)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:
        """Replace pooling (None keeps its type) and classifier (0 removes it)."""
        if global_pool is None:
            global_pool = self.global_pool.pool_type
        self.num_classes = num_classes
        self.global_pool, classifier = create_classifier(self.num_features, num_classes, pool_type=global_pool)
        setattr(self, self.classifier_name, classifier)
        self.head_hidden_size = self.num_features * self.global_pool.feat_mult()
