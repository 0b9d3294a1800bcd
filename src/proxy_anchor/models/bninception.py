"""BN-Inception, Ioffe and Szegedy, ICML 2015, converted from Caffe: the paper's main backbone.

Parameter names, shapes and the graph are those of the public file `bn_inception-52deb4733.pth`: each batch norm is
followed by a ReLU, and later layers read the rectified tensor. The file is of
https://github.com/Cadene/pretrained-models.pytorch.

Colours. The weights expect BGR in 0-255, minus (104, 117, 128), without division. Like every timm network, this one
takes RGB normalised with the mean and std of its `pretrained_cfg` (which undo the division by 255);
`forward_features` then always reverses the channels. Files and checkpoints are never converted, so none can be
converted twice. `features` is the graph without the reversal, for input in BGR order.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from timm.models import generate_default_cfgs, register_model
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.models.timm_head import TimmNetwork, build_timm


class Convolution(NamedTuple):
    """A convolution with batch norm (module `NAME_bn`) and ReLU."""

    name: str
    channels: int
    kernel_size: int
    stride: int = 1


class Block(NamedTuple):
    """Output channels of an inception block.

    (reduction, output) in branches that start with a 1 x 1 convolution. A block without 1 x 1 branch and without a
    projection after its pooling halves height and width.
    """

    name: str
    conv1x1: int
    conv3x3: tuple[int, int]
    double3x3: tuple[int, int]
    pool: str
    projection: int

    @property
    def stride(self) -> int:
        """Stride of the last convolution of each branch and of the pooling."""
        return 1 if self.projection else 2

    def branches(self) -> list[list[Convolution]]:
        """Convolutions of each branch, in the order of the output channels.

        Those of the last branch follow the pooling.
        """
        name = f"inception_{self.name}"
        (reduce, out), (double_reduce, double_out) = self.conv3x3, self.double3x3
        return [
            [Convolution(f"{name}_1x1", self.conv1x1, 1)] if self.conv1x1 else [],
            [Convolution(f"{name}_3x3_reduce", reduce, 1), Convolution(f"{name}_3x3", out, 3, self.stride)],
            [
                Convolution(f"{name}_double_3x3_reduce", double_reduce, 1),
                Convolution(f"{name}_double_3x3_1", double_out, 3),
                Convolution(f"{name}_double_3x3_2", double_out, 3, self.stride),
            ],
            [Convolution(f"{name}_pool_proj", self.projection, 1)] if self.projection else [],
        ]

    def out_channels(self, in_channels: int) -> int:
        """Output channels of all branches; a pooling without projection keeps its input channels."""
        return self.conv1x1 + self.conv3x3[1] + self.double3x3[1] + (self.projection or in_channels)

    def pooled(self, x: Tensor) -> Tensor:
        """The pooled input of the last branch."""
        if self.pool == "avg":
            return F.avg_pool2d(x, 3, stride=1, padding=1)
        if self.stride == 1:
            return F.max_pool2d(x, 3, stride=1, padding=1)
        # Padding for odd sides only, where the released graph fails: its pooled map is smaller than those of its
        # convolutions.
        return F.max_pool2d(x, 3, stride=2, padding=(x.shape[2] % 2, x.shape[3] % 2), ceil_mode=True)


STEM = (
    Convolution("conv1_7x7_s2", 64, 7, 2),  # then a max pooling
    Convolution("conv2_3x3_reduce", 64, 1),
    Convolution("conv2_3x3", 192, 3),  # then a max pooling
)
BLOCKS = (
    #     name  1x1  3x3         double 3x3  pooling
    Block("3a", 64, (64, 64), (64, 96), "avg", 32),
    Block("3b", 64, (64, 96), (64, 96), "avg", 64),
    Block("3c", 0, (128, 160), (64, 96), "max", 0),
    Block("4a", 224, (64, 96), (96, 128), "avg", 128),
    Block("4b", 192, (96, 128), (96, 128), "avg", 128),
    Block("4c", 160, (128, 160), (128, 160), "avg", 128),
    Block("4d", 96, (128, 192), (160, 192), "avg", 128),
    Block("4e", 0, (128, 192), (192, 256), "max", 0),
    Block("5a", 352, (192, 320), (160, 224), "avg", 128),
    Block("5b", 352, (192, 320), (192, 224), "max", 128),
)


class BNInception(TimmNetwork):
    """BN-Inception.

    RGB images (B, 3, H, W), normalised as in `pretrained_cfg`, to logits (B, num_classes). With `num_classes=0` there
    is no classifier; with `global_pool=""` as well the result is the feature map (B, 1024, H / 32, W / 32), with
    sides rounded up or down.
    """

    classifier_name = "last_linear"
    blocks = tuple(f"inception_{block.name}_" for block in BLOCKS)

    def __init__(self, num_classes: int = 1000, global_pool: str = "avg") -> None:
        super().__init__()
        channels = 3
        for convolution in STEM:
            channels = self._add(convolution, channels)
        for block in BLOCKS:
            for branch in block.branches():
                width = channels
                for convolution in branch:
                    width = self._add(convolution, width)
            channels = block.out_channels(channels)
        self.add_head(channels, num_classes, global_pool)

    def _add(self, convolution: Convolution, in_channels: int) -> int:
        """Register the modules of a convolution and return its output channels."""
        name, channels, kernel_size, stride = convolution
        self.add_module(name, nn.Conv2d(in_channels, channels, kernel_size, stride, padding=kernel_size // 2))
        # Momentum of the public and the authors' code: the last batch has weight 0.9 in the statistics. It only matters
        # where they are not frozen (SOP, In-Shop).
        self.add_module(f"{name}_bn", nn.BatchNorm2d(channels, eps=1e-5, momentum=0.9))
        return channels

    def _apply_all(self, convolutions: list[Convolution] | tuple[Convolution, ...], x: Tensor) -> Tensor:
        for name, *_ in convolutions:
            x = F.relu(getattr(self, f"{name}_bn")(getattr(self, name)(x)), inplace=True)
        return x

    def features(self, x: Tensor) -> Tensor:
        """The released graph: BGR (B, 3, H, W) to feature map (B, 1024, H / 32, W / 32)."""
        x = F.max_pool2d(self._apply_all(STEM[:1], x), 3, stride=2, ceil_mode=True)
        x = F.max_pool2d(self._apply_all(STEM[1:], x), 3, stride=2, ceil_mode=True)
        for block in BLOCKS:
            *branches, projection = block.branches()
            outputs = [self._apply_all(branch, x) for branch in branches if branch]
            x = torch.cat([*outputs, self._apply_all(projection, block.pooled(x))], 1)
        return x

    def forward_features(self, x: Tensor) -> Tensor:
        """RGB (B, 3, H, W) to the feature map."""
        return self.features(x.flip(1))


def checkpoint_filter_fn(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Convert the public file, from before PyTorch 0.4.

    Its batch-norm tensors have shape (1, C), and it has no `num_batches_tracked`.
    """
    state = {name: value.squeeze(0) if value.ndim and len(value) == 1 else value for name, value in state.items()}
    counts = [name for name in model.state_dict() if name.endswith("num_batches_tracked")]
    return {name: torch.tensor(0) for name in counts} | state


_PUBLISHED = {
    "url": "http://data.lip6.fr/cadene/pretrainedmodels/bn_inception-52deb4733.pth",
    "mean": (128 / 255, 117 / 255, 104 / 255),
    "std": (1 / 255, 1 / 255, 1 / 255),
    "classifier": "last_linear",
    "license": "bsd-3-clause",
}
default_cfgs = generate_default_cfgs({"bninception.caffe_in1k": _PUBLISHED})


@register_model
def bninception(pretrained: bool = False, **kwargs: Any) -> BNInception:
    """BN-Inception with the weights converted from Caffe."""
    return build_timm(BNInception, "bninception", pretrained, pretrained_filter_fn=checkpoint_filter_fn, **kwargs)
