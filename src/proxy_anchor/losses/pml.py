"""The losses that pytorch-metric-learning has and has right, under the names and values of their papers.

Each function is a `_target_` of conf/loss. What its docstring says about the library was found in version 2.9 and is held by
tests/losses/test_pml.py. Embeddings are of unit length here, for every loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from proxy_anchor.errors import UsageError, check_int, check_number
from proxy_anchor.losses.base import MetricLoss

# What that library calls C and D, in one loss or another.
_SIZES = {"num_classes": "num_classes"} | dict.fromkeys(
    ("embedding_size", "embedding_dim", "descriptors_dim"), "embedding_dim"
)

# How that library says what it cannot do: it also asserts.
_REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError)


class PMLLoss(MetricLoss):
    """A loss of pytorch-metric-learning, with a miner and a distance where wanted.

    Args:
        num_classes: C. embedding_dim: D. Both are handed to the loss if it takes them.
        loss: a class of `pytorch_metric_learning.losses`, or a partial of one with further arguments; in a config its
            `_target_` with `_partial_: true`.
        miner: a miner made already, called with every batch; None takes all pairs or triplets.
        distance: a distance made already, for loss and miner; None leaves each its own.

    Raises UsageError when the loss cannot be made with these arguments, or does not take embeddings with labels.
    """

    def __init__(
        self,
        num_classes: int,
        embedding_dim: int,
        loss: Callable[..., nn.Module],
        miner: nn.Module | None = None,
        distance: nn.Module | None = None,
    ) -> None:
        super().__init__(num_classes, embedding_dim)
        made = loss.func if isinstance(loss, partial) else loss
        name = getattr(made, "__name__", type(made).__name__)
        if not inspect.isclass(made):
            raise UsageError(f"loss.loss: expected a class of pytorch_metric_learning.losses, received {name}.")
        given = set(loss.keywords) if isinstance(loss, partial) else set()
        known = _parameters(made) - given
        arguments = {theirs: getattr(self, ours) for theirs, ours in _SIZES.items() if theirs in known}
        if distance is not None:
            arguments["distance"] = distance
            if miner is not None:
                miner.distance = distance
        try:
            self.loss = loss(**arguments)
        except _REFUSALS as error:
            raise UsageError(f"loss: {name} does not accept these arguments ({_reason(error)}).") from error
        self.miner = miner

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Mine, then the loss of (B, D) embeddings with labels (B,); 0, with a gradient of 0, when nothing was mined."""
        try:
            return self.loss(embeddings, labels, None if self.miner is None else self.miner(embeddings, labels))
        except _REFUSALS as error:
            name = type(self.loss).__name__ + ("" if self.miner is None else f" with {type(self.miner).__name__}")
            raise UsageError(f"loss: {name} does not take these embeddings with labels ({_reason(error)}).") from error


def _reason(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _parameters(made: type) -> set[str]:
    """The names that a constructor and those behind its **kwargs take."""
    constructors = [vars(each)["__init__"] for each in made.__mro__ if "__init__" in vars(each)]
    return {name for each in constructors for name in inspect.signature(each).parameters}


def contrastive(num_classes: int, embedding_dim: int, margin: float = 0.5) -> PMLLoss:
    """Contrastive loss, Hadsell et al. 2006 (Eq. 4): d for a positive pair, max(0, margin - d) for a negative one.

    The library, and with it Kim et al.'s released code (margin 0.5), takes distances where the paper has their squares, and
    averages positive and negative pairs apart, each over the pairs whose term is not 0.
    """
    from pytorch_metric_learning import losses

    check_number("loss.margin", margin, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.ContrastiveLoss, neg_margin=margin))


def triplet(num_classes: int, embedding_dim: int, margin: float = 0.1, miner: nn.Module | None = None) -> PMLLoss:
    """Triplet loss, Schroff et al. 2015: max(0, d(a, p) - d(a, n) + margin).

    As Kim et al.'s released code has it: margin 0.1 on distances, where the paper has 0.2 on their squares. Averaged over
    the triplets whose term is not 0, of all that the miner keeps (semi-hard: 0 < d(a, n) - d(a, p) <= margin).
    """
    from pytorch_metric_learning import losses

    check_number("loss.margin", margin, 0)
    return PMLLoss(num_classes, embedding_dim, partial(losses.TripletMarginLoss, margin=margin), miner)


def n_pair(num_classes: int, embedding_dim: int, scale: float = 20.0) -> PMLLoss:
    """N-pair loss, Sohn 2016: log(1 + sum of exp(a.n - a.p)) over one pair per class, n the others' positives.

    The paper's embeddings are of free length, held back by a weight on it. Here all are of unit length, so that every loss
    trains the same network: `scale` multiplies the cosines instead, and the weight has nothing left to do. Without it the
    differences between cosines are too small to learn from. 20 is the value of `normalized_softmax`, not the paper's.
    The library takes the first pair of each class in the batch: 2 images per class, or the others get no gradient.
    """
    from pytorch_metric_learning import losses

    check_number("loss.scale", scale, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, losses.NPairsLoss, distance=_scaled_cosine(scale))


def lifted_structure(num_classes: int, embedding_dim: int, alpha: float = 1.0) -> PMLLoss:
    """Lifted structured loss, Song et al. 2016, Eq. 4: each positive pair against all negatives of both its images.

    max(0, log sum of exp(alpha - d) over those negatives + d(i, j))^2 / 2, averaged over the positive pairs.
    """
    from pytorch_metric_learning import losses

    check_number("loss.alpha", alpha, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.LiftedStructureLoss, neg_margin=alpha, pos_margin=0))


def multi_similarity(
    num_classes: int,
    embedding_dim: int,
    alpha: float = 2.0,
    beta: float = 50.0,
    base: float = 0.5,
    miner: nn.Module | None = None,
) -> PMLLoss:
    """Multi-Similarity loss, Wang et al. 2019 (base: their lambda), with its miner where one is given.

    Averaged over all images of the batch, those for which nothing was mined counting as 0.
    """
    from pytorch_metric_learning import losses

    check_number("loss.alpha", alpha, 0, exclusive=True)
    check_number("loss.beta", beta, 0, exclusive=True)
    check_number("loss.base", base, -1, maximum=1)
    loss = partial(losses.MultiSimilarityLoss, alpha=alpha, beta=beta, base=base)
    return PMLLoss(num_classes, embedding_dim, loss, miner)


def margin(
    num_classes: int,
    embedding_dim: int,
    alpha: float = 0.2,
    beta: float = 1.2,
    nu: float = 0.0,
    miner: nn.Module | None = None,
) -> PMLLoss:
    """Margin loss, Wu et al. 2017: max(0, alpha + d - beta) and max(0, alpha + beta - d).

    beta is where every class's learnable boundary starts, nu the weight that keeps it small. Divided by the number of terms
    that are not 0. In the library's distance-weighted miner the weights of a batch are scaled together, so an image whose
    negatives are all much farther than another's may be left out; the authors' code draws its negatives evenly then.
    """
    from pytorch_metric_learning import losses

    check_number("loss.alpha", alpha, 0)
    check_number("loss.beta", beta, 0, exclusive=True)
    check_number("loss.nu", nu, 0)
    loss = partial(losses.MarginLoss, margin=alpha, beta=beta, nu=nu, learn_beta=True)
    return PMLLoss(num_classes, embedding_dim, loss, miner)


def soft_triple(
    num_classes: int,
    embedding_dim: int,
    num_centers: int = 10,
    scale: float = 20.0,
    gamma: float = 0.1,
    margin: float = 0.01,
    tau: float = 0.2,
) -> PMLLoss:
    """SoftTriple loss, Qian et al. 2019 (K: num_centers, lambda: scale, delta: margin), with its regulariser (tau).

    The regulariser draws a class's centres together until those it does not need are one. The library has it apart, over the
    similarities of all centres of all classes: 51 GB on SOP. Here it looks at each class's own.
    """
    from pytorch_metric_learning import losses

    check_int("loss.num_centers", num_centers, 1)
    for name, value in {"scale": scale, "gamma": gamma}.items():
        check_number(f"loss.{name}", value, 0, exclusive=True)
    check_number("loss.margin", margin, 0)
    check_number("loss.tau", tau, 0)
    loss = partial(losses.SoftTripleLoss, centers_per_class=num_centers, la=scale, gamma=gamma, margin=margin)
    if tau and num_centers > 1:
        loss = partial(
            loss, weight_regularizer=partial(center_distances, num_centers=num_centers), weight_reg_weight=tau
        )
    return PMLLoss(num_classes, embedding_dim, loss)


def center_distances(centers: Tensor, num_centers: int) -> Tensor:
    """Half the mean distance between two centres of one class (SoftTriple's regulariser): (C K, D) to a scalar."""
    unit = nn.functional.normalize(centers).unflatten(0, (-1, num_centers))  # (C, K, D)
    row, column = torch.triu_indices(num_centers, num_centers, offset=1, device=centers.device)
    cosines = (unit @ unit.mT)[:, row, column]
    # The authors' 1e-5: the root has no gradient for centres that have become one.
    return (2 + 1e-5 - 2 * cosines).sqrt().mean() / 2


def arcface(num_classes: int, embedding_dim: int, s: float = 64.0, m: float = 0.5) -> PMLLoss:
    """ArcFace, Deng et al. 2019, Eq. 3: softmax over s cos(angle), with m (radians) added to the angle of the own class.

    The library takes degrees; where angle + m would exceed 180 it goes on with cos(angle) - m sin(m), as the authors' code.
    """
    from pytorch_metric_learning import losses

    check_number("loss.s", s, 0, exclusive=True)
    check_number("loss.m", m, 0, maximum=math.pi)
    loss = partial(losses.ArcFaceLoss, scale=s, margin=math.degrees(m), weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def cosface(num_classes: int, embedding_dim: int, s: float = 64.0, m: float = 0.35) -> PMLLoss:
    """CosFace, Wang et al. 2018, Eq. 4: softmax over s cos(angle), with m taken from the cosine of the own class."""
    from pytorch_metric_learning import losses

    check_number("loss.s", s, 0, exclusive=True)
    check_number("loss.m", m, 0, maximum=2)
    loss = partial(losses.CosFaceLoss, scale=s, margin=m, weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def normalized_softmax(num_classes: int, embedding_dim: int, temperature: float = 0.05) -> PMLLoss:
    """Normalised softmax, Zhai and Wu 2019: softmax over cosines / temperature."""
    from pytorch_metric_learning import losses

    check_number("loss.temperature", temperature, 0, exclusive=True)
    loss = partial(losses.NormalizedSoftmaxLoss, temperature=temperature, weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def circle(num_classes: int, embedding_dim: int, m: float = 0.4, gamma: float = 80.0) -> PMLLoss:
    """Circle loss on pairs, Sun et al. 2020 (Eq. 6), for each image; averaged over those not 0."""
    from pytorch_metric_learning import losses

    check_number("loss.m", m, -1, maximum=1)
    check_number("loss.gamma", gamma, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.CircleLoss, m=m, gamma=gamma))


def supcon(num_classes: int, embedding_dim: int, temperature: float = 0.1) -> PMLLoss:
    """Supervised contrastive loss, Khosla et al. 2020, Eq. 2 (L_out), over images instead of two views of each."""
    from pytorch_metric_learning import losses

    check_number("loss.temperature", temperature, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.SupConLoss, temperature=temperature))


def _as_proxies(weights: Tensor) -> None:
    """(D, C) weights drawn as Proxy-Anchor's proxies: their norm sets how fast they turn (see `proxy_anchor.make_proxies`)."""
    nn.init.kaiming_normal_(weights.t(), mode="fan_out")


def _scaled_cosine(scale: float) -> nn.Module:
    from pytorch_metric_learning.distances import CosineSimilarity

    class ScaledCosine(CosineSimilarity):
        def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
            return scale * super().compute_mat(query_emb, ref_emb)

    return ScaledCosine()
