"""Where Triton, or what it builds with, is missing, images are cropped without the kernel."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from unittest.mock import Mock

import pytest

from proxy_anchor import utils

pytest.importorskip("triton")


def test_triton_is_used_where_it_can_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import driver

    link = Mock(side_effect=[None, RuntimeError("no C compiler"), subprocess.CalledProcessError(1, "cc")])
    monkeypatch.setattr(driver, "_active", SimpleNamespace(get_current_target=link))
    assert [utils.have_triton.__wrapped__() for _ in range(3)] == [True, False, False]
    monkeypatch.setitem(sys.modules, "triton.runtime", None)
    assert not utils.have_triton.__wrapped__()
