"""Export of a trained network, compared with the network."""

from __future__ import annotations

import copy
import json
import logging
import re
import warnings
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models._hub import save_config_for_hf
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.errors import UsageError, check_choice, reason_of
from proxy_anchor.inference.checkpoint import written_whole
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.models.hub import CARD_FILE, CONFIG_FILE, WEIGHTS_FILE, write_tensors
from proxy_anchor.utils import write_json

TOLERANCE = 1e-4  # largest difference of an entry of a unit vector
ONNX_FILE, PT2_FILE, HEAD_FILE = "model.onnx", "model.pt2", "head.safetensors"


def export(net: EmbeddingNet, format: str, folder: Path | str) -> float:
    """Write `folder` and return the largest difference between its embeddings and the network's.

    Every folder holds config.json, with what prepares an image, and the model card where the run has one.

    Args:
        net: is copied, so that its training may go on.
        format: "onnx": model.onnx, from uint8 pixels (B, 3, crop, crop) named "images" to unit vectors (B, D) named
            "embeddings", normalisation inside. "pt2": model.pt2, the same for `torch.export.load`. "safetensors": see
            `EmbeddingNet.save_pretrained`. "timm": the backbone for `timm.create_model("local-dir:FOLDER",
            pretrained=True)`, and the head in a file of its own.
        folder: new or empty folder.

    Raises:
        UsageError: when the folder holds something, a package is missing, or the difference exceeds TOLERANCE: then
            nothing is left behind.
    """
    check_choice("format", format, FORMATS)
    folder = Path(folder)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output={folder} already holds something: choose another folder, or remove it.")
    write, read = FORMATS[format]
    net = copy.deepcopy(net).cpu().eval()
    with written_whole(folder) as aside:
        write_json(aside / CONFIG_FILE, net.describe())
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporters' notices about their own future
            try:
                write(net, aside)
            except (UsageError, OSError):
                raise
            except Exception as error:  # torch raises any type; the first cause says why
                cause: BaseException = error
                while cause.__cause__ is not None:
                    cause = cause.__cause__
                raise UsageError(
                    f"format={format}: torch cannot convert {net.config['backbone']} ({reason_of(cause)[:300]}): use "
                    "format=safetensors or format=timm."
                ) from error
            difference = _difference(net, read(aside))
        if not difference <= TOLERANCE:  # NaN is not
            raise UsageError(
                f"format={format}: embeddings differ from the checkpoint's by {difference:.1e}, more than "
                f"{TOLERANCE:.0e}; nothing was written. Another version of the exporting package may do better."
            )
        if net.card and format != "safetensors":  # without its example, which opens a run or that format
            card = re.sub(r"```python\n.*?\n```\n\n", "", net.card, count=1, flags=re.DOTALL)
            (aside / CARD_FILE).write_text(card, encoding="utf-8")
    return difference


def _pixels(net: EmbeddingNet, batch: int) -> Tensor:
    """Random images (B, 3, crop, crop): coarse blocks with noise."""
    generator = torch.Generator().manual_seed(batch)
    crop = net.prepare.crop
    blocks = F.interpolate(torch.rand(batch, 3, 4, 4, generator=generator), (crop, crop), mode="bilinear")
    noise = torch.rand(batch, 3, crop, crop, generator=generator)
    return ((0.8 * blocks + 0.2 * noise) * 255).to(torch.uint8)


def _difference(net: EmbeddingNet, embed: Callable[[Tensor], Tensor]) -> float:
    batches = [_pixels(net, batch) for batch in (1, 3)]  # other sizes than the exported 2
    expected, found = (torch.cat([run(pixels) for pixels in batches]) for run in (net, embed))
    return (found - expected).abs().max().item()  # NaN, if there is one


def _traced(net: EmbeddingNet) -> torch.export.ExportedProgram:
    """The network as a graph for any batch size."""
    return torch.export.export(net, (_pixels(net, 2),), dynamic_shapes=({0: torch.export.Dim("batch", min=1)},))


def _write_pt2(net: EmbeddingNet, folder: Path) -> None:
    torch.export.save(_traced(net), folder / PT2_FILE)


def _read_pt2(folder: Path) -> Callable[[Tensor], Tensor]:
    return torch.export.load(folder / PT2_FILE).module()


def _write_onnx(net: EmbeddingNet, folder: Path) -> None:
    if missing := [each for each in ("onnx", "onnxscript", "onnxruntime") if find_spec(each) is None]:
        raise UsageError(f"format=onnx needs {', '.join(missing)}: pip install -e '.[export]'.")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    for module in net.modules():
        if hasattr(module, "fused_attn"):  # in plain products: ONNX has it for four dimensions only (Hiera has five)
            module.fused_attn = False  # type: ignore[assignment]
    traced = _traced(net)
    program = torch.onnx.export(traced, dynamo=True, input_names=["images"], output_names=["embeddings"], verbose=False)
    assert program is not None
    images = net.describe()["images"]
    program.model.metadata_props.update({key: str(value) for key, value in images.items() if value is not None})
    program.save(folder / ONNX_FILE)


def _read_onnx(folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(["embeddings"], {"images": pixels.numpy()})[0])


def _write_timm(net: EmbeddingNet, folder: Path) -> None:
    if net.pool.state_dict():
        raise UsageError(f"format=timm cannot hold pooling={net.config['pooling']}: use safetensors, onnx or pt2.")
    crop = net.prepare.crop
    config = net.describe()
    config["pretrained_cfg"] = {
        "input_size": (3, crop, crop),
        "interpolation": "bilinear",
        "crop_pct": crop / (net.prepare.resize + 0.001) if net.prepare.resize else 1.0,  # timm rounds the side down
        "crop_mode": "center" if net.prepare.resize else "squash",
        "mean": net.config["mean"],
        "std": net.config["std"],
    }
    write_tensors(folder / WEIGHTS_FILE, net.backbone)
    save_config_for_hf(net.backbone, str(folder / CONFIG_FILE), model_config=config)
    write_tensors(folder / HEAD_FILE, net.head)


def _read_timm(folder: Path) -> Callable[[Tensor], Tensor]:
    from safetensors.torch import load_file

    net = EmbeddingNet.from_config(json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))["model"]).eval()
    net.head.load_state_dict(load_file(folder / HEAD_FILE))
    arguments: dict[str, Any] = {"global_pool": ""} if not isinstance(net.pool, nn.Identity) else {}
    net.backbone = timm.create_model(f"local-dir:{folder}", pretrained=True, **arguments).eval()
    return net


FORMATS: dict[str, tuple[Callable[[EmbeddingNet, Path], Any], Callable[[Path], Callable[[Tensor], Tensor]]]] = {
    "onnx": (_write_onnx, _read_onnx),
    "pt2": (_write_pt2, _read_pt2),
    "safetensors": (EmbeddingNet.save_pretrained, EmbeddingNet.from_pretrained),
    "timm": (_write_timm, _read_timm),
}
