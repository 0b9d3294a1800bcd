from __future__ import annotations

import json
import math
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from commands import one_line
from pictures import pixels
from timm.models import _registry, group_parameters
from torch import Tensor

from proxy_anchor import EmbeddingNet

FIDELITY = Path(__file__).parent.parent / "fidelity"
SHAPES: dict[str, list[int]] = json.loads((FIDELITY / "bninception_state_dict.json").read_text())["state_dict_shapes"]
FEATURES = np.load(FIDELITY / "bninception_features.npz")
BGR_MEAN = torch.tensor([104.0, 117.0, 128.0]).view(3, 1, 1)


def made_up(name: str, shape: list[int]) -> Tensor:
    """The rule of the golden values; see shared/fidelity/README.md."""
    if name.endswith("num_batches_tracked"):
        return torch.tensor(0)
    r = torch.randn(shape, generator=torch.Generator().manual_seed(zlib.crc32(name.encode())))
    if name.endswith("running_var"):
        return 1 + 0.1 * r.abs()
    if len(shape) >= 2:
        return r * math.sqrt(2 / r[0].numel())
    return 1 + 0.1 * r if name.endswith("_bn.weight") else 0.1 * r


@pytest.fixture(scope="module")
def state() -> dict[str, Tensor]:
    return {name: made_up(name, shape) for name, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def file(state: dict[str, Tensor], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Batch-norm tensors of shape (1, C) and no counts, as files from before PyTorch 0.4 have them."""
    kept = {name: value for name, value in state.items() if not name.endswith("num_batches_tracked")}
    path = tmp_path_factory.mktemp("weights") / "caffe.pth"
    published = {name: value[None] if "_bn." in name else value for name, value in kept.items()}
    torch.save(published, path, _use_new_zipfile_serialization=False)
    return path


def raw_images(size: str) -> Tensor:
    """BGR, in the released convention: nothing is subtracted any more."""
    count, shape, seed = {"224": (2, (224, 224), 0), "256x320": (1, (256, 320), 1)}[size]
    return torch.randn(count, 3, *shape, generator=torch.Generator().manual_seed(seed))


def assert_golden(features: Tensor, size: str) -> None:
    assert list(features.shape) == FEATURES[f"shape_{size}"].tolist()
    np.testing.assert_allclose(features.mean((2, 3)).numpy(), FEATURES[f"mean_{size}"], rtol=0, atol=1e-4)
    if size == "224":
        np.testing.assert_allclose(features.amax((2, 3)).numpy(), FEATURES["max_224"], rtol=0, atol=1e-4)


# The graph


def test_names_shapes_and_order_are_the_public_files() -> None:
    ours = {name: list(value.shape) for name, value in timm.create_model("bninception").state_dict().items()}
    assert list(ours.items()) == list(SHAPES.items())


@pytest.mark.parametrize("size", ["224", "256x320"])
def test_golden_features(state: dict[str, Tensor], size: str) -> None:
    model = timm.create_model("bninception", num_classes=0, global_pool="").eval()
    model.load_state_dict({name: state[name] for name in model.state_dict()})
    bgr = raw_images(size)
    with torch.no_grad():
        assert_golden(model.features(bgr), size)
        features = model(bgr.flip(1))  # the network itself takes RGB
    assert_golden(features, size)
    assert (features >= 0).all()


def test_a_file_gives_golden_features_through_the_whole_chain(file: Path) -> None:
    net = EmbeddingNet("bninception", 8, weights=str(file)).eval()
    rgb = (raw_images("224") + BGR_MEAN).flip(1)
    seen: list[Tensor] = []
    net.pool.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    with torch.no_grad():
        net(rgb)
    assert_golden(seen[0], "224")


# Preprocessing


def test_our_backbone_passed_on_as_a_file_has_the_same_colours(file: Path, tmp_path: Path) -> None:
    net = EmbeddingNet("bninception", 8, weights=str(file))
    torch.save(net.backbone.state_dict(), tmp_path / "backbone.pth")
    passed_on = EmbeddingNet("bninception", 8, weights=str(tmp_path / "backbone.pth"))
    passed_on.head.load_state_dict(net.head.state_dict())
    images = pixels()
    assert torch.equal(passed_on.eval()(images), net.eval()(images))


# Weights


@pytest.mark.parametrize("name", ["bninception", "googlenet"])
def test_layers_are_the_stem_and_then_the_blocks_in_order(name: str) -> None:
    net = timm.create_model(name, num_classes=0, global_pool="")
    groups = group_parameters(net, net.group_matcher())
    first = [names[0] for names in groups.values()]
    third = ["3a", "3b", "3c"][: len(groups) - 8]  # GoogLeNet has two
    blocks = [each.replace("inception_", "inception")[9:11] for each in first]
    assert blocks[1:] == [*third, "4a", "4b", "4c", "4d", "4e", "5a", "5b"]
    assert sum(map(len, groups.values())) == len(list(net.parameters()))


def test_a_download_that_is_not_the_published_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = tmp_path / "bn_inception-52deb4733.pth"
    source.write_bytes(b"cut short")
    config = replace(timm.models.get_pretrained_cfg("bninception"), url=source.as_uri())
    monkeypatch.setitem(_registry._model_pretrained_cfgs, "bninception", config)
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path / "hub"))
    one_line(EmbeddingNet, "bninception", 8, match="invalid hash")
    assert not list((tmp_path / "hub").rglob("*.pth"))
