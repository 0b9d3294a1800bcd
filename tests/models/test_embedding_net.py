from __future__ import annotations

import math
import re

import pytest
import timm
import torch
from commands import one_line
from families import LARGER, WITH_PATHS, WITHOUT_PATHS
from pictures import pixels
from timm.layers import DropPath
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor import EmbeddingNet
from proxy_anchor.models.pooling import POOLINGS

FAST = [
    *("test_resnet", "test_efficientnet", "test_convnext", "test_nfnet", "bninception", "googlenet"),
    *("test_vit", "test_vit2", "test_vit3", "test_vit_relpos", "test_mambaout", "test_coatnet", "test_maxvit"),
]


def make(backbone: str = "test_resnet", dim: int = 8, **arguments) -> EmbeddingNet:
    return EmbeddingNet(backbone, dim, **{"image_size": 64, "pretrained": False, **arguments})


def statistics(net: EmbeddingNet) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in net.named_buffers() if "running_" in name or "num_batches" in name}


def norms(net: EmbeddingNet) -> list[nn.Module]:
    return [module for module in net.modules() if isinstance(module, nn.BatchNorm2d)]


# The vectors


@pytest.mark.parametrize("backbone", FAST)
def test_any_backbone_gives_unit_vectors_and_trains_every_parameter(backbone: str) -> None:
    net = make(backbone, batch_norm="train")
    embeddings = net(pixels())
    assert embeddings.shape == (3, 8)
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
    # Some layers start at zero scale: give every tensor a value, so that a gradient of zero means "not connected".
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    (net(pixels()) * torch.randn(3, 8)).sum().backward()
    assert [name for name, parameter in net.named_parameters() if parameter.grad is None] == []
    assert all(parameter.grad.isfinite().all() for parameter in net.parameters())


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_bf16_autocast_gives_float32_unit_vectors(backbone: str) -> None:
    net = make(backbone).eval()
    images = pixels()
    with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
        embeddings = net(images)
    assert embeddings.dtype == torch.float32
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3), rtol=0, atol=1e-6)
    with torch.no_grad():
        plain = net(images)
    assert not torch.equal(embeddings, plain)  # the backbone did run in bfloat16
    assert (F.cosine_similarity(embeddings, plain) > 0.99).all()


@pytest.mark.parametrize(
    ("low", "high", "dtype"), [(0, 1, torch.float32), (-1, 1, torch.float16), (0, 0, torch.float64)]
)
def test_floats_that_are_no_pixels_are_refused_in_one_line(low: float, high: float, dtype: torch.dtype) -> None:
    images = torch.tensor([low, high], dtype=dtype).repeat_interleave(3 * 64 * 64).view(2, 3, 64, 64)
    said = rf"^images: float values from {low} to {high}; expected pixels in 0-255.* uint8 image"
    one_line(make(), images, match=said)


def test_floats_go_through_compile_export_and_trace() -> None:
    """With a whole graph, and no look at the values."""
    net, images = make().eval(), pixels(2).float()
    expected = net(images)
    assert torch.equal(torch.compile(net, backend="eager", fullgraph=True)(images), expected)
    torch.testing.assert_close(torch.export.export(net, (images,)).module()(images), expected)
    torch.testing.assert_close(torch.jit.trace(net, images)(images), expected)


@pytest.mark.parametrize("backbone", ["test_resnet", "tf_efficientnet_lite0"])
def test_preprocessing_is_that_of_the_weights(backbone: str) -> None:
    net = make(backbone).eval()
    config = timm.models.get_pretrained_cfg(backbone)
    mean, std = (torch.tensor(values).view(3, 1, 1) for values in (config.mean, config.std))
    if backbone == "tf_efficientnet_lite0":
        assert mean.flatten().tolist() == std.flatten().tolist() == [0.5, 0.5, 0.5]
    seen: list[Tensor] = []
    net.backbone.register_forward_pre_hook(lambda module, inputs: seen.append(inputs[0]))
    images = pixels()
    net(images)
    torch.testing.assert_close(seen[0], (images / 255 - mean) / std, rtol=1e-4, atol=1e-5)


def test_the_stages_are_backbone_pooling_head_and_length() -> None:
    net = make("test_resnet").eval()
    images = pixels()
    features = net.backbone((images - net.mean) / net.std)
    assert features.ndim == 4
    pooled = features.mean((2, 3)) + features.amax((2, 3))
    torch.testing.assert_close(net(images), F.normalize(pooled @ net.head.weight.T + net.head.bias))


@pytest.mark.parametrize("search_with", ["features", "flip", "features+flip"])
def test_what_is_searched_is_not_what_trains(search_with: str) -> None:
    net, images = make(search_with=search_with, batch_norm="frozen"), pixels()
    trained, features = net(images, with_features=True)
    torch.testing.assert_close(trained, F.normalize(net.head(features)))
    found = [net(view, with_features=True)[1] for view in (images, images.flip(-1))]
    found = [F.normalize(each if "features" in search_with else net.head(each)) for each in found]
    expected = F.normalize(sum(found)) if "flip" in search_with else found[0]
    torch.testing.assert_close(net.eval()(images), expected)
    one_line(make, search_with=["flip"], match="choose one of: features, flip")


def test_head_starts_as_in_the_protocol() -> None:
    head = make(dim=512).head
    assert float(head.weight.detach().std()) == pytest.approx(math.sqrt(2 / 512), rel=0.02)  # Kaiming-normal, fan-out
    assert abs(float(head.weight.detach().mean())) < 1e-3
    assert not head.bias.any()


# Pooling


@pytest.mark.parametrize(
    ("backbone", "pooling", "kind"),
    [
        ("test_resnet", "auto", "Pool(average_plus_max_pool)"),
        ("test_resnet", "avg", "Pool(average_pool)"),
        ("test_resnet", "max", "Pool(max_pool)"),
        ("test_resnet", "gem", "GeMPool()"),
        ("test_resnet", "own", "Identity()"),
        ("test_coatnet", "auto", "Pool(average_plus_max_pool)"),
        ("test_vit", "auto", "Identity()"),
        ("test_mambaout", "auto", "Identity()"),  # its maps are (B, H, W, F); as in checkpoints
    ],
)
def test_pooling_choices(backbone: str, pooling: str, kind: str) -> None:
    net = make(backbone, pooling=pooling)
    assert str(net.pool) == kind
    assert net(pixels()).shape == (3, 8)


@pytest.mark.parametrize(
    ("pooling", "by_hand"),
    [("avg", [0, 2]), ("max", [1, 2]), ("avg+max", [1, 4]), ("gem", [(1.125 / 4) ** (1 / 3), 2])],
)
def test_maps_with_channels_last_are_pooled_over_their_places(pooling: str, by_hand: list[float]) -> None:
    net = make("test_mambaout", pooling=pooling).eval()
    assert net(pixels()).shape == (3, 8)
    features = torch.full((1, 2, 2, 2), 2.0)  # (B, H, W, F)
    features[0, :, :, 0] = torch.tensor([[1.0, -1.0], [0.5, -0.5]])
    assert net.pool(features)[0].tolist() == pytest.approx(by_hand)


@pytest.mark.parametrize(
    ("backbone", "pooling", "reason"),
    [
        *[("test_vit", each, rf"test_vit .*pooling=own instead of {re.escape(each)}") for each in POOLINGS],
        ("inception_next_atto", "gem", r"no feature map to pool \(Cannot disable pooling\): set backbone.pooling=own"),
        ("efficientvim_m1", "avg", r"no feature map to pool \(it returns several outputs\)"),
        ("deepseek_vit_412m_enc", "auto", r"gives no vector per image: set backbone.pooling=avg\+max"),
        ("deepseek_vit_412m_enc", "own", r"gives no vector per image: set backbone.pooling=avg\+max"),
    ],
)
def test_what_a_network_cannot_pool_is_one_line(backbone: str, pooling: str, reason: str) -> None:
    if not timm.is_model(backbone):
        pytest.skip(f"this timm has no {backbone}")
    one_line(make, backbone, pooling=pooling, image_size=224, match=reason)


# Image size


def test_transformers_are_built_for_the_image_size() -> None:
    # Patches of 16 pixels: one position each, and the class token's.
    for size, positions in ((96, 6 * 6 + 1), (160, 10 * 10 + 1)):
        net = make("test_vit", image_size=size)
        assert net.backbone.pos_embed.shape[1] in (positions, positions - 1)
        assert net(pixels(size=size)).shape == (3, 8)


def test_a_constructor_that_reads_values_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    make = timm.create_model

    def reads_values(*args, **kwargs) -> nn.Module:
        torch.ones(3).nonzero()  # torch has none for a tensor without memory
        return make(*args, **kwargs)

    monkeypatch.setattr(timm, "create_model", reads_values)
    assert EmbeddingNet("test_resnet", 8, pretrained=False)(torch.rand(2, 3, 64, 64) * 255).shape == (2, 8)


def test_an_image_size_that_a_backbone_refuses_is_said() -> None:
    one_line(make, "test_vit", image_size=5, match="test_vit does not accept 5 x 5 images")


# Batch norm


@pytest.mark.parametrize(
    ("batch_norm", "fixed", "affine"),
    [("frozen_statistics", True, True), ("frozen", True, False), ("train", False, True)],
)
def test_batch_norm(batch_norm: str, fixed: bool, affine: bool) -> None:
    net = make(batch_norm=batch_norm)
    assert norms(net)
    for _ in range(2):  # the trainer switches to eval and back around each validation
        net.eval()
        assert not any(module.training for module in net.modules())
        net.train()
        assert net.training
        assert net.head.training
        assert all(module.training != fixed for module in norms(net))
        before = statistics(net)
        net(pixels())
        after = statistics(net)
        assert all(torch.equal(before[name], after[name]) for name in before) == fixed
    assert {parameter.requires_grad for module in norms(net) for parameter in module.parameters()} == {affine}
    others = [p for m in net.modules() if not isinstance(m, nn.BatchNorm2d) for p in m.parameters(recurse=False)]
    assert all(parameter.requires_grad for parameter in others)


# Arguments


def test_close_names_are_offered() -> None:
    one_line(make, "resnet5O", match=r"Close names: .*resnet50")


# Building it again


@pytest.mark.parametrize(
    "arguments",
    [
        {"backbone": "test_resnet", "dim": 5, "pooling": "gem", "batch_norm": "frozen"},
        {"backbone": "test_vit", "image_size": 96},
        {"backbone": "test_resnet", "drop_path": 0.2},
        {"backbone": "test_resnet", "search_with": "features+flip"},
    ],
    ids=["gem", "vit", "drop_path", "search_with"],
)
def test_from_config_round_trip(arguments: dict) -> None:
    net = make(**arguments).eval()
    again = EmbeddingNet.from_config(net.config).eval()
    assert (again.config, dropped(again)) == (net.config, dropped(net))
    for key in ("drop_path", "search_with"):  # as in a checkpoint that is older than the key
        assert (key in net.config) == (key in arguments)
    images = pixels(size=arguments.get("image_size", 64))
    assert not torch.equal(again(images), net(images))  # random weights until loaded
    again.load_state_dict(net.state_dict())
    assert torch.equal(again(images), net(images))
    assert [p.requires_grad for p in again.parameters()] == [p.requires_grad for p in net.parameters()]


# Stochastic depth


def slow_but(names: list[str]) -> list:
    """The same names as parameters; those outside FAST are slow."""
    return [pytest.param(each, marks=[pytest.mark.slow] * (each not in FAST)) for each in names]


NAMED = ["swin_tiny_patch4_window7_224", "nextvit_small"]  # of the larger ones, looked at without computing
DROPPING = (DropPath, nn.modules.dropout._DropoutNd)


@torch.no_grad()
@pytest.mark.parametrize("backbone", slow_but([*WITH_PATHS, *WITHOUT_PATHS, *LARGER]))
def test_nothing_is_random_in_training_unless_asked_for(backbone: str) -> None:
    net, images = make(backbone, batch_norm="train"), pixels(2)
    assert net.training
    assert torch.equal(net(images), net(images))


@pytest.mark.parametrize("backbone", slow_but([*WITH_PATHS, *NAMED]))
def test_drop_path_is_all_that_is_random_and_as_large_as_asked_for(backbone: str) -> None:
    with torch.device("meta"):
        plain, net = make(backbone, batch_norm="train"), make(backbone, batch_norm="train", drop_path=0.2)
    assert dropped(plain) == []
    assert {kind for kind, _ in dropped(net)} == {DropPath}
    assert 0.15 < max(rate for _, rate in dropped(net)) <= 0.2 + 1e-6


def dropped(net: EmbeddingNet) -> list[tuple[type, float]]:
    modules = [module for module in net.modules() if isinstance(module, DROPPING)]
    rates = [(type(each), getattr(each, "drop_prob" if isinstance(each, DropPath) else "p")) for each in modules]
    return [(kind, rate) for kind, rate in rates if rate]


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit"])
def test_drop_path_changes_training_only(backbone: str) -> None:
    torch.manual_seed(1)
    net, plain, images = make(backbone, drop_path=0.9), make(backbone), pixels(16)
    with torch.no_grad():
        for parameter in net.parameters():  # some blocks start at zero scale, where skipping them changes nothing
            parameter.add_(torch.randn_like(parameter) * 0.1)
        plain.load_state_dict(net.state_dict())  # the same tensors under the same names
        assert torch.equal(net.eval()(images), plain.eval()(images))
        net.train()
        plain.train()
        assert not torch.allclose(net(images), net(images))
        assert torch.equal(plain(images), plain(images))


@pytest.mark.parametrize("backbone", slow_but([*WITHOUT_PATHS, "vgg11"]))
def test_networks_without_paths_to_drop_are_named_in_one_line(backbone: str) -> None:
    one_line(make, backbone, drop_path=0.1, match=rf"^backbone\.drop_path=0\.1: {backbone} has no paths to drop")
    assert dropped(make(backbone, drop_path=0.0)) == []
