"""Reading a trained network from each form, and its fingerprint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from commands import one_line

from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.inference.export import export


def test_fingerprint_is_of_weights_and_preprocessing_not_of_the_file(make_checkpoint: Callable, tmp_path: Path) -> None:
    trained = load_trained(make_checkpoint("run/best.ckpt"))
    same = [load_trained(make_checkpoint("other/last.ckpt")), load_trained(tmp_path / "run")]
    export(trained, "safetensors", tmp_path / "exported")
    same.append(load_trained(tmp_path / "exported"))
    assert {each.fingerprint() for each in same} == {trained.fingerprint()}
    others = [{"seed": 1}, {"resize": 40}, {"resize": None}, {"crop": 24}, {"eval_crop": 36}, {"embedding_dim": 8}]
    found = {load_trained(make_checkpoint("x.ckpt", **other)).fingerprint() for other in others}
    assert len(found | {trained.fingerprint()}) == 7


def test_what_it_was_trained_on_travels_along(make_checkpoint: Callable) -> None:
    trained = load_trained(make_checkpoint())
    assert trained.about == {"dataset": "folder", "epoch": 3, "classes": ["a", "b"]}
    assert trained.describe()["images"] == {"crop": 32, "resize": 36, "interpolation": "bilinear"}


def test_a_folder_of_something_else_is_one_line(tmp_path: Path) -> None:
    one_line(load_trained, tmp_path, match=r"is a folder without best.ckpt")


def test_a_checkpoint_that_does_not_know_its_images_is_refused(make_checkpoint: Callable) -> None:
    file = make_checkpoint()
    content = torch.load(file, weights_only=True)
    content["proxy_anchor"]["config"] = {}
    torch.save(content, file)
    one_line(load_trained, file, match="does not say how its images were prepared")
