"""torch.compile for the network, and the check that it trains as the network itself does."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import suppress
from functools import cache
from threading import Thread
from typing import TYPE_CHECKING

import pytorch_lightning as pl
import torch
from timm.layers import DropPath
from torch import Tensor, nn

from proxy_anchor.errors import UsageError
from proxy_anchor.training.beside import run_beside
from proxy_anchor.training.gather import gather_batch

if TYPE_CHECKING:
    from proxy_anchor.training.module import MetricLearner

# From here on compiling for evaluation too pays: 8 to 20 s more at the start, 20 us less per image (docs/speed.md).
MANY_IMAGES = 1_000_000

MIN_COSINE = 0.95  # bf16 gradients of two orders of summation agree to 0.99 and better; a broken kernel is far off


class CompiledNet:
    """The network's forward, compiled for one shape of batch; on a GPU as one CUDA graph, which Python launches at once.

    A shorter batch (the last of an evaluation) is filled up with copies of its first image, whose embeddings are dropped:
    preparing once more for its shape would take longer than many epochs, and some seconds where nothing is compiled.

    Args:
        net: images (B, 3, H, W) to embeddings (B, D). num_evaluated: images that will be embedded without gradients; fewer than a
            million run through `net` itself, because compiling for them would take longer. None: many.
    """

    def __init__(self, net: nn.Module, *, num_evaluated: int | None = None) -> None:
        # The compiler's own random numbers on a card are others than the plain network's, with which it is compared.
        draws = any(isinstance(module, DropPath) and module.drop_prob for module in net.modules())
        self._forward = torch.compile(
            net.forward, dynamic=False, options={"fallback_random": draws, **compiler_options()}
        )
        self._longest = {True: 0, False: 0}  # with and without gradients
        self._net = net if num_evaluated is not None and num_evaluated < MANY_IMAGES else None

    @property
    def evaluates(self) -> bool:
        """Whether it is compiled without gradients too."""
        return self._net is None

    def __call__(self, images: Tensor) -> Tensor:
        """As the network's own forward."""
        training, count = torch.is_grad_enabled(), len(images)
        self._longest[training] = max(self._longest[training], count)
        missing = self._longest[training] - count
        if missing:
            images = torch.cat([images, images[:1].expand(missing, -1, -1, -1)])
        # Batches of the workers and of the card are laid out differently, which would be two compilations.
        images = images.contiguous(memory_format=torch.channels_last)
        if self._net is not None and not training:
            return self._net(images)[:count]
        torch.compiler.cudagraph_mark_step_begin()  # the graph may overwrite what it gave before
        embeddings = self._forward(images)
        # An evaluation keeps its embeddings longer than the graph does.
        return embeddings if training else embeddings[:count].clone()


def compiler_options() -> dict[str, bool]:
    """How the network is compiled, as `torch._inductor.config` names it; see docs/speed.md for what was measured."""
    from torch._inductor import config  # a second of imports, which torch.compile makes anyway

    known = config.get_config_copy()  # options change with torch
    wanted = {
        # A step of hundreds of small kernels is launched more slowly than the card computes it; as a graph it is not.
        "triton.cudagraphs": torch.cuda.is_available(),
        # Most kernels are chosen by rule: measuring them takes seconds, chooses differently each time, and wins nothing here.
        # Who has torch measure all (TORCHINDUCTOR_MAX_AUTOTUNE=1) gets that; both at once is an error of torch's.
        "deterministic": not known.get("max_autotune"),
        # Another search for loops that could be one: seconds more, and no faster network.
        "loop_ordering_after_fusion": False,
    }
    return {name: value for name, value in wanted.items() if name in known}


@cache
def prepare_compiler() -> None:
    """Have what the compiler of a card's kernels needs made in the background, once, while images are read and evaluated.

    That is its processes: as long as they are not there, it compiles kernels one after another in this one. And the keys of its
    caches, for which it reads all of torch and of Triton. It makes both itself where this did not, or could not.
    """
    if not torch.cuda.is_available():
        return

    def make_keys() -> Generator[None]:
        torch_key()
        yield
        triton_key()
        yield

    with suppress(Exception):  # none of this is torch's public interface
        from torch._inductor.async_compile import AsyncCompile
        from torch._inductor.codecache import torch_key
        from torch._inductor.runtime.triton_compat import triton_key

        AsyncCompile.use_process_pool()  # starts them, and does not wait
        run_beside(make_keys())


def check_compiled(trainer: pl.Trainer, learner: MetricLearner, rehearsal: Thread | None = None) -> float:
    """The cosine between the compiled network's gradient on the first training batch and the network's own.

    rehearsal: a thread that uses the card, for which kernels wait that are recorded or timed.

    Compiled networks have been seen to return NaN gradients, and gradients that never reach the backbone, without an error.
    Leaves weights, statistics and random numbers as they were. Raises UsageError when a gradient is not finite or points
    elsewhere.
    """
    assert learner.compiled is not None
    devices = [learner.device] if learner.device.type == "cuda" else []
    with torch.random.fork_rng(devices):  # a DataLoader draws a seed
        images, labels, _ = next(iter(trainer.datamodule.train_dataloader()))  # type: ignore[attr-defined]
    images, labels = images.to(learner.device), labels.to(learner.device)
    statistics = {name: buffer.clone() for name, buffer in learner.net.named_buffers()}
    gradients = []
    # Compiling first: the rehearsal goes on beside it.
    for embed in (learner.compiled, learner.net):
        with torch.random.fork_rng(devices), trainer.precision_plugin.train_step_context():
            torch.manual_seed(0)  # dropout, where there is any
            embeddings = embed(images)
            if rehearsal is not None:
                rehearsal.join()
            gradients.append(_gradient(learner.loss(*gather_batch(embeddings, labels)), learner.net))
    for name, buffer in learner.net.named_buffers():
        buffer.copy_(statistics[name])
    compiled, plain = gradients
    return compare(plain, compiled)


def _gradient(loss: Tensor, net: nn.Module) -> Tensor:
    parameters = [parameter for parameter in net.parameters() if parameter.requires_grad]
    found = torch.autograd.grad(loss, parameters, allow_unused=True)
    # A parameter's share is scaled to length 1 so that no layer hides behind the steepest one.
    pairs = zip(found, parameters, strict=True)
    flat = [torch.zeros_like(p).flatten() if g is None else g.float().flatten() for g, p in pairs]
    return torch.cat([each / each.norm().clamp_min(1e-12) for each in flat])


def compare(plain: Tensor, compiled: Tensor) -> float:
    """The cosine between two gradients; UsageError when the second is not finite or far from the first."""
    cosine = float(torch.nn.functional.cosine_similarity(plain, compiled, dim=0))
    if not cosine >= MIN_COSINE:  # NaN too
        raise UsageError(
            f"the compiled network's gradients differ from the network's own (cosine {cosine:.3f}, at least {MIN_COSINE} "
            "wanted): this torch version miscompiles it. Train with compile=false."
        )
    return cosine
