"""A compiled network trains as the network itself does, and one that does not is refused."""

from __future__ import annotations

import functools
import itertools
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import pytorch_lightning as pl
import timm
import torch
from families import LARGER, WITH_PATHS, WITHOUT_PATHS
from torch._dynamo.utils import counters

from proxy_anchor.errors import AgreedError, UsageError
from proxy_anchor.losses.metrix import MetrixFeatures
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss
from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.training import compile as compile_module
from proxy_anchor.training import distributed
from proxy_anchor.training.callbacks import startup
from proxy_anchor.training.callbacks.startup import Startup, check_compiled
from proxy_anchor.training.compile import CompiledNet

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
GIVEN: dict = {}  # options of the last compilation


@pytest.fixture(autouse=True)
def _without_code_generation(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Trace and differentiate as always, but run PyTorch's own kernels: a C++ compiler would take half a minute."""
    compile = torch.compile

    def traced(forward: Callable, *, options: dict, dynamic: bool) -> Callable:
        GIVEN.clear()
        GIVEN.update(options)
        return compile(forward, backend="aot_eager", dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", traced)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))  # where checks are remembered
    torch._dynamo.reset()


def test_training_compiled_equals_training_plain(make_learner: Callable, fit: Callable, capsys) -> None:
    plain, startup = make_learner(warmup_epochs=1), Startup(0.0)
    fit(plain, max_epochs=3, limit_val_batches=1.0)
    compiled = make_learner(warmup_epochs=1, compile=True)
    start = {name: value.clone() for name, value in compiled.net.state_dict().items()}
    fit(compiled, max_epochs=3, callbacks=[startup], limit_val_batches=1.0)
    assert "cosine with the plain float32 network's is 1.0000" in capsys.readouterr().out
    assert startup.seconds["compilation"] > 0
    for name, value in compiled.state_dict().items():
        torch.testing.assert_close(value, plain.state_dict()[name], atol=2e-4, rtol=1e-3, msg=name)
    moved = [name for name, _ in compiled.net.backbone.named_parameters() if "conv" in name]
    # A network that was compiled while it was frozen would never move again.
    assert not any(torch.equal(compiled.net.backbone.state_dict()[name], start[f"backbone.{name}"]) for name in moved)


def assert_compiled_loss_is_the_plain_one(make_learner: Callable) -> None:
    learner, plain_calls = make_learner(compile=True), []
    assert [*learner.state_dict()] == [*make_learner().state_dict()]
    learner.forward = lambda images: images
    learner.loss.register_forward_hook(lambda *given: plain_calls.append(1))
    for count in (6, 6, 4):
        embeddings, labels, found = torch.randn(count, 8).requires_grad_(), torch.arange(count) % 3, []
        for compute in (lambda *given: learner.loss_terms(*given)["loss"], learner.loss):
            with torch.autocast("cpu", torch.bfloat16):
                loss = compute(embeddings, labels)
            found.append([loss.detach(), *torch.autograd.grad(loss, [embeddings, learner.loss.proxies])])
        for a, b in zip(*found, strict=True):
            assert a.dtype == torch.float32
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
    assert len(plain_calls) == 3


def test_the_compiled_loss_is_the_plain_one(make_learner: Callable) -> None:
    assert_compiled_loss_is_the_plain_one(make_learner)
    assert compile_module.compiler_options() | {"triton.cudagraphs": False} == GIVEN


has_compiler = shutil.which("g++") or shutil.which("clang++")
needs_compiler = pytest.mark.skipif(not has_compiler, reason="torch.compile needs a C++ compiler on a CPU")


@pytest.mark.slow
@needs_compiler
def test_the_loss_that_the_compiler_generates_is_the_plain_one(
    make_learner: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    assert_compiled_loss_is_the_plain_one(make_learner)


@pytest.mark.parametrize("drop_path", [0.5, 0.0])
def test_the_check_passes_and_leaves_statistics_and_random_numbers_alone(
    drop_path: float, make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    learner, trainer = make_learner(), make_trainer()
    learner.net = small_net(dim=8, drop_path=drop_path)
    learner.compiled, trainer.datamodule = CompiledNet(learner.net), make_data()
    assert {"fallback_random": drop_path > 0, **compile_module.compiler_options(), **compile_module._caching()} == GIVEN
    learner.train()
    before = {name: buffer.clone() for name, buffer in learner.net.named_buffers()}
    state = torch.get_rng_state()
    assert "is 1.0000" in check_compiled(trainer, learner)
    assert all(torch.equal(buffer, before[name]) for name, buffer in learner.net.named_buffers())
    assert torch.equal(torch.get_rng_state(), state)
    assert all(parameter.grad is None for parameter in learner.parameters())


def test_a_short_batch_is_not_compiled_again(make_learner: Callable) -> None:
    net = make_learner().net.eval()
    compiled, images = CompiledNet(net), torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    with torch.no_grad():
        whole = compiled(images)
        with torch._dynamo.config.patch(error_on_recompile=True):
            part = compiled(images[:2])
    assert part.shape == (2, 8)
    torch.testing.assert_close(part, whole[:2])
    torch.testing.assert_close(whole, net(images).detach())


def test_the_graph_that_returns_features_is_the_one_that_is_checked(make_learner: Callable) -> None:
    learner = make_learner(regularisers={"mixed": MetrixFeatures()}, compile=True)
    images = torch.randint(0, 256, (5, 3, 32, 32), dtype=torch.uint8)
    counters.clear()
    checked, (embeddings, features) = learner(images), learner(images, with_features=True)
    assert counters["stats"]["unique_graphs"] == 1
    assert torch.equal(checked, embeddings)
    torch.testing.assert_close(features, learner.net(images, with_features=True)[1])
    with torch.no_grad():
        assert learner(images).shape == (5, 8)


def test_a_short_batch_is_filled_up_where_the_network_itself_evaluates(make_learner: Callable) -> None:
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


def small_net(batch_norm: str = "train", seed: int = 0, dim: int = 16, drop_path: float = 0.0) -> EmbeddingNet:
    """A network whose batch norm has statistics of its own, in training mode."""
    torch.manual_seed(seed)
    more = {"pretrained": False, "image_size": 64, "batch_norm": batch_norm, "drop_path": drop_path}
    net = EmbeddingNet("test_resnet", dim, **more)
    for name, buffer in net.named_buffers():
        if name.endswith("running_mean"):
            buffer.normal_()
        elif name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return net.train()


def photographs(seed: int, count: int = 12, side: int = 64) -> torch.Tensor:
    """Smooth random images (B, 3, H, W) in 0-255."""
    small = torch.rand(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed)) * 255
    return torch.nn.functional.interpolate(small, size=side, mode="bilinear").to(torch.uint8)


def check(
    net: EmbeddingNet, embed: Callable, seed: int = 0, dtype: torch.dtype = torch.bfloat16
) -> compile_module.GradientCheck:
    torch.manual_seed(seed)
    loss = ProxyAnchorLoss(6, net.config["embedding_dim"])
    images = photographs(seed, side=net.config["image_size"])
    half = dtype != torch.float32
    precision = functools.partial(torch.autocast, "cpu", dtype if half else torch.bfloat16, enabled=half)
    return compile_module.check_gradients(net, embed, loss, images, torch.arange(12) // 2, precision)


def with_gradient(change: Callable[[torch.Tensor], torch.Tensor], name: str) -> Callable[[EmbeddingNet], Callable]:
    """A forward that passes a gradient changed by `change` to the parameters of one module."""

    def make(net: EmbeddingNet) -> Callable:
        def forward(images: torch.Tensor) -> torch.Tensor:
            changed = {key: p.clone() for key, p in net.named_parameters() if key.startswith(name)}
            for each in changed.values():
                each.register_hook(change)
            return torch.func.functional_call(net, changed, images)

        return forward

    return make


def detached(net: EmbeddingNet) -> Callable:
    """No gradient reaches the backbone."""

    def forward(images: torch.Tensor) -> torch.Tensor:
        with net.backbone.register_forward_hook(lambda *given: given[-1].detach()):
            return net(images)

    return forward


FAULTS = {
    "a block's gradient is zero": with_gradient(torch.zeros_like, "backbone.layer2.0"),
    "a convolution's gradient is zero": with_gradient(torch.zeros_like, "backbone.conv1.0"),
    "NaN": with_gradient(lambda g: g * float("nan"), "backbone.conv1.3"),
    "infinity in one number": with_gradient(lambda g: g.index_fill(0, torch.tensor([0]), float("inf")), "head"),
    "a sign": with_gradient(torch.neg, "backbone.layer2.0"),
    "three times too long": with_gradient(lambda g: 3 * g, "backbone.layer2.0"),
    "no gradient": lambda net: lambda images: net(images).detach() + 0 * net.head.bias,
    "detached backbone": detached,
    "mode of batch norm": lambda net: lambda images: (net.eval()(images), net.train())[0],
    "embeddings": lambda net: lambda images: net(images) + 0.3,
    "statistics of batch norm": lambda net: lambda images: (net(images), net(images))[0],
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "float32"])
@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_refused(fault: str, dtype: torch.dtype) -> None:
    net = small_net()
    with pytest.raises(UsageError, match=r"^the compiled network's .* (is|are) wrong: .* Train with compile=false\.$"):
        check(net, FAULTS[fault](net), dtype=dtype)


def other_rounding(net: EmbeddingNet) -> Callable:
    """In bf16, of a network with slightly other weights."""

    def forward(images: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            noisy = {name: p * (1 + 2**-9 * torch.randn_like(p)) for name, p in net.named_parameters()}
            return torch.func.functional_call(net, noisy, images)

    return forward


def test_rounding_alone_is_no_fault() -> None:
    for seed in (0, 1):
        net = small_net(seed=seed)
        found = check(net, other_rounding(net), seed)
        assert found.plain < 1
        assert abs(found.compiled - found.plain) < 0.1


def test_the_check_measures_from_float32() -> None:
    net = small_net()
    assert check(net, net, dtype=torch.float32) == pytest.approx((1, 1), abs=1e-5)
    half = check(net, net)
    assert half.plain == half.compiled < 0.9999


def test_a_check_is_remembered_until_what_it_depends_on_changes(tmp_path: Path, monkeypatch) -> None:
    def file_of(net: EmbeddingNet, batch: int = 12, precision: str = "bf16-mixed") -> Path:
        return compile_module.check_file(net, (batch, 3, 64, 64), precision, torch.device("cpu"))

    net, vit = small_net(), EmbeddingNet("test_vit", 16, pretrained=False).train()
    file = file_of(net)
    assert file == file_of(small_net(seed=1))  # whatever the weights
    assert tmp_path in file.parents
    others = [file_of(net, batch=13), file_of(net, precision="16-mixed"), file_of(vit)]
    others += [file_of(small_net(each)) for each in ("frozen_statistics", "frozen")]
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    assert len({file, *others, file_of(net)}) == 7
    assert compile_module.recall_check(file) is None
    compile_module.remember_check(file, compile_module.GradientCheck(0.9, 0.95))
    assert compile_module.recall_check(file) == (0.9, 0.95)
    file.write_text("{")
    assert compile_module.recall_check(file) is None


def test_autocast_is_part_of_the_key_of_a_traced_network() -> None:
    traced, keys = torch.fx.symbolic_trace(torch.nn.Identity()), set()
    for device, dtype, on in itertools.product(("cpu", "mps"), (torch.bfloat16, torch.float16), (True, False)):
        with torch.autocast(device, dtype, enabled=on):
            compile_module._complete_key(traced.graph)
        keys.add(str(traced.autocast))
    assert len(keys) == 7  # two disabled states leave the default dtypes, so they are equal


def test_a_later_start_does_not_repeat_the_check(make_learner: Callable, fit: Callable, capsys) -> None:
    said = []
    for _ in range(2):
        learner = make_learner()
        plain_passes: list[int] = []
        learner.net.register_forward_hook(lambda net, given, out, runs=plain_passes: runs.append(1))
        learner.compiled = CompiledNet(learner.net)  # calls the network's forward, without hooks
        fit(learner, callbacks=[Startup(0.0)])
        said.append((len(plain_passes), "checked at an earlier start" in capsys.readouterr().out))
    assert said == [(2, False), (0, True)]
    batch = torch.rand(4, 3, 8, 8), torch.zeros(4, dtype=torch.int64), None
    with pytest.raises(UsageError, match="float values from 0"):  # a compiled network would take them
        check_compiled(SimpleNamespace(datamodule=SimpleNamespace(train_dataloader=lambda: [batch])), learner)


def test_no_rank_goes_on_alone_where_another_has_no_memory_for_the_check(
    make_learner: Callable, fit: Callable, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    monkeypatch.setattr(startup, "gather_objects", lambda value: [value, None])  # the other rank has no check
    monkeypatch.setattr(startup, "run_once", lambda *_: pytest.fail("the other rank does not compute this"))
    fit(make_learner(compile=True), callbacks=[Startup(0.0)])
    assert "not checked: the plain float32 network" in capsys.readouterr().out


@pytest.mark.parametrize("told", [["of the images"], [None, "of the check"]])
def test_an_error_of_another_rank_ends_this_one_too(told, make_learner: Callable, fit: Callable, monkeypatch) -> None:
    others, checks = iter(told), []
    monkeypatch.setattr(distributed, "gather_objects", lambda value: [value, next(others)])
    monkeypatch.setattr(startup, "check_gradients", lambda *_: checks.append(1))
    with pytest.raises(AgreedError, match=told[-1]):
        fit(make_learner(compile=True), callbacks=[Startup(0.0)])
    assert len(checks) == len(told) - 1


def test_a_module_of_a_few_numbers_is_judged_with_its_parent() -> None:
    few, many = torch.tensor([1.0, -1.0]), torch.ones(100)
    want = {"block.scale.weight": few, "block.conv.weight": many, "block.bias": many}
    other = want | {"block.scale.weight": -2 * few}  # chance: noise has few directions there
    passes = [compile_module._Pass(torch.ones(2, 3), torch.empty(0), each) for each in (want, want, other)]
    assert compile_module.find_faults(*passes) == {}
    wrong = compile_module._Pass(torch.ones(2, 3), torch.empty(0), want | {"block.conv.weight": -many})
    assert [*compile_module.find_faults(passes[0], passes[1], wrong)] == ["block.conv"]


def test_a_sign_is_seen_where_rounding_hides_most_of_a_gradient() -> None:
    want, noise = torch.randn(2, 4096, generator=torch.Generator().manual_seed(0))
    gradients = (want, 0.3 * want + noise, 0.3 * want - noise, -0.3 * want + noise)
    made = [compile_module._Pass(torch.ones(2, 3), torch.empty(0), {"conv.weight": each}) for each in gradients]
    assert [[*compile_module.find_faults(*made[:2], each)] for each in made[2:]] == [[], ["conv"]]


def test_the_loss_is_compiled_before_the_first_step(make_learner: Callable, fit: Callable) -> None:
    learner, graphs, counted = make_learner(compile=True), [], pl.Callback()
    counted.on_train_start = lambda *given: graphs.append(counters["stats"]["unique_graphs"])
    torch.compiler.reset()
    counters.clear()
    fit(learner, callbacks=[Startup(0.0), counted])
    assert graphs[0] == counters["stats"]["unique_graphs"] >= 2


def test_a_buffer_that_the_forward_pass_replaces_is_no_statistic() -> None:
    net = small_net("train")
    net.register_buffer("positions", torch.zeros(1))  # as convit's, by number of patches
    net.register_forward_pre_hook(lambda module, given: setattr(module, "positions", torch.ones(len(given[0]))))
    check(net, net)


@pytest.mark.slow
@pytest.mark.parametrize("backbone", [*WITH_PATHS, *WITHOUT_PATHS, *LARGER])
def test_no_family_is_refused_for_its_rounding(backbone: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # the traced network of each would take minutes: another order of rounding stands for it
    config = timm.models.get_pretrained_cfg(backbone)
    side = config.input_size[1] if config.fixed_input_size else 96
    for batch_norm, seed in itertools.product(("train", "frozen_statistics"), range(3)):
        torch.manual_seed(seed)
        net = EmbeddingNet(backbone, 32, pretrained=False, image_size=side, batch_norm="train").train()
        if batch_norm != "train":
            for each in net.modules():
                if isinstance(each, torch.nn.modules.batchnorm._BatchNorm):
                    each.momentum = None  # the mean of what it sees
            with torch.no_grad():
                net(photographs(seed, 24, side))
            net.batch_norm = batch_norm
            net.train()
        check(net, other_rounding(net), seed)


@needs_compiler
@pytest.mark.parametrize("batch_norm", ["train", pytest.param("frozen_statistics", marks=pytest.mark.slow)])
def test_the_compiler_itself_passes(batch_norm: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    net = small_net(batch_norm, drop_path=0.2)
    found = check(net, CompiledNet(net))
    assert found.compiled > found.plain - 0.05
    torch.compiler.reset()
    counters.clear()
    assert check(net, CompiledNet(net)) == found
    assert counters["aot_autograd"]["autograd_cache_hit"]  # not traced again
    if batch_norm == "frozen_statistics":  # one more compilation
        # float16 rounds less; taken from the cache of bf16 it would not.
        assert check(net, CompiledNet(net), dtype=torch.float16).compiled > found.compiled
