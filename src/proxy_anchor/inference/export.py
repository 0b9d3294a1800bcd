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
from proxy_anchor.inference.checkpoint import (
    CARD_FILE,
    CONFIG_FILE,
    EXPORT_FORMAT,
    WEIGHTS_FILE,
    TrainedNet,
    load_trained,
    written_whole,
)
from proxy_anchor.models.embedding_net import EmbeddingNet

TOLERANCE = 1e-4  # largest difference of an entry of a unit vector
ONNX_FILE, HEAD_FILE = "model.onnx", "head.safetensors"
_BATCHES = (1, 3)  # sizes of the comparison: other ones than the exported 2


def export(trained: TrainedNet, format: str, folder: Path | str) -> float:
    """Write `folder` and return the largest difference between its embeddings and the network's.

    Every folder holds config.json, with what prepares an image, and the model card where the run has one.

    Args:
        trained: network and preprocessing.
        format: "onnx": model.onnx, from uint8 pixels (B, 3, crop, crop) named "images" to unit vectors (B, D) named
            "embeddings", normalisation inside. "safetensors": model.safetensors, all tensors, for
            `Retriever.from_pretrained`. "timm": the backbone for `timm.create_model("local-dir:FOLDER",
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
    config = {"format": EXPORT_FORMAT, "library_name": "proxy_anchor", "fingerprint": trained.fingerprint}
    with written_whole(folder) as aside:
        (aside / CONFIG_FILE).write_text(json.dumps(config | trained.describe(), indent=2) + "\n", encoding="utf-8")
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # the exporters' notices about their own future
            write(trained, aside)
            difference = _difference(trained, read(aside))
        if not difference <= TOLERANCE:  # NaN is not
            raise UsageError(
                f"format={format}: embeddings differ from the checkpoint's by {difference:.1e}, more than "
                f"{TOLERANCE:.0e}; nothing was written. Another version of the exporting package may do better."
            )
        card = trained.path.parent / CARD_FILE if trained.path.is_file() else trained.path / CARD_FILE
        if card.is_file():
            text = card.read_text(encoding="utf-8")
            if format != "safetensors":  # its example opens a run or that format
                text = re.sub(r"```python\n.*?\n```\n\n", "", text, count=1, flags=re.DOTALL)
            (aside / CARD_FILE).write_text(text, encoding="utf-8")
        mode = (aside / CONFIG_FILE).stat().st_mode & 0o777
        for file in aside.iterdir():
            file.chmod(mode)  # safetensors writes for the owner alone
    return difference


def _pixels(trained: TrainedNet, batch: int) -> Tensor:
    """Random images (B, 3, crop, crop): coarse blocks with noise."""
    generator = torch.Generator().manual_seed(batch)
    crop = trained.prepare.crop
    blocks = F.interpolate(torch.rand(batch, 3, 4, 4, generator=generator), (crop, crop), mode="bilinear")
    noise = torch.rand(batch, 3, crop, crop, generator=generator)
    return ((0.8 * blocks + 0.2 * noise) * 255).to(torch.uint8)


def _difference(trained: TrainedNet, embed: Callable[[Tensor], Tensor]) -> float:
    batches = [_pixels(trained, batch) for batch in _BATCHES]
    expected, found = (torch.cat([net(pixels) for pixels in batches]) for net in (trained.net, embed))
    return (found - expected).abs().max().item()  # NaN, if there is one


def _write_onnx(trained: TrainedNet, folder: Path) -> None:
    if missing := [each for each in ("onnx", "onnxscript", "onnxruntime") if find_spec(each) is None]:
        raise UsageError(f"format=onnx needs {', '.join(missing)}: pip install -e '.[export]'.")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    net = copy.deepcopy(trained.net)
    for module in net.modules():
        if hasattr(module, "fused_attn"):  # in plain products: ONNX has it for four dimensions only (Hiera has five)
            module.fused_attn = False  # type: ignore[assignment]
    try:
        program = torch.onnx.export(
            net,
            (_pixels(trained, 2),),
            dynamo=True,
            dynamic_shapes=({0: torch.export.Dim("batch", min=1)},),
            input_names=["images"],
            output_names=["embeddings"],
            verbose=False,
        )
    except Exception as error:  # of torch.export or of the conversion; the first cause says why
        cause: BaseException = error
        while cause.__cause__ is not None:
            cause = cause.__cause__
        raise UsageError(
            f"format=onnx: torch cannot convert {net.config['backbone']} ({reason_of(cause)[:300]}): use "
            "format=safetensors or format=timm."
        ) from error
    assert program is not None
    images = trained.describe()["images"]
    program.model.metadata_props.update({key: str(value) for key, value in images.items()})
    program.save(folder / ONNX_FILE)


def _read_onnx(folder: Path) -> Callable[[Tensor], Tensor]:
    import onnxruntime

    session = onnxruntime.InferenceSession(folder / ONNX_FILE, providers=["CPUExecutionProvider"])
    return lambda pixels: torch.from_numpy(session.run(["embeddings"], {"images": pixels.numpy()})[0])


def _save(module: nn.Module, file: Path) -> None:
    from safetensors.torch import save_file

    # Copies: safetensors refuses tensors that share memory (as in CoaT), and channels-last ones.
    tensors = {name: value.clone(memory_format=torch.contiguous_format) for name, value in module.state_dict().items()}
    save_file(tensors, file, metadata={"format": "pt"})


def _write_safetensors(trained: TrainedNet, folder: Path) -> None:
    _save(trained.net, folder / WEIGHTS_FILE)


def _read_safetensors(folder: Path) -> Callable[[Tensor], Tensor]:
    return load_trained(folder).net


def _write_timm(trained: TrainedNet, folder: Path) -> None:
    net, crop = trained.net, trained.prepare.crop
    config = json.loads((folder / CONFIG_FILE).read_text(encoding="utf-8"))
    config["pretrained_cfg"] = {
        "input_size": (3, crop, crop),
        "interpolation": "bilinear",
        "crop_pct": crop / trained.prepare.resize,
        "crop_mode": "center",
        "mean": net.config["mean"],
        "std": net.config["std"],
    }
    _save(net.backbone, folder / WEIGHTS_FILE)
    save_config_for_hf(net.backbone, str(folder / CONFIG_FILE), model_config=config)
    _save(net.head, folder / HEAD_FILE)


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
    "safetensors": (_write_safetensors, _read_safetensors),
    "timm": (_write_timm, _read_timm),
}
