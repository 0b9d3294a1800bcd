"""Where Triton, or what it builds with, is missing, images are cropped without the kernel."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from proxy_anchor import utils

pytest.importorskip("triton")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Triton as if it had its link to a GPU."""
    from triton.runtime import driver

    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=lambda: None))
    utils.have_triton.cache_clear()
    yield monkeypatch
    utils.have_triton.cache_clear()


def test_with_triton_and_a_compiler(link: pytest.MonkeyPatch) -> None:
    assert utils.have_triton()


def test_without_triton(link: pytest.MonkeyPatch) -> None:
    link.setitem(sys.modules, "triton.runtime", None)
    assert not utils.have_triton()


@pytest.mark.parametrize("error", [RuntimeError("no C compiler"), subprocess.CalledProcessError(1, "cc")], ids=str)
def test_without_a_compiler(link: pytest.MonkeyPatch, error: Exception) -> None:
    from triton.runtime import driver

    def fail() -> None:
        raise error

    link.setattr(driver.active, "get_current_target", fail)
    assert not utils.have_triton()
