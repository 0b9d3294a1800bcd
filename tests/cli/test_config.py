"""From the config to whether the network is compiled and to the strategy of several processes."""

from __future__ import annotations

import functools
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch
from commands import compose_train
from omegaconf import OmegaConf, open_dict

from proxy_anchor.cli import config, start
from proxy_anchor.data.table import Splits, make_tables
from proxy_anchor.errors import UsageError
from proxy_anchor.training import compile, distributed
from proxy_anchor.training.callbacks.recall import RecallCallback
from proxy_anchor.training.distributed import LeanDDP

COMPILED = ("backbone=test_efficientnet", "backbone.pretrained=false", "compile=true", "data.batch_size=8")


class Net:
    """Stands for a network whose check is, or is not, in the compiler's cache."""

    def train(self) -> Net:
        return self


def test_auto_compiles_long_runs_and_networks_that_an_earlier_run_compiled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    cfg = compose_train(*COMPILED, "compile=auto", "trainer.max_epochs=10", "trainer.accelerator=cpu")
    asked: list[tuple] = []
    monkeypatch.setattr(compile, "check_file", lambda *given: asked.append(given[1:3]) or tmp_path / "check.json")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    decide = functools.partial(config.whether_to_compile, cfg, Net())
    assert decide(50_000, None) is True
    assert asked == []
    assert capsys.readouterr().out == ""
    assert decide(49_999, None) is False
    assert "499,990 training images" in capsys.readouterr().out
    assert asked == [((8, 3, 48, 48), "32-true")]
    compile.remember_check(tmp_path / "check.json", compile.GradientCheck(0.9, 0.9))
    assert decide(49_999, None) is True
    monkeypatch.setattr(distributed, "world_size", lambda: 2)
    monkeypatch.setattr(distributed, "decided_by_first", lambda decide: not decide())  # the first has another cache
    assert decide(49_999, None) is False
    assert asked[-1] == ((4, 3, 48, 48), "32-true")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert decide(49_999, None) is False
    # A run that goes on stays as it began.
    for began in (True, False):
        assert decide(1_000_000, SimpleNamespace(metadata={"config": {"compile": began}})) is began
    for given in (True, False):
        cfg.compile = given
        assert decide(1, None) is given


@pytest.mark.parametrize(
    ("environment", "given", "ours"),
    [
        ({}, {}, False),
        ({}, {"devices": 2}, False),  # this process starts the others
        ({"LOCAL_RANK": "0"}, {"devices": 2}, True),
        ({"LOCAL_RANK": "0"}, {"num_nodes": 2}, True),
        ({"LOCAL_RANK": "0"}, {}, False),  # torchrun, with one process
        ({"SLURM_STEP_NUM_TASKS": "2"}, {"devices": 2}, True),
        ({}, {"strategy": "ddp"}, True),
        ({"LOCAL_RANK": "0"}, {"devices": 2, "strategy": "ddp_find_unused_parameters_true"}, False),
    ],
)
def test_several_processes_train_with_this_packages_form_of_ddp(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], given: dict[str, object], ours: bool
) -> None:
    for name in ("LOCAL_RANK", "SLURM_STEP_NUM_TASKS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cfg = compose_train()
    with open_dict(cfg):
        cfg.trainer.update(given)
    found = start.strategy(cfg)
    assert type(found) is LeanDDP if ours else found == cfg.trainer.strategy


@pytest.mark.parametrize(
    ("classes", "images", "k", "gib", "num_ranks", "expected"),
    [
        (15, 25, None, 0, 1, (32, None)),
        (15, 25, None, 80, 1, (180, None)),
        (15, 25, None, 24, 1, (180, None)),
        (15, 25, None, 6, 1, (50, None)),  # 0.12 GiB each
        (15, 25, None, 6, 2, (100, None)),
        (15, 25, 4, 6, 1, (48, 4)),
        (15, 25, None, 80, 7, (175, None)),
        (15, 20, None, 80, 1, (150, None)),
        (2, 3, None, 0, 1, (3, None)),
        (2, 3, 4, 0, 1, (6, 3)),
        (5, 25, 4, 0, 1, (20, 4)),
        (15, 25, 4, 80, 3, (60, 4)),
        (2, 1, 4, 0, 1, (4, 2)),  # which the sampler refuses
    ],
)
def test_the_batch_of_own_images_fits_them_and_the_machine(classes, images, k, gib, num_ranks, expected, monkeypatch):
    """gib: memory of the smallest of the GPUs; 0: there is none."""
    memory = [96 * 2**30, gib * 2**30]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gib > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(memory))
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=memory[device])
    )
    cfg = compose_train("dataset=folder", f"data.images_per_class={'null' if k is None else k}")
    own = [(Path(f"{name}/{number}.png"), str(name)) for name in range(classes) for number in range(images)]
    [table] = make_tables(own)
    recall = RecallCallback(cfg.recall_k)
    said = config.fit_to_images(cfg, Splits("own", table, table), recall, num_ranks=num_ranks)
    assert (cfg.data.batch_size, cfg.data.images_per_class) == expected
    assert said.startswith(f"chosen for {classes * images} training images: data.")
    assert f"data.batch_size={expected[0]}" in said
    fitting = [k for k in (1, 2, 4, 8) if k < classes * images]
    assert recall.k == fitting
    assert cfg.recall_k == [1, 2, 4, 8]
    assert ("recall_k=" in said) == (len(fitting) < 4)
    given = compose_train("dataset=folder", "data.batch_size=3", "recall_k=1")
    assert config.fit_to_images(given, Splits("own", table, table), RecallCallback(1)) == ""
    assert (given.data.batch_size, given.recall_k) == (3, 1)
    benchmark = compose_train("dataset=cars", "recall_k=[1,1000]")
    assert config.fit_to_images(benchmark, Splits("own", table, table), RecallCallback([1, 1000])) == ""
    assert benchmark.data.batch_size == 180
    benchmark.data.batch_size = None
    config.fit_to_images(benchmark, Splits("own", table, table), RecallCallback([1, 1000]))
    assert benchmark.data.batch_size == min(int(gib / 0.12) or 32, 180, classes * images // 2)


def test_training_needs_two_classes() -> None:
    [one] = make_tables([(Path("a.png"), "a"), (Path("b.png"), "a")])
    with pytest.raises(UsageError, match="own has 1 training class: without a second one there are no negatives"):
        config.fit_to_images(compose_train("dataset=folder"), Splits("own", one, one), RecallCallback(1))


@pytest.mark.parametrize("k", ["0", "1", "2.5", "x"])
def test_images_per_class_that_make_no_batch_are_refused(k):
    [table] = make_tables([(Path(f"{number}.png"), str(number % 4)) for number in range(16)])
    cfg = compose_train("dataset=folder", f"data.images_per_class={k}")
    with pytest.raises(UsageError, match=rf"data.images_per_class='?{k}'?: expected a whole number of at least 2"):
        config.fit_to_images(cfg, Splits("own", table, table), RecallCallback(1))


def test_what_was_chosen_is_kept_on_every_rank(tmp_path, monkeypatch) -> None:
    arguments, told = ["dataset=folder", "dataset.root=.", "trainer=cpu"], []
    OmegaConf.save(compose_train(*arguments, "data.batch_size=6"), tmp_path / "config.yaml", resolve=True)
    (tmp_path / "result.json").write_text("{}")

    def decided_by_first(decide):
        told.extend([] if told else [decide()])
        return told[0]

    monkeypatch.setattr("proxy_anchor.training.distributed.decided_by_first", decided_by_first)
    monkeypatch.setattr(start, "is_distributed", lambda: True)
    for name in ("take", "_bare_trainer", "check_processes"):
        monkeypatch.setattr(start, name, MagicMock())
    for _ in range(2):  # ranks
        cfg = compose_train(*arguments)
        assert start.resume_or_start(cfg, tmp_path) == ({}, None)
        assert cfg.data.batch_size == 6
