"""GoogLeNet, Szegedy et al., CVPR 2015: torchvision's network and weights, registered with timm.

torchvision's constructor sets `transform_input` when it loads weights: the network then converts its input from
ImageNet's mean and std to (x - 0.5) / 0.5, with which these weights, ported from TensorFlow, were trained. Here the
option is off and `pretrained_cfg` has mean = std = 0.5, so the input of the first convolution is the same. (The
authors' released code uses ImageNet's mean and std with the option off, that is, input that these weights were not
trained with.) There are no auxiliary classifiers.
"""

from __future__ import annotations

from typing import Any

import torchvision
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn

from proxy_anchor.models.timm_head import TimmNetwork, build_timm

TRUNK = (
    *("conv1", "maxpool1", "conv2", "conv3", "maxpool2", "inception3a", "inception3b", "maxpool3"),
    *("inception4a", "inception4b", "inception4c", "inception4d", "inception4e", "maxpool4"),
    *("inception5a", "inception5b"),
)


class GoogLeNet(TimmNetwork):
    """GoogLeNet.

    RGB images (B, 3, H, W), normalised with mean and std 0.5, to logits (B, num_classes). With `num_classes=0` there
    is no classifier; with `global_pool=""` as well the result is the feature map (B, 1024, H / 32, W / 32).
    """

    classifier_name = "fc"
    blocks = TRUNK[5:]

    def __init__(self, num_classes: int = 1000, global_pool: str = "avg") -> None:
        super().__init__()
        network = torchvision.models.GoogLeNet(aux_logits=False, transform_input=False, init_weights=False)
        for name in TRUNK:
            self.add_module(name, getattr(network, name))
        self.add_head(1024, num_classes, global_pool)

    def forward_features(self, x: Tensor) -> Tensor:
        """(B, 3, H, W) to the feature map."""
        for name in TRUNK:
            x = getattr(self, name)(x)
        return x


def checkpoint_filter_fn(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Remove the auxiliary classifiers, which torchvision documents as untrained."""
    return {name: value for name, value in state.items() if not name.startswith(("aux1.", "aux2."))}


_PUBLISHED = {
    "url": "https://download.pytorch.org/models/googlenet-1378be20.pth",
    "mean": (0.5, 0.5, 0.5),
    "std": (0.5, 0.5, 0.5),
    "classifier": "fc",
    "license": "bsd-3-clause",
}
default_cfgs = generate_default_cfgs({"googlenet.tv_in1k": _PUBLISHED})


@register_model
def googlenet(pretrained: bool = False, **kwargs: Any) -> GoogLeNet:
    """GoogLeNet with torchvision's weights."""
    return build_timm(GoogLeNet, "googlenet", pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs)
