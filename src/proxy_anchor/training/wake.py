"""What takes seconds and can be done beside something else: a card's libraries, in which the driver works and Python's lock is
free, and Python's imports.
"""

from __future__ import annotations

import os
from collections.abc import Generator
from threading import Thread

import torch

from proxy_anchor.training.beside import run_beside


def card_of_this_process(accelerator: str, devices: object) -> torch.device | None:
    """The card that a run with these settings of its trainer will use; None where it is not clear that there is one and which."""
    local_rank = os.environ.get("LOCAL_RANK")
    # A list names cards of its own choice, and a process that is one of several has the one of its rank.
    known = devices == 1 or (isinstance(devices, int) and local_rank is not None)
    if not (known and accelerator in ("auto", "gpu", "cuda") and torch.cuda.is_available()):
        return None
    return torch.device("cuda", int(local_rank or 0))


def wake_card(device: torch.device) -> Thread:
    """Start the card in a thread, which nobody has to wait for: torch itself has whoever uses the card meanwhile wait.

    Says nothing of a card that does not answer: training will. Draws no random number.
    """

    def wake() -> Generator[None]:
        images = torch.zeros(8, 8, 16, 16, dtype=torch.bfloat16, device=device)
        yield
        weight = torch.zeros(8, 8, 3, 3, dtype=torch.bfloat16, device=device)
        torch.nn.functional.conv2d(images.contiguous(memory_format=torch.channels_last), weight, padding=1)
        torch.cuda.synchronize(device)
        yield

    return run_beside(wake())


def import_beside() -> Thread:
    """Import what training with a compiled network needs in a thread, for one that has the card do something meanwhile, and
    imports nothing itself until it has joined this. What cannot be imported is said where it is needed.
    """

    def load() -> Generator[None]:
        import pytorch_lightning  # noqa: F401

        yield
        torch.compile(torch.nn.Identity())  # compiles nothing yet
        yield

    return run_beside(load())
