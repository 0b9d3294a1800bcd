"""What float32 means on an NVIDIA GPU: TF32 convolutions, as torch has it, or float32 everywhere."""

from __future__ import annotations

import torch

from proxy_anchor.errors import check_choice


def set_float32_precision(name: str) -> None:
    """Set how this process computes float32 convolutions and matrix products.

    name: "tf32" (torch's default): cuDNN's convolutions and recurrent layers round their inputs to 10 bits of mantissa,
    matrix products are float32. "ieee": both are float32. No effect on a CPU or under autocast.
    Raises UsageError for another name.
    """
    check_choice("float32_precision", name, ["tf32", "ieee"])
    # Not fp32_precision: after that, reading allow_tf32 raises, which torch's compiler does. These set both.
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("highest")
