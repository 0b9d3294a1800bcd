from __future__ import annotations

from pathlib import Path

import pytest
import timm
import torch
import torchvision
from pictures import pixels
from torch import nn

from proxy_anchor import EmbeddingNet

IMAGENET_MEAN = torch.tensor([0.485, 0.456, 0.406]).view(3, 1, 1)
IMAGENET_STD = torch.tensor([0.229, 0.224, 0.225]).view(3, 1, 1)


@pytest.fixture(scope="module")
def theirs() -> nn.Module:
    """torchvision's network as it is after loading weights, with its hidden switch on; random weights."""
    torch.manual_seed(0)
    network = torchvision.models.GoogLeNet(aux_logits=True, transform_input=True, init_weights=False)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.normal_(module.running_mean, std=0.1)
            nn.init.uniform_(module.running_var, 0.5, 1.5)
    return network.eval()


def test_same_numbers_as_torchvision_with_its_hidden_switch(theirs: nn.Module, tmp_path: Path) -> None:
    torch.save(theirs.state_dict(), tmp_path / "torchvision.pth")
    net = EmbeddingNet("googlenet", 1000, pooling="own", weights=str(tmp_path / "torchvision.pth")).eval()
    net.head.load_state_dict(theirs.fc.state_dict())
    images = pixels()
    with torch.no_grad():
        expected = nn.functional.normalize(theirs((images / 255 - IMAGENET_MEAN) / IMAGENET_STD))
        torch.testing.assert_close(net(images), expected, rtol=0, atol=1e-5)


def test_preprocessing_is_half_half() -> None:
    config = timm.models.get_pretrained_cfg("googlenet")
    assert config.mean == config.std == (0.5, 0.5, 0.5)
    assert config.url == torchvision.models.GoogLeNet_Weights.IMAGENET1K_V1.url


def test_no_auxiliary_and_no_unused_parameters(theirs: nn.Module) -> None:
    net = EmbeddingNet("googlenet", 8, pretrained=False)
    backbone = {name for name, _ in net.backbone.named_parameters()}
    expected = {name for name, _ in theirs.named_parameters() if not name.startswith(("aux", "fc"))}
    assert backbone == expected
