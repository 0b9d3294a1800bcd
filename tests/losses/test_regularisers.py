"""Regularisers and the potential field against plain loops, in double precision."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import compose_train
from eq_4 import cosine, proxy_anchor
from hydra.errors import ConfigCompositionException
from hydra.utils import instantiate
from pytorch_metric_learning.losses import ThresholdConsistentMarginLoss
from torch import Tensor, nn
from torch.nn import functional as F

from proxy_anchor.cli import checks, messages
from proxy_anchor.cli import main as entry
from proxy_anchor.cli.config import nested_dims
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.anti_collapse import AntiCollapse
from proxy_anchor.losses.metrix import Metrix, MetrixFeatures
from proxy_anchor.losses.nested import Nested
from proxy_anchor.losses.potential_field import PotentialFieldLoss
from proxy_anchor.losses.proxy_anchor import ProxyAnchorLoss
from proxy_anchor.losses.proxy_nca import ProxyNCALoss
from proxy_anchor.losses.proxy_synthesis import ProxySynthesis
from proxy_anchor.losses.regulariser import partners, regularised_loss
from proxy_anchor.losses.tcm import ThresholdConsistentMargin

CHOICES = sorted(file.stem for file in (Path(entry.CONF) / "regulariser").glob("*.yaml") if file.stem != "none")
CLASSES, DIM = 5, 8
LABELS = torch.tensor([0, 0, 3, 1, 1, 4, 0])


@pytest.fixture
def embeddings() -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return F.normalize(torch.randn(len(LABELS), DIM, generator=generator, dtype=torch.float64)).requires_grad_()


@pytest.fixture
def loss() -> ProxyAnchorLoss:
    torch.manual_seed(1)
    return ProxyAnchorLoss(CLASSES, DIM, alpha=4).double()


def test_partners_are_the_next_rows_of_another_class() -> None:
    assert partners(LABELS).tolist() == [2, 2, 3, 5, 5, 6, 2]
    assert partners(torch.tensor([2, 2, 2])).tolist() == [0, 1, 2]


def test_proxy_synthesis_is_the_loss_of_the_batch_with_further_classes(
    embeddings: Tensor, loss: ProxyAnchorLoss
) -> None:
    share = np.random.default_rng(5).beta(0.4, 0.4)
    x, p = embeddings.detach(), F.normalize(loss.proxies.detach())
    rows, labels, proxies = [*x], LABELS.tolist(), [*p]
    for i in range(int(0.6 * len(LABELS))):
        j = partners(LABELS)[i]
        rows.append(share * x[i] + (1 - share) * x[j])
        proxies.append(share * p[LABELS[i]] + (1 - share) * p[LABELS[j]])
        labels.append(CLASSES + i)
    assert len(rows) == 7 + 4
    terms = regularised_loss(loss, {"ps": ProxySynthesis(mu=0.6)}, embeddings, LABELS, random=np.random.default_rng(5))
    assert [*terms] == ["loss"]
    assert terms["loss"].item() == pytest.approx(proxy_anchor(rows, labels, proxies, 4, 0.1), rel=1e-9)


def test_proxy_synthesis_of_one_class_still_draws_it_to_its_proxy(loss: ProxyAnchorLoss) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = F.normalize(torch.randn(3, DIM, generator=generator, dtype=torch.float64)).requires_grad_()
    labels = torch.ones(3, dtype=torch.int64)
    terms = regularised_loss(loss, {"ps": ProxySynthesis()}, rows, labels, random=np.random.default_rng(5))
    proxy = F.normalize(loss.proxies.detach())[1]
    towards, plain = (-torch.autograd.grad(each, rows)[0] @ proxy for each in (terms["loss"], loss(rows, labels)))
    assert (towards > 0.5 * plain).all()
    assert (plain > 0).all()


def test_metrix_weighs_mixed_embeddings_inside_the_logarithm(embeddings: Tensor, loss: ProxyAnchorLoss) -> None:
    share = np.random.default_rng(5).beta(2, 2)
    x, other = embeddings.detach(), partners(LABELS).tolist()
    positive, negative = [], []
    for c, p in enumerate(loss.proxies.detach()):
        pull = push = degrees = 0.0
        for i, j in enumerate(other):
            s = cosine(share * x[i] + (1 - share) * x[j], p)
            y = share * (LABELS[i] == c).item() + (1 - share) * (LABELS[j] == c).item()
            pull += y * math.exp(-4 * (s - 0.1))
            push += (1 - y) * math.exp(4 * (s + 0.1))
            degrees += y
        positive += [math.log1p(pull)] * (degrees > 0)
        negative.append(math.log1p(push))
    assert len(positive) == 4
    expected = sum(positive) / len(positive) + sum(negative) / len(negative)
    terms = regularised_loss(loss, {"mix": Metrix(0.4)}, embeddings, LABELS, random=np.random.default_rng(5))
    assert terms["loss"].item() == pytest.approx(loss(embeddings, LABELS).item())
    assert terms["mix"].item() == pytest.approx(0.4 * expected, rel=1e-9)
    for gradient in torch.autograd.grad(terms["mix"], [embeddings, loss.proxies]):
        assert gradient.isfinite().all()


def test_features_are_mixed_before_the_head(embeddings: Tensor, loss: ProxyAnchorLoss) -> None:
    head, features = nn.Linear(3, DIM).double(), torch.randn(len(LABELS), 3, dtype=torch.float64)
    share, other = np.random.default_rng(5).beta(2, 2), partners(LABELS)
    mixed = F.normalize(head(share * features + (1 - share) * features[other]))
    term = {"mix": MetrixFeatures(1.0)}
    given = {"random": np.random.default_rng(5), "features": features, "head": head}
    found = regularised_loss(loss, term, embeddings + 1, LABELS, **given)["mix"]  # the embeddings do not matter
    similarities = mixed @ F.normalize(loss.proxies).T
    y = share * F.one_hot(LABELS, CLASSES) + (1 - share) * F.one_hot(LABELS[other], CLASSES)
    pull = (y * torch.exp(-4 * (similarities - 0.1))).sum(0)
    push = ((1 - y) * torch.exp(4 * (similarities + 0.1))).sum(0)
    assert found.item() == pytest.approx((pull[pull > 0].log1p().mean() + push.log1p().mean()).item(), rel=1e-6)


@pytest.mark.parametrize("classes", [5, 12], ids=["fewer proxies than dimensions", "more"])
def test_anti_collapse_is_the_log_determinant_of_the_proxies(classes: int) -> None:
    proxies = torch.randn(classes, DIM, dtype=torch.float64)
    p = F.normalize(proxies).numpy()
    expected = np.linalg.slogdet(np.eye(DIM) + DIM / (classes * 0.5) * sum(np.outer(each, each) for each in p))[1] / 2
    assert AntiCollapse()(torch.empty(0), torch.empty(0), proxies).item() == pytest.approx(-expected, rel=1e-5)


def test_tcm_equals_loops_and_the_library(embeddings: Tensor) -> None:
    x = torch.cat([embeddings[:2].detach(), embeddings[:2].detach() + 0.2, embeddings[2:5].detach()])
    below, above = [], []
    for i in range(len(LABELS)):
        for j in range(i):
            s = cosine(x[i], x[j])
            if LABELS[i] == LABELS[j]:
                below += [0.95 - s] * (s <= 0.95)
            else:
                above += [s - 0.2] * (s >= 0.2)
    assert below
    assert above
    term = ThresholdConsistentMargin(1.0, 0.95, 0.2)
    assert term(x, LABELS, None).item() == pytest.approx(np.mean(below) + np.mean(above), rel=1e-9)
    library = ThresholdConsistentMarginLoss(margin_plus=0.95, margin_minus=0.2)
    assert term(x, LABELS, None).item() == pytest.approx(library(x, LABELS).item(), rel=1e-6)
    assert ThresholdConsistentMargin()(torch.eye(2, DIM), torch.tensor([0, 1]), None) == 0  # no hard pair


@pytest.mark.parametrize("gamma", [0.0, 50.0])
def test_nested_is_the_loss_of_the_first_numbers(embeddings: Tensor, loss: ProxyAnchorLoss, gamma: float) -> None:
    x, p = embeddings.detach(), loss.proxies.detach()
    expected = 0.0
    whole = torch.softmax(x @ x.T / 0.5, 1)
    for dim in (2, 4):
        expected += proxy_anchor([*x[:, :dim]], LABELS.tolist(), [*p[:, :dim]], 4, 0.1)
        cut = F.normalize(x[:, :dim])
        part = torch.softmax(cut @ cut.T / 0.5, 1)
        for i in range(len(x)):
            for j in range(len(x)):
                distance = whole[i, j] * (whole[i, j] / part[i, j]).log()
                expected += gamma / 2 * 0.5**2 * float(distance) / len(x)
    term = Nested(1.0, [2, 4], gamma=gamma, temperature=0.5)(embeddings, LABELS, loss.proxies, loss)
    assert term.item() == pytest.approx(expected, rel=1e-9)
    (gradient,) = torch.autograd.grad(term, embeddings)
    assert torch.equal(gradient[:, 4:], torch.zeros(len(x), DIM - 4, dtype=torch.float64))  # the whole teaches alone


def test_potential_field_is_the_energy_of_all_pairs(embeddings: Tensor) -> None:
    field = PotentialFieldLoss(CLASSES, DIM, num_proxies=2, alpha=3, delta=0.9).double()
    points = [*F.normalize(torch.cat([embeddings.detach(), field.proxies.detach()]))]
    classes = [*LABELS.tolist(), *(c for c in range(CLASSES) for _ in range(2))]
    energy, seen = 0.0, set()
    for a, one in zip(points, classes, strict=True):
        for b, other in zip(points, classes, strict=True):
            d = float((a - b).norm())
            near = d < 0.9
            seen.add((one == other, near))
            if one == other:
                energy -= 1 / 0.9**3 if near else 1 / d**3
            else:
                energy += (1 / d**3 if near else 1 / 0.9**3) - 1 / 0.9**3
    assert len(seen) == 4
    assert field(embeddings, LABELS).item() == pytest.approx(energy / len(points), rel=1e-9)


# How they are chosen and used


@pytest.mark.parametrize("name", CHOICES)
def test_every_choice_is_made_and_has_a_finite_gradient(name: str) -> None:
    cfg = compose_train(f"regulariser={name}", "loss=proxy_anchor", "embedding_dim=512")
    checks.check_config(cfg)
    [(key, made)] = [(key, instantiate(each)) for key, each in cfg.regulariser.items()]
    assert key == name
    torch.manual_seed(0)
    loss, head = ProxyAnchorLoss(20, 512), nn.Linear(7, 512)
    rows = F.normalize(torch.randn(8, 512)).requires_grad_()
    given = {"features": torch.randn(8, 7), "head": head, "random": np.random.default_rng(0)}
    with torch.autocast("cpu", torch.bfloat16):
        terms = regularised_loss(loss, {name: made}, rows, torch.arange(8) // 2, **given)
    plain = loss(rows, torch.arange(8) // 2)
    total = sum(terms.values())
    assert total.dtype == torch.float32
    assert total.item() != plain.item()
    for gradient in torch.autograd.grad(total, [rows, loss.proxies], allow_unused=True):
        assert gradient.isfinite().all()


def test_several_can_be_chosen_and_set() -> None:
    cfg = compose_train("regulariser=[tcm,anti_collapse]", "regulariser.tcm.weight=0.5", "embedding_dim=16")
    checks.check_config(cfg)
    assert {name: each.weight for name, each in cfg.regulariser.items()} == {"tcm": 0.5, "anti_collapse": 0.01}
    assert compose_train().regulariser == {}


def test_a_value_of_one_that_was_not_chosen_says_how_to_choose_it() -> None:
    with pytest.raises(ConfigCompositionException) as error:
        compose_train("regulariser.tcm.weight=0.5")
    said = "unknown key 'regulariser.tcm'. Choose it first: regulariser=tcm. Known in regulariser: none."
    assert messages.reason(error.value) == said


def test_dimensions_are_those_of_nested_alone() -> None:
    own = "+regulariser.mine={_target_: mine.Shapes, dims: 3}"
    cfg = compose_train("regulariser=nested", "regulariser.nested.dims=[32,16]", own)
    assert nested_dims(cfg) == [16, 32]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["regulariser=nested", "loss=triplet"], "regulariser Nested needs a ProxyLoss .*received PMLLoss"),
        (["regulariser=proxy_synthesis", "loss=potential_field"], "ProxySynthesis needs a ProxyLoss"),
        (["regulariser=metrix", "loss=proxy_nca"], "Metrix needs a ProxyAnchorLoss"),
        (
            ["regulariser=nested", "embedding_dim=128"],
            r"dims=\[64, 128, 256\]: expected numbers below embedding_dim=128, as in .*\[32,64\]",
        ),
        (["regulariser=tcm", "regulariser.tcm.weight=-1"], "regulariser weight=-1"),
        (["regulariser=nested", "regulariser.nested.dims=64"], r"dims=64: expected a list, as in dims=\[64\]"),
        (["+regulariser.mine._target_=torch.nn.Identity"], "regulariser.mine: expected a .*received Identity"),
    ],
)
def test_what_does_not_fit_is_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(Exception, match=message) as error:
        checks.check_config(compose_train(*arguments))
    assert isinstance(error.value.__cause__ or error.value, UsageError)


def test_any_proxy_loss_can_be_mixed(embeddings: Tensor) -> None:
    loss = ProxyNCALoss(CLASSES, DIM).double()
    terms = regularised_loss(loss, {"b": ProxySynthesis()}, embeddings, LABELS, random=np.random.default_rng(0))
    assert terms["loss"] != loss(embeddings, LABELS)
