"""Too little memory and operations that are not repeatable: one line with the keys to set."""

from __future__ import annotations

import gc
import os
import signal
import weakref

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, one_line

from proxy_anchor.cli.messages import explained
from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from train import train

RUN = [*TINY_GLYPHS, "trainer.max_epochs=3", "data.eval_batch_size=24", "run=x"]


@pytest.mark.parametrize("training", [True, False])
def test_out_of_memory_names_the_keys_and_the_run_goes_on_from_its_checkpoint(training, glyphs, tmp_path, monkeypatch):
    forward, calls = EmbeddingNet.forward, []

    def fail(net, images):
        calls.extend([1] if torch.is_grad_enabled() == training else [])
        if len(calls) > 6:  # in the second epoch
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return forward(net, images)

    monkeypatch.setattr(EmbeddingNet, "forward", fail)
    cfg = compose_train(*RUN, glyphs)
    one_line(train, cfg, tmp_path / "run", match=r"^out of memory with data\.batch_size=16: set a smaller one")
    monkeypatch.setattr(EmbeddingNet, "forward", forward)
    smaller = [] if training else ["data.eval_batch_size=8"]  # changes no weight, so the run may go on with it
    again = train(compose_train(*RUN, glyphs, *smaller), tmp_path / "run")
    assert [row["epoch"] for row in again["history"]] == [0, 1, 2, 3]


def test_the_tensors_of_the_step_are_given_back():
    kept = []

    def step() -> None:
        activations = torch.zeros(10)
        kept.append(weakref.ref(activations))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    with pytest.raises(UsageError), explained(compose_train()):
        step()
    gc.collect()
    assert kept[0]() is None


def test_an_operation_that_is_not_repeatable_is_named():
    text = r"^deterministic=true: adaptive_max_pool2d_backward_cuda has no repeatable form"
    with pytest.raises(UsageError, match=text), explained(compose_train()):
        raise RuntimeError(
            "traced:\nadaptive_max_pool2d_backward_cuda does not have a deterministic implementation, but"
        )
    with pytest.raises(RuntimeError, match=r"^other"), explained(compose_train()):
        raise RuntimeError("other")


class Killed(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, index: int) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


def test_ctrl_c_that_ends_the_workers_too_is_no_failure_of_theirs():
    def interrupted() -> None:
        try:
            raise KeyboardInterrupt
        finally:
            list(torch.utils.data.DataLoader(Killed(), num_workers=1))

    with pytest.raises(KeyboardInterrupt), explained(compose_train()):
        interrupted()


def find_no_compiler() -> None:
    with torch._inductor.config.patch("cpp.cxx", (None, "no-such-compiler")):
        torch.compile(lambda x: x + 1)(torch.ones(2))


KNOWN = {
    "one image": (lambda: torch.nn.BatchNorm2d(3)(torch.ones(1, 3, 1, 1)), "batch norm .*data.batch_size to 2 or more"),
    "compiler": (find_no_compiler, "compile=true needs a C.. compiler on a CPU, .*set compile=false"),
    "worker": (
        lambda: list(torch.utils.data.DataLoader(Killed(), num_workers=1)),
        "killed, .*smaller data.num_workers",
    ),
}


@pytest.mark.parametrize("name", KNOWN)
def test_a_failure_of_torch_that_users_meet_is_one_line_with_the_repair(name, tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    fail, text = KNOWN[name]
    with pytest.raises(UsageError, match=text) as caught, explained(compose_train()):
        fail()
    assert "\n" not in str(caught.value)
