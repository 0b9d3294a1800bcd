"""The convolutions that are rehearsed are those that training runs, and rehearsing leaves nothing behind."""

from __future__ import annotations

import threading
import time
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training import rehearsal
from proxy_anchor.training.rehearsal import (
    find_convolutions,
    rehearse_evaluation,
    rehearse_gradients,
    run_gradients,
)

CPU = torch.device("cpu")


class Seen(TorchDispatchMode):
    """The convolutions, forward and backward, that run while it is entered: what cuDNN would choose a kernel for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: set[tuple] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        if func in (torch.ops.aten.convolution.default, torch.ops.aten.convolution_backward.default):
            tensors = tuple(
                (tuple(each.shape), each.dtype, each.is_contiguous(memory_format=torch.channels_last))
                for each in args[: 2 + (func is torch.ops.aten.convolution_backward.default)]
            )
            plain = tuple(tuple(each) for each in args if isinstance(each, list) and each and each != [0])
            self.found.add((str(func), tensors, plain[-1][:2] if "backward" in str(func) else ()))
        return func(*args, **(kwargs or {}))


def test_what_is_rehearsed_is_what_training_runs() -> None:
    shape = (4, 3, 32, 32)
    net = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32).to(memory_format=torch.channels_last)
    with torch.device("meta"):
        bare = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32)
    images = torch.randint(0, 256, shape, dtype=torch.uint8).contiguous(memory_format=torch.channels_last)
    before = {name: value.clone() for name, value in net.state_dict().items()}
    state = torch.get_rng_state()
    calls = find_convolutions(net, shape)
    assert calls == find_convolutions(bare, shape)
    with Seen() as rehearsed:
        for call in calls:
            run_gradients(call, CPU, torch.bfloat16)
        assert all("backward" in found[0] for found in rehearsed.found)  # in that thread nobody needs the others
        rehearse_evaluation(bare, shape, CPU, "bf16-mixed")
    assert not bare.training  # else it could draw random numbers
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items())
    assert all(parameter.grad is None for parameter in net.parameters())
    assert torch.equal(torch.get_rng_state(), state)
    with Seen() as trained, torch.autocast("cpu", torch.bfloat16):
        net.train()(images).sum().backward()
    assert len(calls) > 5
    assert rehearsed.found == trained.found
    with Seen() as evaluated, torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        net.eval()(images)
    assert evaluated.found <= rehearsed.found


def test_an_evaluation_is_rehearsed_in_the_precision_of_the_run() -> None:
    with torch.device("meta"):
        net = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32)
    with Seen() as seen:
        rehearse_evaluation(net, (2, 3, 32, 32), CPU, "32-true")
    assert {each[1] for found in seen.found for each in found[1]} == {torch.float32}


def test_indices_that_a_network_holds_are_in_range(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a card one that is not ends the process: every call after it fails."""
    with torch.device("meta"):
        net = EmbeddingNet("levit_128s", 8, pretrained=False)
    to_empty = net.to_empty

    def to_used_memory(*, device: torch.device) -> nn.Module:
        to_empty(device=device)
        for buffer in net.buffers():
            buffer.fill_(77)  # of 16 places in its last stage
        return net

    monkeypatch.setattr(net, "to_empty", to_used_memory)
    rehearse_evaluation(net, (1, 3, 224, 224), CPU, "bf16-mixed")
    assert any("attention_bias_idxs" in name for name, _ in net.named_buffers())


def test_it_happens_once_in_a_process_and_says_nothing_when_it_fails(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    net = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32)
    monkeypatch.setattr(rehearsal, "_DONE", set())
    monkeypatch.setattr(rehearsal, "_LAST", {})
    assert rehearse_gradients(net, (4, 3, 32, 32), CPU, "32") is None
    started = []
    monkeypatch.setattr(torch.cuda, "device", lambda device: started.append(device) or (_ for _ in ()).throw(OSError))
    card = torch.device("cuda", 0)
    first = rehearse_gradients(net, (4, 3, 32, 32), card, "bf16-mixed")
    assert first is not None
    first.join(20)
    assert not first.is_alive()
    assert started == [card]
    assert rehearse_gradients(net, (4, 3, 32, 32), card, "bf16-mixed") is first
    assert len(started) == 1
    other = rehearse_gradients(net, (5, 3, 32, 32), card, "bf16-mixed")
    assert other is not None
    other.join(20)
    assert capfd.readouterr().err == ""


def test_a_second_run_waits_for_what_the_first_left_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    net = EmbeddingNet("test_efficientnet", 8, pretrained=False, image_size=32)
    monkeypatch.setattr(rehearsal, "_DONE", set())
    monkeypatch.setattr(rehearsal, "_LAST", {})
    may_go_on, runs = threading.Event(), []

    def run(call: tuple, device: torch.device, dtype: torch.dtype) -> None:
        may_go_on.wait(20)
        time.sleep(0.002)  # others could come between
        runs.append((call[0][0], device, dtype))

    monkeypatch.setattr(rehearsal, "run_gradients", run)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    card = torch.device("cuda", 0)
    first = rehearse_gradients(net, (4, 3, 32, 32), card, "32")
    assert rehearse_gradients(net, (4, 3, 32, 32), card, "32") is first  # of a run that failed at once
    other = rehearse_gradients(net, (5, 3, 32, 32), card, "16-mixed")
    assert other is not first
    assert first.is_alive()
    may_go_on.set()
    other.join(20)
    assert not first.is_alive()
    kinds = [(4, card, torch.float32), (5, card, torch.float16)]
    assert runs == sorted(runs, key=kinds.index)
    assert len(runs) == 2 * len(find_convolutions(net, (4, 3, 32, 32)))
