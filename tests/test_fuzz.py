"""Whatever comes in: a usable answer or a UsageError of one line, and numbers equal to the plain computation.

`make fuzz` runs each with FUZZ_EXAMPLES cases, 10,000 unless told otherwise.
"""

from __future__ import annotations

import io
import math
import os
import tempfile
from pathlib import Path

import numpy as np
import pytest
import torch
from cli import compose_train
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import entry
from proxy_anchor.data.folder import load_folder
from proxy_anchor.data.inputs import open_input
from proxy_anchor.data.lists import as_int, read_columns
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss
from proxy_anchor.retrieval.metrics import recall_at_k

bounded = settings(
    max_examples=int(os.environ.get("FUZZ_EXAMPLES", "100")),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


def assert_one_line(error: UsageError) -> None:
    assert len(str(error).splitlines()) == 1


@bounded
@given(st.one_of(st.binary(max_size=200), st.text(max_size=200).map(lambda text: text.encode("utf-8", "replace"))))
def test_list_files(content):
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "list.txt")
        file.write_bytes(content)
        try:
            rows = read_columns(file, 2)
        except UsageError as error:
            assert_one_line(error)
            return
    assert all(len(values) == 2 for _, values in rows)
    for place, values in rows:
        try:
            assert as_int(values[1], place) > 0
        except UsageError as error:
            assert_one_line(error)


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


def _encoded(kind: str) -> bytes:
    stream = io.BytesIO()
    Image.new("RGB", (9, 7), (200, 30, 60)).save(stream, kind)
    return stream.getvalue()


_FILES = [_encoded(kind) for kind in ("PNG", "JPEG", "GIF", "BMP", "WEBP", "TIFF")]


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


@bounded
@given(st.integers(0, 2**32 - 1), st.integers(2, 12), st.integers(1, 4), st.integers(1, 5))
def test_recall_against_a_plain_count(seed, count, classes, k):
    random = np.random.default_rng(seed)
    labels = random.integers(0, classes, count)
    vectors = torch.from_numpy(random.normal(size=(count, 3)))
    vectors = torch.nn.functional.normalize(vectors).float()
    k = min(k, count - 1)
    hits = 0
    similarity = vectors.double() @ vectors.double().T
    for query in range(count):
        others = sorted((i for i in range(count) if i != query), key=lambda i: (-float(similarity[query, i]), i))
        hits += any(labels[i] == labels[query] for i in others[:k])
    found = recall_at_k(vectors, torch.from_numpy(labels), k=[k], engine="torch")
    assert found[k] == pytest.approx(hits / count)


@bounded
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 6),
    st.integers(1, 5),
    st.floats(0.1, 64),
    st.floats(0, 0.5),
)
def test_loss_against_loops(seed, batch, classes, alpha, delta):
    random = np.random.default_rng(seed)
    embeddings = torch.from_numpy(random.normal(size=(batch, 4)))
    labels = torch.from_numpy(random.integers(0, classes, batch))
    loss = ProxyAnchorLoss(num_classes=classes, embedding_dim=4, alpha=alpha, delta=delta).double()
    with torch.no_grad():
        loss.proxies.copy_(torch.from_numpy(random.normal(size=(classes, 4))))
    proxies = loss.proxies.detach()
    positive, negative = 0.0, 0.0
    for c in range(classes):
        inside, outside = 0.0, 0.0
        for x, label in zip(embeddings, labels.tolist(), strict=True):
            s = float(x @ proxies[c] / (x.norm() * proxies[c].norm()))
            if label == c:
                inside += math.exp(-alpha * (s - delta))
            else:
                outside += math.exp(alpha * (s + delta))
        positive += math.log1p(inside)
        negative += math.log1p(outside)
    expected = positive / len(set(labels.tolist())) + negative / classes
    assert float(loss(embeddings, labels)) == pytest.approx(expected, rel=1e-5, abs=1e-6)


_ANY = st.text("abcdefghijklmnop.=+~[]{},:'\"$ 0123456789-_", min_size=1, max_size=40)
_KEYS = st.sampled_from(
    ["seed", "loss", "loss.alpha", "backbone", "optimizer", "optimizer.lr", "data.crop", "run", "~seed"]
)


@bounded
@given(st.one_of(_ANY, st.builds("{}={}".format, _KEYS, _ANY)))
def test_config_overrides(override):
    caught = None
    try:
        compose_train(override)
    except Exception as error:
        caught = error
    if caught is not None:
        # What `entry.run` shows as one line, or the one ValueError that it translates; nothing else may come out.
        assert isinstance(caught, entry.USER_ERRORS) or "Config group override must be" in str(caught)
        assert len(entry.one_line(caught).splitlines()) == 1
