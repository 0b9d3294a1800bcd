"""torch.compile for network and loss, and the check that the network trains as it does eagerly."""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import timm
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from proxy_anchor.errors import UsageError
from proxy_anchor.utils import write_json

# Images of all evaluations of a run from which compiling for them saves more time than it takes (docs/speed.md).
MANY_IMAGES = 1_000_000

# The same for training: compile=auto compiles from this many images of all epochs of a run.
COMPILE_FROM = 500_000


class CompiledNet:
    """The network's forward, compiled for one batch shape; on a GPU as one CUDA graph.

    A shorter batch (the last of an evaluation) is filled up with copies of its first image, whose embeddings are
    dropped: each further shape would be compiled again.

    Args:
        net: images (B, 3, H, W) to embeddings (B, D).
        num_evaluated: images that will be embedded without gradients; below MANY_IMAGES they run through `net` itself.
            None: many.
        with_features: the training forward returns pooled features too, in every call: one graph is compiled and
            checked.
    """

    def __init__(self, net: nn.Module, *, num_evaluated: int | None = None, with_features: bool = False) -> None:
        # The compiler's random numbers differ from the plain network's, with which it is compared.
        draws = any(isinstance(module, DropPath) and module.drop_prob for module in net.modules())
        options = {"fallback_random": draws, **compiler_options(), **_caching()}
        self._forward = torch.compile(net.forward, dynamic=False, options=options)
        self._more = {"with_features": True} if with_features else {}
        self._longest = {True: 0, False: 0}  # with and without gradients
        self._net = net if num_evaluated is not None and num_evaluated < MANY_IMAGES else None

    def __call__(self, images: Tensor, with_features: bool = False) -> Any:
        """As the network's own forward; with_features: in training alone."""
        training, count = torch.is_grad_enabled(), len(images)
        self._longest[training] = max(self._longest[training], count)
        if missing := self._longest[training] - count:
            images = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        # Batches from worker processes and from the GPU differ in layout; each would be compiled.
        images = images.contiguous(memory_format=torch.channels_last)
        if self._net is not None and not training:
            return self._net(images)[:count]
        torch.compiler.cudagraph_mark_step_begin()  # the graph may overwrite what it returned before
        if not training:  # an evaluation keeps its embeddings longer than the graph does
            return self._forward(images)[:count].clone()
        found = self._forward(images, **self._more)
        return found[0] if self._more and not with_features else found


def compile_loss(loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A loss function compiled for one batch shape, without CUDA graph.

    loss: a function, or the `forward` of a module, whose state dict keeps its names.
    """
    compiled = torch.compile(loss, dynamic=False, options={**compiler_options(), "triton.cudagraphs": False})

    def compute(embeddings: Tensor, *others: Tensor) -> Tensor:
        # torch.compile runs the backward pass under the autocast of the call, not under that inside the function.
        with torch.autocast(embeddings.device.type, enabled=False):
            return compiled(embeddings, *others)

    return compute


def compiler_options() -> dict[str, bool]:
    """Options of Inductor, by their names in `torch._inductor.config` (docs/speed.md)."""
    from torch._inductor import config  # imported here: it takes a second

    known = config.get_config_copy()  # options change with torch
    wanted = {
        # Python launches hundreds of small kernels more slowly than the GPU computes them.
        "triton.cudagraphs": torch.cuda.is_available(),
        # Folds frozen batch norm into the weights of the convolution.
        "efficient_conv_bn_eval_fx_passes": True,
        # Choose kernels by rule: choosing by timing is not reproducible. torch refuses this together with
        # TORCHINDUCTOR_MAX_AUTOTUNE=1, which asks for the timing.
        "deterministic": not known.get("max_autotune"),
        # A second search for loops to fuse takes seconds and makes no faster network.
        "loop_ordering_after_fusion": False,
    }
    return {name: value for name, value in wanted.items() if name in known}


def _caching() -> dict[str, Any]:
    """Options with which torch 2.11 keeps the traced network in the compiler's cache; torch 2.14 does so itself."""
    if not torch.__version__.startswith("2.11."):
        return {}
    # What these compute depends on their arguments alone, which the key holds, and on torch, whose code it holds too.
    folded = "torch._inductor.fx_passes.efficient_conv_bn_eval.efficient_conv_bn_eval_decomposed"
    safe = [folded, *(f"torch.amp.autocast_mode._{each}_autocast" for each in ("enter", "exit"))]
    return {"unsafe_marked_cacheable_functions": dict.fromkeys(safe, "1"), "pre_grad_custom_pass": _complete_key}


def _complete_key(graph: torch.fx.Graph) -> None:
    """Change a traced network so that the cache's key can be computed from it and differs by precision."""
    from torch._inductor.fx_passes.efficient_conv_bn_eval import efficient_conv_bn_eval_decomposed as folded

    # The key of torch 2.11 says that autocast is on, but not its dtype or device, and ignores "mps": a run in float16
    # would find bf16's network.
    state = [(torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in ("cpu", "cuda", "mps")]
    graph.owning_module.autocast = state  # type: ignore
    for node in graph.find_nodes(op="call_function", target=folded):
        node.meta["example_value"] = None  # marks the output as a tensor, as DropPath requires
        # The function conv2d cannot be written into the key, its operator can.
        if node.args[5] is torch.conv2d and not any(isinstance(each, str) for each in node.args[9]):  # padding="same"
            node.update_arg(5, torch.ops.aten.conv2d.default)


class GradientCheck(NamedTuple):
    """Cosines with the gradient of the plain float32 network: plain in the run's precision, and compiled."""

    plain: float
    compiled: float


class _Pass(NamedTuple):
    embeddings: Tensor
    statistics: Tensor
    gradients: dict[str, Tensor]


def check_gradients(
    net: nn.Module,
    compiled: Callable[[Tensor], Tensor],
    loss: nn.Module,
    images: Tensor,
    labels: Tensor,
    precision: Callable[[], AbstractContextManager[Any]],
) -> GradientCheck:
    """Compare the compiled network with the plain one on a batch.

    The reference is the plain network in float32. The compiled network, in the run's precision, is wrong where it is
    clearly farther from the reference than the plain network in that precision: bf16 alone turns the gradient of a
    network with random weights by up to 65 degrees, so the distance between two bf16 networks says nothing. All three
    differentiate the same function of the embeddings, the loss's gradient at the reference, because the loss itself
    amplifies rounding. A module that looks wrong is compared on the mirrored batches too: an error of the compiler
    remains, noise does not.

    Args:
        net, compiled: images (B, 3, H, W) to embeddings (B, D), with the same weights.
        loss: `loss(embeddings, labels)`.
        images, labels: a training batch.
        precision: context manager of the run's precision (autocast).

    Leaves weights, statistics and random numbers as they were. Raises UsageError naming the first module that is wrong.
    """
    with precision():
        half = torch.is_autocast_enabled(images.device.type)
    wrong: dict[str, str] = {}
    for attempt, batch in enumerate((images, images.flip(3), images.flip(2))):
        float32 = torch.autocast(images.device.type, enabled=False)
        # Without cuDNN, which would first choose kernels for these few passes; and its float32 may be TF32.
        reference, cotangent = _run(net, net, batch, float32, loss=(loss, labels), cudnn=False)
        plain, _ = _run(net, net, batch, precision(), cotangent=cotangent, cudnn=not half)
        found, _ = _run(net, compiled, batch, precision(), cotangent=cotangent)
        if attempt == 0:
            whole = [torch.cat([*each.gradients.values()]) for each in (reference, plain, found)]
            plain_cosine, cosine = (float(nn.functional.cosine_similarity(each, whole[0], dim=0)) for each in whole[1:])
        now = find_faults(reference, plain, found)
        wrong = {name: text for name, text in now.items() if attempt == 0 or name in wrong}
        if not wrong:
            return GradientCheck(plain_cosine, cosine)
    raise UsageError(f"the compiled network's {next(iter(wrong.values()))}. Train with compile=false.")


def run_once(net: nn.Module, compiled: Callable[[Tensor], Tensor], images: Tensor, precision: Callable) -> None:
    """Compile: one forward and backward pass that leaves weights, statistics and random numbers as they were."""
    _run(net, compiled, images, precision(), cotangent=torch.ones((), device=images.device))


def _run(
    net: nn.Module,
    embed: Callable[[Tensor], Tensor],
    images: Tensor,
    precision: AbstractContextManager[Any],
    *,
    loss: tuple[nn.Module, Tensor] | None = None,
    cotangent: Tensor | None = None,
    cudnn: bool = True,
) -> tuple[_Pass, Tensor]:
    """Embeddings, statistics and gradients of one training pass, and the embeddings' gradient that was used."""
    parameters = {name: each for name, each in net.named_parameters() if each.requires_grad}
    before = {each: each.clone() for each in net.buffers()}
    enabled, torch.backends.cudnn.enabled = torch.backends.cudnn.enabled, cudnn and torch.backends.cudnn.enabled
    try:
        with torch.random.fork_rng([images.device] if images.is_cuda else []):
            torch.manual_seed(0)  # dropout, where there is any
            with precision:
                embeddings = embed(images)
            if loss is not None:
                leaf = embeddings.detach().requires_grad_()
                (cotangent,) = torch.autograd.grad(loss[0](leaf, loss[1]), leaf)
                cotangent = cotangent / cotangent.abs().max().clamp_min(1e-30)  # small numbers vanish in float16
            assert cotangent is not None
            gradients = torch.autograd.grad(
                embeddings, [*parameters.values()], cotangent.expand_as(embeddings), materialize_grads=True
            )
        # Clones: a CUDA graph overwrites what it returned.
        flat = {name: each.float().flatten().clone() for name, each in zip(parameters, gradients, strict=True)}
        statistics = [each for name, each in net.named_buffers() if name.endswith(("running_mean", "running_var"))]
        changes = [(each - before[each]).float().flatten() for each in statistics]
        return _Pass(
            embeddings.detach().float().clone(), torch.cat([embeddings.new_empty(0), *changes]), flat
        ), cotangent
    finally:
        torch.backends.cudnn.enabled = enabled
        with torch.no_grad():
            for buffer, value in before.items():
                buffer.copy_(value)


def find_faults(reference: _Pass, plain: _Pass, compiled: _Pass) -> dict[str, str]:
    """{name: message} of what is clearly farther from the reference than the plain pass is."""
    wrong = {}
    parts = [(each.embeddings.flatten(), each.statistics) for each in (reference, plain, compiled)]
    for name, want, usual, found in zip(("embeddings", "statistics of batch norm"), *parts, strict=True):
        if not bool((found - want).norm() <= 3 * (usual - want).norm() + 0.05 * want.norm()):  # NaN too
            wrong[name] = f"{name} are wrong: {_distances(want, usual, found)}"
    # By module: a convolution's bias before batch norm has a gradient of zero, and rounding alone next to its weight.
    for module, names in _by_module(reference.gradients).items():
        want, usual, found = (torch.cat([each.gradients[n] for n in names]) for each in (reference, plain, compiled))
        size, noise, distance = want.norm(), (usual - want).norm(), (found - want).norm()
        # How much of the reference's gradient is found; noise has no direction and adds little to it.
        usual_share, share = (torch.dot(each, want) / size.square().clamp_min(1e-30) for each in (usual, found))
        missing = (share < 0.2 * usual_share.clamp(max=1)) | (share > 2.5 * usual_share.clamp(min=1))
        turned = (usual_share > 0.2) & (share < -usual_share / 2)
        is_zero = found.norm() < 0.05 * usual.norm()
        is_noise = noise > 2 * size  # a gradient of zero by construction: nothing to compare
        is_wrong = ~is_noise & (
            (distance > 3 * noise + 0.5 * size) | is_zero | turned | ((usual_share > 0.4) & missing)
        )
        if bool(is_wrong | ~torch.isfinite(distance)):
            wrong[module] = f"gradient of {module or 'net'} is wrong: {_distances(want, usual, found)}"
    return wrong


def _distances(want: Tensor, usual: Tensor, found: Tensor) -> str:
    plain, compiled = (float((each - want).norm() / want.norm().clamp_min(1e-30)) for each in (usual, found))
    return f"relative distance to plain float32 {compiled:.3g}, that of the plain network in this precision {plain:.3g}"


def _by_module(gradients: dict[str, Tensor]) -> dict[str, list[str]]:
    """Names of gradients by module; a module of a few numbers, whose distance is chance, counts with its parent."""
    groups: dict[str, list[str]] = {}
    for name in gradients:
        groups.setdefault(name.rpartition(".")[0], []).append(name)
    for module in sorted(groups, key=lambda each: -each.count(".")):
        while module and module in groups and sum(gradients[name].numel() for name in groups[module]) < 64:
            parent = module.rpartition(".")[0]
            groups.setdefault(parent, []).extend(groups.pop(module))
            module = parent
    return groups


def check_file(net: nn.Module, shape: Iterable[int], precision: str, device: torch.device) -> Path:
    """File in the compiler's cache folder for the check of a network at a batch shape (B, 3, H, W) and precision.

    Its name is a hash of what may change the compiled network: torch, timm, GPU, network, compiler options, code.
    """
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    sources = [Path(__file__), *sorted((Path(__file__).parents[1] / "models").glob("*.py"))]
    backbone = inspect.getsourcefile(type(getattr(net, "backbone", net)))
    code = b"".join(path.read_bytes() for path in (*sources, *([Path(backbone)] if backbone else [])))
    key = {
        "versions": [torch.__version__, timm.__version__, torch.version.cuda],
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else device.type,
        "network": getattr(net, "config", None),
        # Layers by their type, settings and mode: synchronised batch norm, dropout and whatever a user replaced.
        "layers": [
            f"{name} {module} {module.training}" for name, module in net.named_modules() if not [*module.children()]
        ],
        "trained": [name for name, each in net.named_parameters() if each.requires_grad],
        "shape": list(shape),
        "precision": precision,
        "options": compiler_options(),
        "code": hashlib.sha256(code).hexdigest(),
    }
    digest = hashlib.sha256(json.dumps(key, sort_keys=True, default=str).encode()).hexdigest()
    return Path(cache_dir()) / "proxy_anchor" / f"{digest[:32]}.json"


def recall_check(file: Path) -> GradientCheck | None:
    """Read the check that an earlier start passed; None without one."""
    try:
        return GradientCheck(**json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError):
        return None


def remember_check(file: Path, check: GradientCheck) -> None:
    """Write a passed check for later starts, unless the folder cannot be written."""
    with suppress(OSError):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, check._asdict())
