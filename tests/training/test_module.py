from __future__ import annotations

import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from commands import TINY_GLYPHS, compose_train, one_line
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from proxy_anchor import ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.losses.metrix import Metrix
from proxy_anchor.training.callbacks.recall import RecallCallback
from proxy_anchor.training.finite import FiniteGuard, NotFinite
from proxy_anchor.training.module import MetricLearner
from train import train

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def snapshot(module: torch.nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def moved(before: dict[str, Tensor], after: dict[str, Tensor]) -> set[str]:
    return {name for name in before if not torch.equal(before[name], after[name])}


class Watch(pl.Callback):
    """Keeps every epoch's tensors, rates and number of optimizer states."""

    def __init__(self) -> None:
        self.states: list[dict[str, Tensor]] = []
        self.rates: list[list[float]] = []
        self.moments: list[set[str]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append(snapshot(pl_module))

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rates.append([group["lr"] for group in trainer.optimizers[0].param_groups])

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.states.append(snapshot(pl_module))
        names = {parameter: name for name, parameter in pl_module.named_parameters()}
        self.moments.append({names[parameter] for parameter in trainer.optimizers[0].state})


class Bad(ProxyAnchorLoss):
    """Not finite from its n-th call on, or at its n-th call only."""

    def __init__(self, at: int, once: bool = False) -> None:
        super().__init__(3, 8)
        self.at, self.once, self.calls = at, once, 0

    def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        self.calls += 1
        bad = self.calls == self.at if self.once else self.calls >= self.at
        return super().forward(embeddings, labels) * (float("nan") if bad else 1.0)


def test_a_mix_is_of_seed_epoch_and_batch_alone(make_learner: Callable, monkeypatch: pytest.MonkeyPatch) -> None:
    images = torch.randint(0, 256, (6, 3, 32, 32), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))

    def term(seed: int, epoch: int, batch: int) -> float:
        learner = make_learner(regularisers={"mixed": Metrix()}, seed=seed)
        monkeypatch.setattr(MetricLearner, "current_epoch", epoch)
        torch.rand(seed + epoch + batch)
        return learner.loss_terms(images, torch.arange(6) % 3, batch)["mixed"].item()

    places = [(1, 2, 3), (2, 2, 3), (1, 3, 3), (1, 2, 4)]
    found = [term(*each) for each in places]
    assert len({*found}) == 4
    assert [term(*each) for each in places] == found


def test_warmup_moves_head_and_proxies_only_and_then_everything(make_learner: Callable, fit: Callable) -> None:
    watch, learner = Watch(), make_learner(warmup_epochs=2)
    fit(learner, max_epochs=3, callbacks=[watch])
    start, first, second, third = watch.states
    trainable = {name for name, parameter in learner.named_parameters() if parameter.requires_grad}
    others = {"net.head.weight", "net.head.bias", "loss.proxies"}
    assert moved(start, first) == moved(first, second) == others
    assert moved(second, third) == trainable
    assert watch.moments == [others, others, trainable]  # AdamW has not seen the backbone in warm-up
    assert all(parameter.requires_grad for parameter in learner.parameters())


def test_rates_are_printed_and_the_schedule_counts_the_warmup(
    make_learner: Callable, fit: Callable, capsys: pytest.CaptureFixture
) -> None:
    watch, scheduler = Watch(), partial(StepLR, step_size=2, gamma=0.5)
    learner = make_learner(lr=0.001, proxy_lr_mult=10, scheduler=scheduler, warmup_epochs=1)
    fit(learner, max_epochs=3, callbacks=[watch])
    assert watch.rates == [[0.001, 0.001, 0.01], [0.001, 0.001, 0.01], [0.0005, 0.0005, 0.005]]
    size = sum(parameter.numel() for parameter in learner.net.backbone.parameters())
    printed = f"backbone 0.001 ({size:,} parameters) | head 0.001 (776 parameters) | proxies 0.01 (24 parameters)"
    assert f"learning rates: {printed}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("at", "once", "accumulate"), [(1, False, 1), (2, False, 1), (1, True, 2)], ids=["first", "second", "accumulated"]
)
def test_the_first_loss_that_is_not_finite_stops_before_any_tensor_is_damaged(
    at: int, once: bool, accumulate: int, make_learner: Callable, fit: Callable
) -> None:
    learner = make_learner(Bad(at, once))
    before = snapshot(learner)
    with pytest.raises(UsageError, match=rf"loss is not finite at step {at - 1} \(epoch 1\), and no step"):
        fit(learner, max_epochs=3, accumulate_grad_batches=accumulate)
    after = snapshot(learner)
    assert all(value.isfinite().all() for value in after.values())
    assert bool(moved(before, after)) == (at > 1)


def test_a_gradient_that_is_not_finite_stops_although_the_loss_is(make_learner: Callable, fit: Callable) -> None:
    class Broken(torch.nn.Module):
        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return (embeddings - embeddings.detach()).abs().sqrt().sum()  # 0, with gradient inf x 0

    learner = make_learner(Broken())
    before = snapshot(learner)
    one_line(fit, learner, match=r"a gradient is not finite at step 0 \(epoch 1\), and")
    assert not moved(before, snapshot(learner))


def test_gradients_are_clipped_by_value_on_network_and_proxies(make_learner: Callable, fit: Callable) -> None:
    class Steep(ProxyAnchorLoss):
        def forward(self, embeddings: Tensor, labels: Tensor) -> Tensor:
            return super().forward(embeddings, labels) * 1e6

    def largest(**settings: object) -> dict[str, float]:
        trainer = fit(make_learner(Steep(3, 8)), max_steps=1, **settings)
        groups = trainer.optimizers[0].param_groups
        return {group["name"]: max(float(p.grad.abs().max()) for p in group["params"]) for group in groups}

    learner = make_learner()  # without gradients, as in Lightning's last pass of weight averaging
    learner.configure_gradient_clipping(torch.optim.AdamW(learner.parameters(), fused=True), 10, "value")
    assert largest() == {"backbone": 10, "head": 10, "proxies": 10}
    assert min(largest(gradient_clip_val=None).values()) > 10  # there was something to clip
    for value, left in ((0, 100), (-1, 100), (10, 10)):
        learner.loss.proxies.grad = torch.full_like(learner.loss.proxies, 100)
        learner.configure_gradient_clipping(torch.optim.RMSprop([learner.loss.proxies]), value, "value")
        assert (learner.loss.proxies.grad == left).all()


def test_nothing_fetches_the_loss_in_every_step(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Each Tensor.item() would wait for the GPU; only the guard's look at the step before is meant.
    cfg = compose_train(f"dataset.root={tmp_path}/data", *TINY_GLYPHS, "logger=csv", "trainer.accelerator=cpu")
    waits: list[str] = []

    def fetch(self: Tensor, original: Callable = Tensor.item) -> object:
        frames = [frame.name for frame in traceback.extract_stack()]
        waits.extend(name for name in ("training_step", "on_batch_end") if name in frames)
        return original(self)

    monkeypatch.setattr(Tensor, "item", fetch)
    train(cfg, tmp_path / "run")
    assert waits == []


def test_fit_test_and_predict_by_a_trainer_of_ones_own(
    make_data: Callable, make_learner: Callable, make_trainer: Callable
) -> None:
    recall, learner = RecallCallback((1, 2), engine="torch"), make_learner()
    trainer = make_trainer(callbacks=[recall])
    trainer.fit(learner, make_data())
    [tested] = trainer.test(learner, make_data(), verbose=False)
    assert (tested["test/recall_at_1"], tested["test/recall_at_2"]) == (*recall.history[0].recall.values(),)
    predicted = torch.cat([each["embeddings"] for each in trainer.predict(learner, make_data())])
    torch.testing.assert_close(predicted, recall.selected_embeddings[0])
    trainer.validate(learner, make_data(), verbose=False)
    assert [result.epoch for result in recall.history] == [1]


def test_plain_loaders_of_pairs_train_and_the_callback_says_what_it_needs(
    make_learner: Callable, make_trainer: Callable
) -> None:
    pairs = [(torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8), index % 3) for index in range(6)]
    loader, learner = torch.utils.data.DataLoader(pairs, batch_size=6), make_learner()
    before = snapshot(learner)
    make_trainer().fit(learner, loader)
    assert "loss.proxies" in moved(before, snapshot(learner))
    with pytest.raises(UsageError, match=r"^RecallCallback reads the splits of an ImageDataModule: pass one as"):
        make_trainer(callbacks=[RecallCallback((1,))]).fit(learner, loader, loader)


def test_the_trainers_own_sampler_of_several_devices_is_refused_with_the_repair(
    make_data: Callable, make_trainer: Callable
) -> None:
    data, trainer = make_data(), make_trainer(devices=2, strategy="ddp", use_distributed_sampler=True)
    data.trainer = trainer
    one_line(data.setup, "fit", match="pass use_distributed_sampler=False")


# ---- the guard


def test_a_fused_optimizer_skips_the_step_by_itself() -> None:
    # What a GPU relies on, where the answer reaches the host a step later.
    weight = torch.nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([weight], lr=0.1, fused=True)
    guard = FiniteGuard()
    for gradient, moved in ((float("nan"), False), (1.0, True), (float("inf"), False)):
        before = weight.detach().clone()
        weight.grad = torch.full((3,), gradient)
        optimizer.found_inf = guard.show("", torch.tensor(True), torch.nn.utils.get_total_norm([weight.grad]))
        optimizer.step()
        assert bool((weight != before).any()) == moved
        assert weight.isfinite().all()
    assert optimizer.state[weight]["step"] == 1


def test_the_last_step_of_an_epoch_is_checked_before_its_weights_are_saved(make_learner: Callable) -> None:
    learner = make_learner()
    learner._guard.show("at step 7", torch.tensor(False), torch.tensor(1.0))  # on a GPU the next step would look at it
    with pytest.raises(NotFinite, match="the loss is not finite at step 7"):
        learner.on_train_epoch_end()
