"""A compiled network trains as the network itself does, and one that does not is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from proxy_anchor.errors import UsageError
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training import compile as module
from proxy_anchor.training.compile import CompiledNet, compare, compiler_options
from proxy_anchor.training.module import MetricLearner
from proxy_anchor.training.startup import Startup

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


GIVEN: dict = {}  # options of the last compilation


@pytest.fixture(autouse=True)
def _without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trace and differentiate as always, but run PyTorch's own kernels: a C++ compiler would take half a minute."""
    compile = torch.compile

    def traced(forward: Callable, *, options: dict, dynamic: bool) -> Callable:
        GIVEN.clear()
        GIVEN.update(options)
        return compile(forward, backend="aot_eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    torch._dynamo.reset()


def test_training_compiled_equals_training_plain(
    make_data: Callable, make_learner: Callable, make_trainer: Callable, capsys: pytest.CaptureFixture
) -> None:
    plain, startup = make_learner(warmup_epochs=1), Startup(0.0)
    make_trainer(max_epochs=3).fit(plain, make_data())
    compiled = make_learner(warmup_epochs=1)
    start = {name: value.clone() for name, value in compiled.net.state_dict().items()}
    compiled.compiled = CompiledNet(compiled.net)
    make_trainer(max_epochs=3, callbacks=[startup]).fit(compiled, make_data())
    assert "cosine with the plain network's 1.0000" in capsys.readouterr().out
    assert startup.seconds["compilation"] > 0
    for name, value in compiled.net.state_dict().items():
        torch.testing.assert_close(value, plain.net.state_dict()[name], atol=2e-4, rtol=1e-3, msg=name)
    moved = [name for name, _ in compiled.net.backbone.named_parameters() if "conv" in name]
    # A network that was compiled while it was frozen would never move again.
    assert all(
        not torch.equal(compiled.net.state_dict()[f"backbone.{name}"], start[f"backbone.{name}"]) for name in moved
    )


def test_drop_path_passes_the_check_and_only_it_changes_the_compilers_random_numbers(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    for drop_path in (0.5, 0.0):
        learner, trainer = make_learner(batch_norm="train"), make_trainer()
        learner.net = EmbeddingNet(
            "test_resnet", 8, pretrained=False, image_size=32, batch_norm="train", drop_path=drop_path
        )
        learner.compiled, trainer.datamodule = CompiledNet(learner.net), make_data()
        learner.train()
        assert {"fallback_random": drop_path > 0, **compiler_options()} == GIVEN
        assert module.check_compiled(trainer, learner) > 0.999


def test_the_check_leaves_statistics_and_random_numbers_alone(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    learner, data = make_learner(batch_norm="train"), make_data()
    learner.compiled = CompiledNet(learner.net)
    trainer = make_trainer()
    trainer.datamodule = data
    learner.train()
    before = {name: buffer.clone() for name, buffer in learner.net.named_buffers()}
    state = torch.get_rng_state()
    assert module.check_compiled(trainer, learner) > 0.999
    assert all(torch.equal(buffer, before[name]) for name, buffer in learner.net.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in learner.parameters())


def test_a_short_batch_is_not_compiled_again(make_learner: Callable) -> None:
    net = make_learner().net.eval()
    compiled, images = CompiledNet(net), torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        whole = compiled(images)
        torch._dynamo.config.error_on_recompile = True
        try:
            part = compiled(images[:2])
        finally:
            torch._dynamo.config.error_on_recompile = False
    assert part.shape == (2, 8)
    torch.testing.assert_close(part, whole[:2])
    torch.testing.assert_close(whole, net(images).detach())


def test_a_short_batch_is_filled_up_where_the_network_itself_evaluates_and_gives_the_same(
    make_learner: Callable,
) -> None:
    net, images = make_learner().net.eval(), torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    seen = []
    net.register_forward_hook(lambda module, given, out: seen.append(len(given[0])))
    compiled = CompiledNet(net, num_evaluated=1)
    with torch.no_grad():
        whole, part, last = compiled(images), compiled(images[:2]), compiled(images[4:])
        torch.testing.assert_close(whole, net(images))
    assert seen == [5, 5, 5, 5]
    torch.testing.assert_close(part, whole[:2], rtol=0, atol=0)
    torch.testing.assert_close(last, whole[4:], rtol=0, atol=0)


def test_only_options_that_this_torch_knows_are_given(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    assert {"triton.cudagraphs", "deterministic"} <= {*compiler_options()}
    assert compiler_options()["deterministic"]
    with config.patch(max_autotune=True):
        assert not compiler_options()["deterministic"]
    assert {*compiler_options(), "fallback_random"} <= {*config.get_config_copy()}
    older = SimpleNamespace(get_config_copy=lambda: {"triton.cudagraphs": False})
    monkeypatch.setattr(torch._inductor, "config", older)
    assert compiler_options() == {"triton.cudagraphs": torch.cuda.is_available()}


def test_only_a_run_that_trains_has_the_compiler_get_ready(
    make_data: Callable, make_learner: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    for place in ("proxy_anchor.training.compile.prepare_compiler", "proxy_anchor.training.startup.prepare_compiler"):
        monkeypatch.setattr(place, lambda: calls.append(1))
    learner = make_learner()
    make_trainer(callbacks=[Startup(0.0)]).validate(learner, make_data(), verbose=False)
    learner.compiled = CompiledNet(learner.net, num_evaluated=1)
    make_trainer().validate(learner, make_data(), verbose=False)  # as evaluate.py does
    assert calls == []
    make_trainer(callbacks=[Startup(0.0)]).validate(learner, make_data(), verbose=False)
    assert calls == [1]


def test_a_compiler_that_cannot_get_ready_early_is_left_alone(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    from torch._inductor.async_compile import AsyncCompile

    asked = []

    def fail() -> None:
        asked.append(1)
        raise RuntimeError("no processes here")

    monkeypatch.setattr(AsyncCompile, "use_process_pool", fail)
    for available in (False, True):
        monkeypatch.setattr(torch.cuda, "is_available", lambda available=available: available)
        module.prepare_compiler.__wrapped__()
        assert asked == [1] * available
    assert capfd.readouterr().err == ""


class Joined:
    """Stands for the rehearsal's thread, and notes when it was waited for."""

    def __init__(self, events: list[str]) -> None:
        self.events = events

    def join(self) -> None:
        self.events.append("joined")


def test_the_rehearsal_ends_before_kernels_are_recorded(
    make_data: Callable, make_learner: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[str] = []
    learner, gradient = make_learner(), module._gradient
    monkeypatch.setattr(module, "_gradient", lambda *given: events.append("gradient") or gradient(*given))
    # Few images: the network itself evaluates, beside the rehearsal.
    learner.compiled = CompiledNet(learner.net, num_evaluated=1)
    trainer = make_trainer(max_epochs=1, callbacks=[Startup(0.0, Joined(events))])
    trainer.validate(learner, make_data(), verbose=False)
    assert events == []
    learner.net.register_forward_hook(lambda net, given, out: events.append("plain") if net.training else None)
    trainer.fit(learner, make_data())
    # Compiling takes long, and comes before the wait.
    assert events[:5] == ["joined", "gradient", "plain", "joined", "gradient"]
    # Many: the evaluation is compiled.
    learner.compiled = CompiledNet(learner.net)
    events.clear()
    make_trainer(callbacks=[Startup(0.0, Joined(events))]).validate(learner, make_data(), verbose=False)
    assert events == ["joined"]


def test_few_images_are_evaluated_by_the_network_itself_and_many_compiled(make_learner: Callable) -> None:
    net, images = make_learner().net.eval(), torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    for num_evaluated, expected in ((module.MANY_IMAGES - 1, 0), (module.MANY_IMAGES, 1), (None, 1)):
        compiled, runs = CompiledNet(net, num_evaluated=num_evaluated), []
        compiled._forward = lambda images, runs=runs: runs.append(len(images)) or net(images)
        with torch.no_grad():
            torch.testing.assert_close(compiled(images), net(images))
        assert len(runs) == expected
        compiled(images)  # training is compiled in any case
        assert len(runs) == expected + 1


def test_a_learner_hands_on_how_many_images_will_be_evaluated(make_learner: Callable) -> None:
    net = make_learner().net
    for num_evaluated, plain in ((5, net), (module.MANY_IMAGES, None), (None, None)):
        learner = MetricLearner(net, torch.nn.Identity(), compile=True, num_evaluated=num_evaluated)
        assert learner.compiled._net is plain
    assert MetricLearner(net, torch.nn.Identity(), num_evaluated=5).compiled is None


@pytest.mark.parametrize("wrong", ["nan", "zero", "other", "one layer"])
def test_gradients_that_differ_are_refused(wrong: str) -> None:
    plain = torch.randn(1000)
    broken = {
        "nan": plain.clone().index_fill_(0, torch.tensor([3]), float("nan")),
        "zero": torch.zeros(1000),
        "other": torch.randn(1000),
        "one layer": plain * (torch.arange(1000) > 300),
    }[wrong]
    with pytest.raises(UsageError, match=r"^the compiled network's gradients differ .*compile=false"):
        compare(plain, broken)
    assert compare(plain, plain + 0.05 * torch.randn(1000)) > 0.99


def test_a_backbone_without_gradient_is_noticed(
    make_data: Callable, make_learner: Callable, make_trainer: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = make_learner()
    learner.compiled = CompiledNet(learner.net)
    forward = functools.partial(CompiledNet.__call__, learner.compiled)

    def cut(self: CompiledNet, images: torch.Tensor) -> torch.Tensor:
        for parameter in learner.net.backbone.parameters():
            parameter.requires_grad_(False)
        embeddings = forward(images)
        for parameter in learner.net.backbone.parameters():
            parameter.requires_grad_(True)
        return embeddings

    monkeypatch.setattr(CompiledNet, "__call__", cut)
    with pytest.raises(UsageError, match="gradients differ"):
        make_trainer(callbacks=[Startup(0.0)]).fit(learner, make_data())
