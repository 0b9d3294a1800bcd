"""Whatever comes in: a usable answer or a UsageError of one line, and numbers equal to the plain computation.

`make fuzz` runs each with FUZZ_EXAMPLES cases, 10,000 unless told otherwise.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest
from commands import compose_train
from hydra import compose, initialize_config_dir
from hydra.core.hydra_config import HydraConfig
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf, open_dict
from pandas import json_normalize
from pictures import encoded
from PIL import Image

from proxy_anchor.cli import checks, messages
from proxy_anchor.cli import main as entry
from proxy_anchor.data.folder import load_folder
from proxy_anchor.data.images import open_input
from proxy_anchor.errors import UsageError

bounded = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_one_line(error: UsageError) -> None:
    assert len(messages.one_line(error).splitlines()) == 1


@bounded
@given(
    st.one_of(
        st.binary(max_size=200),
        st.text("ab,\r\n\"';./\x00é ", max_size=120).map(lambda rows: f"path,label\n{rows}".encode()),
    )
)
def test_csv_files(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "images.csv")
        file.write_bytes(content)
        try:
            load_folder(folder, csv_file=file)
        except UsageError as error:
            assert_one_line(error)


_FILES = [
    encoded(Image.new("RGB", (9, 7), (200, 30, 60)), kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")
]


@bounded
@given(
    st.sampled_from(_FILES),
    st.lists(st.tuples(st.integers(0, 2000), st.integers(0, 255)), max_size=6),
    st.integers(0, 2000),
)
def test_image_bytes(content, changes, length):
    damaged = bytearray(content)
    for place, value in changes:
        damaged[place % len(damaged)] = value
    try:
        image = open_input(bytes(damaged[: length or None]), max_pixels=10**6)
    except UsageError as error:
        assert_one_line(error)
        return
    assert image.mode == "RGB"


_LEAVES = json_normalize(OmegaConf.to_container(compose_train()), sep=".").columns
_TEXT = st.text("abcdefghijklmnop.=+~[]{},:'\"$ 0123456789-_/é", min_size=1, max_size=40)
_VALUES = st.one_of(
    _TEXT,
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["null", "true", "[]", "{}", "[1,null]", "{a:1}", "''", "???", "${seed}", "${no}", "${oc.env:NOPE}", "~"]
    ),
)


@pytest.fixture(scope="module")
def composing():
    """Hydra as the command starts it."""
    entry.register_plugins()
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        yield
    HydraConfig.instance().cfg = None


@bounded
@given(
    st.one_of(
        _TEXT,
        st.builds(
            "{}{}={}".format,
            st.sampled_from(["", "", "", "+", "++", "~"]),
            st.sampled_from(sorted({*_LEAVES, *(each.rpartition(".")[0] for each in _LEAVES if "." in each)})),
            _VALUES,
        ),
    )
)
def test_config_overrides(composing, override):
    refused = None
    try:
        cfg = compose("train", [override], return_hydra_config=True)
    except Exception as error:
        refused = error
    else:
        HydraConfig.instance().set_config(cfg)
        with open_dict(cfg):
            del cfg["hydra"]
        try:
            checks.check_config(cfg)
        except messages.USER_ERRORS as error:
            refused = error
    assert refused is None or len(messages.one_line(refused).splitlines()) == 1
