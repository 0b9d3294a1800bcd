"""Whether Triton kernels can run here: asked once, by everything that has one and does without it elsewhere."""

from __future__ import annotations

from functools import cache
from subprocess import CalledProcessError


@cache
def have_triton() -> bool:
    """Whether there is Triton (its wheels exist for Linux only) and what it builds its link to the card with."""
    try:
        from triton.runtime import driver

        driver.active.get_current_target()  # builds the link, for which it needs a C compiler
    except (ImportError, RuntimeError, OSError, CalledProcessError):
        return False
    return True
