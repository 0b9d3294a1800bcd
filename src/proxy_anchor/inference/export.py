"""Writing a trained network in forms that other programs read, each compared with the network before it is believed."""

from __future__ import annotations

import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.inference.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    EXPORT_FORMAT,
    WEIGHTS_FILE,
    TrainedNet,
    load_trained,
)
from proxy_anchor.models.embedding_net import EmbeddingNet

TOLERANCE = 1e-4  # largest difference of an entry of a unit vector
ONNX_FILE, TORCHSCRIPT_FILE, HEAD_FILE = "model.onnx", "model.pt", "head.safetensors"
_BATCHES = (1, 3)  # sizes that parity is checked with: neither is the one that was exported


def export(trained: TrainedNet, format: str, folder: Path | str) -> float:
    """Write `folder` and return the largest difference between its embeddings and the network's, at most TOLERANCE.

    format: one of FORMATS. onnx: model.onnx, uint8 pixels (B, 3, crop, crop) named "images" to unit vectors (B, D) named
    "embeddings", normalisation inside. torchscript: model.pt, the same. safetensors: model.safetensors, all tensors, for
    `Retriever.from_pretrained`. timm: the backbone for `timm.create_model("local-dir:FOLDER", pretrained=True)`, pooling
    and head beside it. All: config.json with what prepares an image, and the model card where the run has one.
    Raises UsageError when the folder holds something, a package is missing, or the difference is larger: then nothing is
    left behind.
    """
    check_choice("format", format, FORMATS)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output={folder} already holds something: choose another folder, or remove it.")
    folder.parent.mkdir(parents=True, exist_ok=True)
    aside = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        write, read = FORMATS[format]
        config = {"format": EXPORT_FORMAT, "library_name": "proxy_anchor", "fingerprint": trained.fingerprint}
        (aside / CONFIG_FILE).write_text(json.dumps(config | trained.describe(), indent=2) + "\n", encoding="utf-8")
        with _quiet(), torch.no_grad():
            write(trained, aside)
            difference = _difference(trained, read(aside))
        if not difference <= TOLERANCE:  # NaN is not
            raise UsageError(
                f"format={format}: embeddings differ from the checkpoint's by {difference:.1e}, more than {TOLERANCE:.0e}; "
                "nothing was written. Another version of the exporting package may do better."
            )
        card = trained.path.parent / CARD_FILE if trained.path.is_file() else trained.path / CARD_FILE
        if card.is_file():
            shutil.copyfile(card, aside / CARD_FILE)
        mode = (aside / CONFIG_FILE).stat().st_mode & 0o777
        for file in aside.iterdir():
            file.chmod(mode)  # safetensors writes for the owner alone
        aside.chmod(0o755)
        if folder.exists():
            folder.rmdir()
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)
    return difference


def _pixels(trained: TrainedNet, batch: int) -> Tensor:
    """Made-up images (B, 3, crop, crop): coarse blocks under noise, so that deep layers see something too."""
    generator = torch.Generator().manual_seed(batch)
    crop = trained.prepare.crop
    blocks = F.interpolate(torch.rand(batch, 3, 4, 4, generator=generator), (crop, crop), mode="bilinear")
    noise = torch.rand(batch, 3, crop, crop, generator=generator)
    return ((0.8 * blocks + 0.2 * noise) * 255).to(torch.uint8)


def _difference(trained: TrainedNet, embed: Callable[[Tensor], Tensor]) -> float:
    differences = []
    for batch in _BATCHES:
        pixels = _pixels(trained, batch)
        expected, found = trained.net(pixels), embed(pixels)
        if found.shape != expected.shape:
            raise UsageError(f"the exported network returns {tuple(found.shape)} instead of {tuple(expected.shape)}.")
        differences.append((found - expected).abs().max())
    return torch.stack(differences).max().item()  # NaN, if there is one


def _write_onnx(trained: TrainedNet, folder: Path) -> None:
    _require("onnx", "onnxscript", "onnxruntime")
    program = torch.onnx.export(
        trained.net,
        (_pixels(trained, 2),),
        dynamo=True,
        dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
        input_names=["images"],
        output_names=["embeddings"],
        verbose=False,
    )
    assert program is not None
    images = trained.describe()["images"]
    program.model.metadata_props.update({key: str(value) for key, value in images.items()})
    program.save(folder / ONNX_FILE)


def _read_onnx(folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(["embeddings"], {"images": pixels.numpy()})[0])


def _write_torchscript(trained: TrainedNet, folder: Path) -> None:
    traced: Any = torch.jit.trace(trained.net, _pixels(trained, 2))
    torch.jit.save(traced, folder / TORCHSCRIPT_FILE)


def _read_torchscript(folder: Path) -> Callable[[Tensor], Tensor]:
    loaded: Any = torch.jit.load(folder / TORCHSCRIPT_FILE)
    return loaded


def _write_safetensors(trained: TrainedNet, folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = {name: value.contiguous() for name, value in trained.net.state_dict().items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


def _read_safetensors(folder: Path) -> Callable[[Tensor], Tensor]:
    return load_trained(folder).net


def _write_timm(trained: TrainedNet, folder: Path) -> None:
    from safetensors.torch import save_file

    net = trained.net
    backbone: Any = net.backbone
    weights = {name: value.contiguous() for name, value in backbone.state_dict().items()}
    head = {name: value.contiguous() for name, value in net.head.state_dict().items()}
    save_file(weights, folder / WEIGHTS_FILE, metadata={"format": "pt"})
    save_file(head, folder / HEAD_FILE, metadata={"format": "pt"})
    crop, resize = trained.prepare.crop, trained.prepare.resize
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config |= {
        "architecture": net.config["backbone"].partition(".")[0],
        "num_classes": 0,
        "num_features": net.head.in_features,
        "pretrained_cfg": {
            "input_size": [3, crop, crop],
            "fixed_input_size": bool(backbone.pretrained_cfg.get("fixed_input_size")),
            "interpolation": "bilinear",
            "crop_pct": crop / resize,
            "crop_mode": "center",
            "mean": net.config["mean"],
            "std": net.config["std"],
            "num_classes": 0,
            "pool_size": None,
            "first_conv": backbone.pretrained_cfg.get("first_conv"),
            "classifier": backbone.pretrained_cfg.get("classifier"),
            "license": backbone.pretrained_cfg.get("license"),
        },
    }
    (folder / CONFIG_FILE).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _read_timm(folder: Path) -> Callable[[Tensor], Tensor]:
    from safetensors.torch import load_file

    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    net = EmbeddingNet.from_config(config["model"]).eval()
    net.head.load_state_dict(load_file(folder / HEAD_FILE))
    arguments: dict[str, Any] = {"global_pool": ""} if not isinstance(net.pool, nn.Identity) else {}
    net.backbone = timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()
    return net


FORMATS: dict[str, tuple[Callable[[TrainedNet, Path], None], Callable[[Path], Callable[[Tensor], Tensor]]]] = {
    "onnx": (_write_onnx, _read_onnx),
    "torchscript": (_write_torchscript, _read_torchscript),
    "safetensors": (_write_safetensors, _read_safetensors),
    "timm": (_write_timm, _read_timm),
}


def _require(*packages: str) -> None:
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        raise UsageError(f"format=onnx needs {', '.join(missing)}: pip install -e '.[export]'.")


@contextmanager
def _quiet() -> Any:
    """Without the exporters' notices about their own future."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(level)
