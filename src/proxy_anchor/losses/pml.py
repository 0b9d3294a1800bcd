"""Losses of pytorch-metric-learning, with the names and default values of their papers.

Each function is a `_target_` of conf/loss. What a docstring says about the library was found in version 2.9 and is
tested in tests/losses/test_pml.py. Embeddings have unit length for every loss.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from functools import partial

import torch
from pytorch_metric_learning import losses
from pytorch_metric_learning.distances import CosineSimilarity
from torch import Tensor, nn

from proxy_anchor.errors import UsageError, check_int, check_number, reason_of
from proxy_anchor.losses.base import MetricLoss

# Names of C and D in the library's losses.
_SIZES = {"num_classes": "num_classes"} | dict.fromkeys(
    ("embedding_size", "embedding_dim", "descriptors_dim"), "embedding_dim"
)

# What the library raises for bad arguments; some losses assert.
_REFUSALS = (TypeError, ValueError, AssertionError, NotImplementedError)


class PMLLoss(MetricLoss):
    """A loss of pytorch-metric-learning, optionally with a miner and a distance.

    Args:
        num_classes: C. embedding_dim: D. Both are passed to the loss if it takes them.
        loss: a class of `pytorch_metric_learning.losses`, or a partial of one with further arguments; in a config its
            `_target_` with `_partial_: true`.
        miner: a miner object, called with every batch; None uses all pairs or triplets.
        distance: a distance object for loss and miner; None keeps their defaults.

    Raises UsageError when the loss cannot be built with these arguments, or does not take embeddings with labels.
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
            raise UsageError(f"loss: {name} does not accept these arguments ({reason_of(error)}).") from error
        self.miner = miner

    def compute(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """Loss of the mined pairs of (B, D) embeddings with labels (B,).

        0, with a gradient of 0, when nothing was mined.
        """
        try:
            return self.loss(embeddings, labels, None if self.miner is None else self.miner(embeddings, labels))
        except _REFUSALS as error:
            name = type(self.loss).__name__ + ("" if self.miner is None else f" with {type(self.miner).__name__}")
            raise UsageError(
                f"loss: {name} does not take these embeddings with labels ({reason_of(error)})."
            ) from error


def _parameters(made: type) -> set[str]:
    """Argument names of a constructor and of those that receive its **kwargs."""
    constructors = [vars(each)["__init__"] for each in made.__mro__ if "__init__" in vars(each)]
    return {name for each in constructors for name in inspect.signature(each).parameters}


def contrastive(num_classes: int, embedding_dim: int, margin: float = 0.5) -> PMLLoss:
    """Contrastive loss, Hadsell et al. 2006 (Eq. 4).

    d for a positive pair, max(0, margin - d) for a negative one. The library, and so Kim et al.'s released code
    (margin 0.5), uses distances where the paper uses their squares. It averages positive and negative pairs separately,
    each over the pairs whose term is not 0.
    """
    check_number("loss.margin", margin, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.ContrastiveLoss, neg_margin=margin))


def triplet(num_classes: int, embedding_dim: int, margin: float = 0.1, miner: nn.Module | None = None) -> PMLLoss:
    """Triplet loss, Schroff et al. 2015: max(0, d(a, p) - d(a, n) + margin).

    Margin 0.1 on distances, as in Kim et al.'s released code; the paper has 0.2 on squared distances. Averaged over
    the mined triplets whose term is not 0 (semi-hard: 0 < d(a, n) - d(a, p) <= margin).
    """
    check_number("loss.margin", margin, 0)
    return PMLLoss(num_classes, embedding_dim, partial(losses.TripletMarginLoss, margin=margin), miner)


def n_pair(num_classes: int, embedding_dim: int, scale: float = 20.0) -> PMLLoss:
    """N-pair loss, Sohn 2016: log(1 + sum of exp(a.n - a.p)).

    One pair per class; n are the positives of the other classes. In the paper the length of embeddings is free and has
    an L2 penalty. Here embeddings have unit length, so that every loss trains the same network, and `scale` multiplies
    the cosines, whose differences are otherwise too small to learn from. 20 is the value of `normalized_softmax`.
    The library uses the first pair of each class in the batch: with more than 2 images per class the others get no
    gradient.
    """
    check_number("loss.scale", scale, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, losses.NPairsLoss, distance=_ScaledCosine(scale))


def lifted_structure(num_classes: int, embedding_dim: int, alpha: float = 1.0) -> PMLLoss:
    """Lifted structured loss, Song et al. 2016, Eq. 4.

    max(0, log sum of exp(alpha - d) + d(i, j))^2 / 2, averaged over the positive pairs (i, j). The sum is over all
    negatives of i and of j.
    """
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
    """Multi-Similarity loss, Wang et al. 2019 (base: their lambda).

    Averaged over all images of the batch; an image without mined pairs counts as 0.
    """
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
    """Margin loss, Wu et al. 2017.

    max(0, alpha + d - beta) for positive pairs, max(0, alpha + beta - d) for negative pairs. beta: initial value of
    each class's learnable boundary. nu: weight of the penalty on the boundaries. Divided by the number of terms that
    are not 0. The library's distance-weighted miner scales the weights of a batch together, so an image whose
    negatives are all much farther than another's may be left out; the authors' code draws its negatives uniformly in
    that case.
    """
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
    """SoftTriple loss, Qian et al. 2019, with its regulariser (weight tau).

    Names in the paper: K is num_centers, lambda is scale, delta is margin. The regulariser merges centres that a class
    does not need. The library's version compares all centres of all classes (51 GB on SOP); this one compares the
    centres of each class.
    """
    check_int("loss.num_centers", num_centers, 1)
    for name, value in {"scale": scale, "gamma": gamma}.items():
        check_number(f"loss.{name}", value, 0, exclusive=True)
    check_number("loss.margin", margin, 0)
    check_number("loss.tau", tau, 0)
    loss = partial(losses.SoftTripleLoss, centers_per_class=num_centers, la=scale, gamma=gamma, margin=margin)
    if tau and num_centers > 1:
        regularizer = partial(center_distances, num_centers=num_centers)
        loss = partial(loss, weight_regularizer=regularizer, weight_reg_weight=tau)
    return PMLLoss(num_classes, embedding_dim, loss)


def center_distances(centers: Tensor, num_centers: int) -> Tensor:
    """SoftTriple's regulariser: half the mean distance between centres of one class.

    centers: (C K, D). Returns a scalar.
    """
    unit = nn.functional.normalize(centers).unflatten(0, (-1, num_centers))  # (C, K, D)
    row, column = torch.triu_indices(num_centers, num_centers, offset=1, device=centers.device)
    cosines = (unit @ unit.mT)[:, row, column]
    # The authors' 1e-5: the square root has no gradient at 0, where centres are equal.
    return (2 + 1e-5 - 2 * cosines).sqrt().mean() / 2


def arcface(num_classes: int, embedding_dim: int, s: float = 64.0, m: float = 0.5) -> PMLLoss:
    """ArcFace, Deng et al. 2019, Eq. 3: softmax over s cos(angle).

    m (radians) is added to the angle of the own class. The library takes degrees; where angle + m exceeds 180 degrees
    it uses cos(angle) - m sin(m), as the authors' code does.
    """
    check_number("loss.s", s, 0, exclusive=True)
    check_number("loss.m", m, 0, maximum=math.pi)
    loss = partial(losses.ArcFaceLoss, scale=s, margin=math.degrees(m), weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def cosface(num_classes: int, embedding_dim: int, s: float = 64.0, m: float = 0.35) -> PMLLoss:
    """CosFace, Wang et al. 2018, Eq. 4: softmax over s cos(angle).

    m is subtracted from the cosine of the own class.
    """
    check_number("loss.s", s, 0, exclusive=True)
    check_number("loss.m", m, 0, maximum=2)
    loss = partial(losses.CosFaceLoss, scale=s, margin=m, weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def normalized_softmax(num_classes: int, embedding_dim: int, temperature: float = 0.05) -> PMLLoss:
    """Normalised softmax, Zhai and Wu 2019: softmax over cosines / temperature."""
    check_number("loss.temperature", temperature, 0, exclusive=True)
    loss = partial(losses.NormalizedSoftmaxLoss, temperature=temperature, weight_init_func=_as_proxies)
    return PMLLoss(num_classes, embedding_dim, loss)


def circle(num_classes: int, embedding_dim: int, m: float = 0.4, gamma: float = 80.0) -> PMLLoss:
    """Circle loss on pairs, Sun et al. 2020, Eq. 6.

    Computed for each image; averaged over the values that are not 0.
    """
    check_number("loss.m", m, -1, maximum=1)
    check_number("loss.gamma", gamma, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.CircleLoss, m=m, gamma=gamma))


def supcon(num_classes: int, embedding_dim: int, temperature: float = 0.1) -> PMLLoss:
    """Supervised contrastive loss, Khosla et al. 2020, Eq. 2 (L_out).

    Over the images of the batch instead of two views of each.
    """
    check_number("loss.temperature", temperature, 0, exclusive=True)
    return PMLLoss(num_classes, embedding_dim, partial(losses.SupConLoss, temperature=temperature))


def _as_proxies(weights: Tensor) -> None:
    """Initialise (D, C) weights as `ProxyLoss` does."""
    nn.init.kaiming_normal_(weights.t(), mode="fan_out")


class _ScaledCosine(CosineSimilarity):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = scale

    def compute_mat(self, query_emb: Tensor, ref_emb: Tensor) -> Tensor:
        return self.scale * super().compute_mat(query_emb, ref_emb)
