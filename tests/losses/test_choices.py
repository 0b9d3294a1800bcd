"""Every file of conf/loss: made as train.py makes it, one step, half precision, saving and loading."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from commands import TINY_GLYPHS, compose_train, one_line, run_ok
from hydra.utils import instantiate
from torch import Tensor, nn

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.pml import PMLLoss

FOLDER = Path(entry.CONF) / "loss"
LEARNABLE = {
    "proxy_anchor": (20, 16),
    "proxy_nca": (20, 16),
    "proxy_nca_pp": (20, 16),
    "potential_field": (300, 16),
    "soft_triple": (16, 200),
    "arcface": (16, 20),
    "cosface": (16, 20),
    "normalized_softmax": (16, 20),
    "margin": (20,),
}
ON_PAIRS = {
    "contrastive": 4,
    "triplet": 4,
    "n_pair": 2,
    "lifted_structure": 4,
    "multi_similarity": 4,
    "margin": 4,
    "ranked_list": 4,
    "circle": 4,
    "supcon": 4,
}
CHOICES = sorted(LEARNABLE | ON_PAIRS)
LABELS = torch.arange(20).repeat_interleave(4)


def make(name: str) -> nn.Module:
    torch.manual_seed(1)
    return instantiate(compose_train(f"loss={name}").loss, num_classes=20, embedding_dim=16)


def make_embeddings() -> Tensor:
    torch.manual_seed(2)
    return nn.functional.normalize(torch.randn(20, 16).repeat_interleave(4, 0) + torch.randn(80, 16)).requires_grad_()


def test_these_are_all_choices() -> None:
    assert sorted(file.stem for file in FOLDER.glob("*.yaml")) == sorted([*CHOICES, "pml"])


@pytest.mark.parametrize("name", CHOICES)
def test_each_has_its_sampler(name: str) -> None:
    cfg = compose_train(f"loss={name}")
    assert cfg.data.images_per_class == ON_PAIRS.get(name)
    checks.check_config(cfg)


@pytest.mark.parametrize("name", CHOICES)
def test_one_step_moves_embeddings_and_every_learnable_tensor(name: str) -> None:
    loss, embeddings = make(name), make_embeddings()
    assert [tuple(each.shape) for each in loss.parameters()] == ([LEARNABLE[name]] if name in LEARNABLE else [])
    before = [each.detach().clone() for each in loss.parameters()]
    value = loss(embeddings, LABELS)
    assert (value.shape, value.dtype) == ((), torch.float32)
    assert value.isfinite()
    optimizer = torch.optim.AdamW([embeddings, *loss.parameters()], lr=1e-2)
    start = embeddings.detach().clone()
    value.backward()
    optimizer.step()
    assert not torch.equal(embeddings, start)
    for old, new in zip(before, loss.parameters(), strict=True):
        assert not torch.equal(old, new)
    assert loss(embeddings, LABELS) < value


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_changes_neither_tensors_nor_arithmetic(name: str, dtype: torch.dtype) -> None:
    loss, embeddings = make(name), make_embeddings()
    before = copy.deepcopy(loss.state_dict())
    torch.manual_seed(3)  # margin draws its triplets
    plain = loss(embeddings, LABELS)
    loss.to(dtype)
    torch.manual_seed(3)
    with torch.autocast("cpu", dtype=dtype):
        cast = loss(embeddings, LABELS)
    assert torch.equal(plain, cast)
    assert loss(embeddings.to(dtype), LABELS).dtype == torch.float32
    for key, value in loss.state_dict().items():
        assert value.dtype == torch.float32
        assert torch.equal(value, before[key])


@pytest.mark.parametrize("name", CHOICES)
@pytest.mark.parametrize(
    "labels", [[0, 0, 0, 0], [0, 1, 2, 3], [0, 0, 1, 1]], ids=["one class", "no positives", "two pairs"]
)
def test_poor_batches_are_finite_with_finite_gradients(name: str, labels: list[int]) -> None:
    loss = make(name)
    for rows in (torch.eye(4, 16), torch.ones(4, 16)):
        embeddings = nn.functional.normalize(rows).requires_grad_()
        value = loss(embeddings, torch.tensor(labels))
        value.backward()
        assert value.isfinite()
        assert embeddings.grad.isfinite().all()
        assert all(each.grad is None or each.grad.isfinite().all() for each in loss.parameters())


@pytest.mark.parametrize("name", CHOICES)
def test_bad_batches_are_refused_by_name(name: str) -> None:
    loss = make(name)
    one_line(loss, torch.randn(2, 16), torch.tensor([0, 20]), match=r"label 20 is outside \[0, 20\)")
    one_line(loss, torch.randn(2, 3), torch.tensor([0, 1]), match=r"expected embeddings \(B, 16\)")


# Any loss, miner and distance of the library


def test_any_loss_miner_and_distance_by_target() -> None:
    library = "pytorch_metric_learning"
    cfg = compose_train(
        "loss=pml",
        f"loss.loss._target_={library}.losses.TripletMarginLoss",
        "+loss.loss.margin=0.3",
        f"loss.miner={{_target_: {library}.miners.BatchHardMiner}}",
        f"loss.distance={{_target_: {library}.distances.SNRDistance}}",
    )
    loss = instantiate(cfg.loss, num_classes=20, embedding_dim=16)
    assert loss.loss.margin == 0.3
    assert loss.loss.distance is loss.miner.distance
    assert type(loss.miner).__name__ == "BatchHardMiner"
    assert loss(make_embeddings(), LABELS) > 0


@pytest.mark.parametrize(
    ("name", "sizes"), [("SubCenterArcFaceLoss", 1), ("ProxyAnchorLoss", 1), ("FastAPLoss", 0), ("SphereFaceLoss", 1)]
)
def test_the_library_gets_the_sizes_it_takes(name: str, sizes: int) -> None:
    import pytorch_metric_learning.losses as library

    loss = PMLLoss(20, 16, getattr(library, name))
    assert len(list(loss.parameters())) == sizes
    assert loss(make_embeddings(), LABELS).isfinite()


def test_what_takes_no_labels_is_refused_in_one_line() -> None:
    from pytorch_metric_learning import losses, miners

    for made, miner, message in (
        (losses.VICRegLoss, None, "VICRegLoss does not take these embeddings with labels"),
        (nn.CrossEntropyLoss, None, "CrossEntropyLoss does not take"),
        (losses.TripletMarginLoss, miners.EmbeddingsAlreadyPackagedAsTriplets(), "with EmbeddingsAlreadyPackaged"),
    ):
        with pytest.raises(UsageError, match=message):
            PMLLoss(20, 16, made, miner)(make_embeddings(), LABELS)


def test_the_share_of_images_in_p_x_k_batches_is_printed_and_logged(tmp_path: Path) -> None:
    arguments = ("loss=triplet", "data.images_per_class=4", "run=p_x_k", *TINY_GLYPHS)
    assert "batches: 4 classes x 4 images, for" in run_ok("train.py", *arguments, cwd=tmp_path)
    assert "train/images_seen" in (tmp_path / "runs" / "p_x_k" / "metrics.csv").read_text()
