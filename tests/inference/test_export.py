"""Every exported form gives the checkpoint's embeddings, read by other programs' means."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import REPOSITORY, one_line
from PIL import Image
from processes import run_python
from torch import nn
from torch.nn import functional as F

from proxy_anchor import EmbeddingNet, Retriever
from proxy_anchor.inference import export as module
from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.inference.export import FORMATS, export


def require(format: str) -> None:
    if format == "onnx":
        for package in ("onnx", "onnxscript", "onnxruntime"):
            pytest.importorskip(package, reason=f"{package} is not installed")


@pytest.mark.parametrize("format", FORMATS)
def test_parity_is_checked_and_returned(make_checkpoint: Callable, tmp_path: Path, format: str) -> None:
    require(format)
    checkpoint = make_checkpoint("run/best.ckpt", search_with="features+flip")
    block = '```python\nretriever = Retriever.from_pretrained("THIS_FOLDER")\n```\n\n'
    (tmp_path / "run" / "README.md").write_text(f"first\n\n{block}last\n")
    assert 0 <= export(load_trained(checkpoint), format, tmp_path / "out") <= 1e-5
    shown = block if format == "safetensors" else ""  # no call that refuses the folder
    assert (tmp_path / "out" / "README.md").read_text() == f"first\n\n{shown}last\n"
    assert len({path.stat().st_mode for path in (tmp_path / "out").iterdir()}) == 1  # all may read all of it, or none
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["images"] == {"crop": 32, "resize": 36, "interpolation": "bilinear"}
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def small(backbone: type[nn.Module]) -> EmbeddingNet:
    """A network whose backbone is replaced by a module, (B, 3, 32, 32) to (B, 512)."""
    torch.manual_seed(0)
    net = EmbeddingNet("test_resnet", 8, image_size=32, pretrained=False).eval()
    net.backbone, net.pool = backbone().eval(), nn.Identity()
    net.head = nn.Linear(16, 8)
    return net


class Folded(nn.Module):
    """Attention in five dimensions, as in Hiera and NesT."""

    fused_attn = True

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        parts = images[:, :1].unflatten(2, (2, 16)).unflatten(4, (2, 16))  # (B, 1, 2, 16, 2, 16)
        x = parts.transpose(3, 4).flatten(2, 3)  # (B, 1, 4, 16, 16)
        if self.fused_attn:
            return F.scaled_dot_product_attention(x, x, x).mean((1, 2, 3))
        return ((x @ x.transpose(-2, -1) / 4).softmax(-1) @ x).mean((1, 2, 3))


class Unknown(nn.Module):
    """An operation that ONNX does not have."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return torch.linalg.eigvalsh(images[:, 0, :16, :16])


def test_onnx_of_attention_in_five_dimensions(tmp_path: Path) -> None:
    require("onnx")
    trained = small(Folded)
    assert export(trained, "onnx", tmp_path / "out") <= 1e-5
    assert trained.backbone.fused_attn  # the network itself is left as it was


def test_what_onnx_cannot_express_is_one_line(tmp_path: Path) -> None:
    require("onnx")
    said = r"cannot convert test_resnet \(.*: use format=safe"
    one_line(export, small(Unknown), "onnx", tmp_path / "out", match=said)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("format", ["safetensors", "timm"])
def test_tensors_that_share_memory_are_written(tmp_path: Path, format: str) -> None:
    torch.manual_seed(0)
    net = EmbeddingNet("coat_lite_tiny", 8, image_size=32, pretrained=False).eval()  # one position encoding per stage
    pointers = [each.data_ptr() for each in net.state_dict().values() if each.numel()]
    assert len(set(pointers)) < len(pointers)
    assert export(net, format, tmp_path / "out") == 0


@pytest.mark.parametrize("format", ["safetensors", "timm"])
def test_an_export_that_differs_is_refused_and_leaves_nothing(
    make_checkpoint: Callable, tmp_path: Path, monkeypatch, format: str
) -> None:
    trained = load_trained(make_checkpoint())
    other = load_trained(make_checkpoint("other.ckpt", seed=1))
    write, read = FORMATS[format]
    monkeypatch.setitem(module.FORMATS, format, (lambda _, folder: write(other, folder), read))
    one_line(export, trained, format, tmp_path / "out", match="differ from the checkpoint's by")
    assert {path.name for path in tmp_path.iterdir()} == {"best.ckpt", "other.ckpt"}


def test_pt2_takes_any_batch_without_this_package(make_checkpoint: Callable, tmp_path: Path) -> None:
    trained = load_trained(make_checkpoint())
    export(trained, "pt2", tmp_path / "out")
    pixels = torch.randint(0, 256, (7, 3, 32, 32), dtype=torch.uint8)
    torch.save(pixels, tmp_path / "pixels.pt")
    code = """
import sys, torch
sys.modules["proxy_anchor"] = sys.modules["timm"] = None
net = torch.export.load("out/model.pt2").module()
torch.save([net(each) for each in torch.load("pixels.pt").split([1, 2, 4])], "found.pt")
"""
    run_python(code, cwd=tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(torch.load(tmp_path / "found.pt")), trained(pixels))


def test_the_example_needs_no_torch_and_gives_the_same_similarities(
    make_checkpoint: Callable, tmp_path: Path, write_images: Callable
) -> None:
    require("onnx")
    write_images({"cat": 2, "dog": 2}, size=50)
    for number, size in enumerate([(40, 33), (33, 61), (97, 36), (31, 30)]):  # odd shapes: every rounding of a crop
        noise = np.random.default_rng(number).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(noise).save(tmp_path / "images" / f"{number}.png")
    checkpoint, query = make_checkpoint(), tmp_path / "images" / "1.png"
    export(load_trained(checkpoint), "onnx", tmp_path / "out")
    example = REPOSITORY / "examples" / "onnx_search.py"
    code = "import sys, runpy; sys.modules['torch'] = None; runpy.run_path(sys.argv.pop(1), run_name='__main__')"
    shown = run_python(code, example, tmp_path / "out", tmp_path / "images", query)
    printed = [line.split(maxsplit=1) for line in shown.splitlines()]
    hits = Retriever.from_pretrained(checkpoint).index(tmp_path / "images", progress=False).search(query, k=5)[0]
    assert [path for _, path in printed] == [hit.name for hit in hits]
    assert [float(value) for value, _ in printed] == pytest.approx([hit.similarity for hit in hits], abs=6e-4)


@pytest.mark.parametrize(("crop", "resize", "mode"), [(32, 36, "center"), (24, 59, "center"), (32, None, "squash")])
def test_timm_folder_is_a_timm_model(
    make_checkpoint: Callable, tmp_path: Path, crop: int, resize: int | None, mode: str
) -> None:
    import timm

    export(load_trained(make_checkpoint(crop=crop, resize=resize)), "timm", tmp_path / "out")
    backbone = timm.create_model(f"local-dir:{tmp_path / 'out'}", pretrained=True).eval()
    settings = timm.data.resolve_model_data_config(backbone)
    assert list(settings["input_size"]) == [3, crop, crop]
    assert (settings["crop_mode"], settings["interpolation"]) == (mode, "bilinear")
    first, cropped = timm.data.create_transform(**settings).transforms[:2]
    assert first.size in (resize, (crop, crop))
    assert resize is None or tuple(cropped.size) == (crop, crop)


def test_bad_requests_are_one_line(make_checkpoint: Callable, tmp_path: Path, monkeypatch) -> None:
    trained = load_trained(make_checkpoint())
    one_line(export, trained, "tflite", tmp_path / "out", match="format=tflite is not known")
    one_line(export, trained, "safetensors", tmp_path, match="already holds something")
    gem = EmbeddingNet("test_resnet", 16, pretrained=False, pooling="gem", image_size=32)
    one_line(export, gem, "timm", tmp_path / "out", match="format=timm cannot hold pooling=gem: use")
    monkeypatch.setattr(module, "find_spec", lambda name: None if name == "onnxscript" else name)
    one_line(export, trained, "onnx", tmp_path / "out", match=r"needs onnxscript: pip install -e '.\[export\]'")
