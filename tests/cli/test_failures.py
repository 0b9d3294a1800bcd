"""Memory that does not suffice and operations that are not repeatable: one line with the figures and the key to set."""

from __future__ import annotations

import gc
import re
import weakref
from types import SimpleNamespace

import pytest
import torch
from commands import TINY_GLYPHS, compose_train

from proxy_anchor.cli.failures import explained, largest_batch, memory_without_images
from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from train import train

GIB = 2**30
MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.00 GiB is free."
)
RUN = [
    *TINY_GLYPHS,
    "trainer.max_epochs=3",
    "trainer.accelerator=cpu",
    "trainer.enable_progress_bar=false",
    "logger=csv",
]
RUN += ["data.eval_batch_size=24", "run=x"]


def test_the_largest_batch_by_hand():
    # 2 GiB without images, 42 GiB with 80: half a GiB each, so (22 - 2) / 0.5.
    assert largest_batch(80, 2 * GIB, 42 * GIB, 22 * GIB) == 40
    assert largest_batch(80, 2 * GIB, 42 * GIB, 80 * GIB) == 79  # it did not fit, whatever the figures say
    assert largest_batch(80, 2 * GIB, 42 * GIB, 2 * GIB) == 0
    assert largest_batch(1, 2 * GIB, 1 * GIB, 2 * GIB) == 0


def test_what_a_step_takes_without_images():
    learner = torch.nn.Sequential(torch.nn.Linear(4, 2), torch.nn.BatchNorm1d(2))
    learner[0].weight.requires_grad_(False)
    trained, frozen, buffers = 2 + 2 + 2, 8, 2 + 2
    expected = 4 * (trained + frozen + buffers) + 8 + 3 * 4 * trained  # the counter is an int64
    assert memory_without_images(learner, SimpleNamespace(loading=None)) == expected
    kept = SimpleNamespace(loading={"cache": "gpu", "bytes": 1000})
    assert memory_without_images(learner, kept) == expected + 1000
    in_memory = SimpleNamespace(loading={"cache": "ram", "bytes": 1000})
    assert memory_without_images(learner, in_memory) == expected


@pytest.mark.parametrize(
    ("training", "where"),
    [(True, r"training with data\.batch_size=16"), (False, r"evaluation with data\.eval_batch_size=24")],
)
def test_out_of_memory_says_peak_batch_and_keys_and_the_run_goes_on_from_its_checkpoint(
    training, where, tmp_path, monkeypatch
):
    forward, calls = EmbeddingNet.forward, []

    def fail(net, images):
        calls.extend([1] if torch.is_grad_enabled() == training else [])
        if len(calls) > 6:  # in the second epoch
            raise torch.OutOfMemoryError(MESSAGE)
        return forward(net, images)

    monkeypatch.setattr(EmbeddingNet, "forward", fail)
    cfg = compose_train(*RUN, f"dataset.root={tmp_path}/data")
    with pytest.raises(UsageError) as caught:
        train(cfg, tmp_path / "run")
    found = re.fullmatch(
        rf"out of memory in {where}: the peak was (\S+) GiB of (\S+) GiB that this process can have\. "
        r"At most (\d+) images fit \(estimated .*\): "
        r"set data\.(eval_)?batch_size=(\d+) or less, or trainer\.precision=bf16-mixed\.",
        str(caught.value),
    )
    assert found
    assert 0 < float(found[1]) < float(found[2])
    assert found[3] == found[5]
    assert 0 < int(found[3]) < (16 if training else 24)
    monkeypatch.setattr(EmbeddingNet, "forward", forward)
    smaller = [] if training else ["data.eval_batch_size=8"]  # changes no weight, so the run may go on with it
    again = train(compose_train(*RUN, f"dataset.root={tmp_path}/data", *smaller), tmp_path / "run")
    assert [row["epoch"] for row in again["history"]] == [0, 1, 2, 3]


def test_the_tensors_of_the_step_are_given_back():
    kept = []

    def step() -> None:
        activations = torch.zeros(10)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError(MESSAGE)

    trainer = SimpleNamespace(strategy=SimpleNamespace(root_device=torch.device("cpu")), world_size=1)
    with pytest.raises(UsageError) as caught, explained(trainer, torch.nn.Linear(1, 1), SimpleNamespace(loading=None)):
        step()
    gc.collect()
    assert str(caught.value).startswith("out of memory while the images were decoded")
    assert kept[0]() is None


def test_an_operation_that_is_not_repeatable_is_named():
    with (
        pytest.raises(
            UsageError, match=r"^deterministic=true: adaptive_max_pool2d_backward_cuda has no repeatable form"
        ),
        explained(None, None, None),
    ):
        raise RuntimeError("adaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but you")
    with pytest.raises(RuntimeError, match=r"^other"), explained(None, None, None):
        raise RuntimeError("other")
