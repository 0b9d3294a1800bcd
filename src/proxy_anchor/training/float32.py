"""What float32 means on an NVIDIA GPU: TF32 convolutions, as torch has it, or float32 everywhere."""

from __future__ import annotations

import torch

from proxy_anchor.errors import check_choice

FLOAT32_PRECISIONS = ("tf32", "ieee")


def set_float32_precision(name: str) -> None:
    """Set how float32 convolutions and matrix products are computed, for this process.

    name: "tf32", torch's default: convolutions and recurrent layers (cuDNN) in TF32, which keeps 10 bits of the mantissa
    of their inputs, matrix products in float32; or "ieee": both in float32. Nothing changes on a CPU or under autocast.
    Raises UsageError for another name.
    """
    check_choice("float32_precision", name, FLOAT32_PRECISIONS)
    # Not the newer fp32_precision: after it, reading allow_tf32, as torch's compiler does, raises. These set both.
    torch.backends.cudnn.allow_tf32 = name == "tf32"
    torch.set_float32_matmul_precision("highest")
