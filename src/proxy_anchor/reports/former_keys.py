"""Keys of configs of earlier versions."""

from __future__ import annotations

import re
from typing import Any

from proxy_anchor.errors import UsageError

_SCHEDULES: dict[str, dict[str, Any]] = {
    "step": {"_target_": "torch.optim.lr_scheduler.StepLR"},
    "cosine": {"_target_": "torch.optim.lr_scheduler.CosineAnnealingLR", "T_max": None},
    "constant": {"_target_": "torch.optim.lr_scheduler.ConstantLR", "factor": 1.0},
}


def rename_former_keys(config: Any) -> str | None:
    """Rename keys of earlier versions in a config, plain or Hydra's.

    Returns a notice where `data.decode` was given. Raises UsageError where `data.decode` contradicts `data.crop_on`.
    """
    load = (config.get("dataset") or {}).get("load") or {}
    if isinstance(target := load.get("_target_"), str):
        load["_target_"] = re.sub(r"(?<=^proxy_anchor\.data\.)(?=(cub|cars|sop|inshop)\.)", "benchmarks.", target)
    optimizer = config.get("optimizer") or {}
    if "schedule" in optimizer:
        name, step, gamma, decay = (
            optimizer.pop(key, None) for key in ("schedule", "lr_step_epochs", "lr_gamma", "ema_decay")
        )
        optimizer["_target_"] = "torch.optim.AdamW"
        config["scheduler"] = _SCHEDULES[name] | ({"step_size": step, "gamma": gamma} if name == "step" else {})
        mean_of = {"_target_": "torch.optim.swa_utils.get_ema_multi_avg_fn", "decay": decay}
        ema = {"_target_": "pytorch_lightning.callbacks.WeightAveraging", "multi_avg_fn": mean_of}
        config["callbacks"] = (config.get("callbacks") or {}) | ({"ema": ema} if decay is not None else {})
    data = config.get("data") or {}
    former = data.pop("decode", None) if "decode" in data else None
    if former is None:
        return None
    if data.get("crop_on", "auto") not in ("auto", former):
        raise UsageError(
            f"data.decode={former} and data.crop_on={data['crop_on']}: decode is the former name; leave it out."
        )
    data["crop_on"] = former
    return (
        f"data.decode={former} is now data.crop_on={former}: it says where images are cropped; worker processes decode "
        "them."
    )
