"""Train an embedding network with its proxies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from proxy_anchor.cli import checks, config, messages, start
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import check_int
from proxy_anchor.training.run_lock import held
from proxy_anchor.utils import FAILURE_FILE, RESULT_FILE, rank, selecting_recall


def train(cfg: DictConfig, folder: Path, callbacks: Sequence[Any] = ()) -> dict[str, Any]:
    """Train in `folder` with further callbacks; returns the content of result.json.

    Raises FolderTaken where another process works in that folder, or it holds another run.
    """
    with held(folder):
        return _train(cfg, folder, callbacks)


def _train(cfg: DictConfig, folder: Path, callbacks: Sequence[Any]) -> dict[str, Any]:
    import pytorch_lightning as pl
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import naming_bad_images
    from proxy_anchor.data.datamodule import ImageDataModule
    from proxy_anchor.reports.run import finish_run, make_result
    from proxy_anchor.training.callbacks.checkpoint import LAST, BackgroundWriter, previous_version, run_checkpoints
    from proxy_anchor.training.callbacks.health import Health
    from proxy_anchor.training.callbacks.memory import PeakMemory, reset_peak_memory
    from proxy_anchor.training.callbacks.recall import SELECTING, RecallCallback, format_recall
    from proxy_anchor.training.callbacks.startup import Startup
    from proxy_anchor.training.distributed import SyncBatchNorms
    from proxy_anchor.training.float32 import set_float32_precision
    from proxy_anchor.training.module import MetricLearner
    from proxy_anchor.training.run_folder import RunRecord, StopOnSignal

    # All checks of the config come before the data.
    checks.check_config(cfg)
    result, before = start.resume_or_start(cfg, folder)
    if result is not None:
        return result
    set_float32_precision(cfg.float32_precision)  # an earlier run of this process may have had another
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    scored = config.is_scored(cfg)
    recall = RecallCallback(cfg.recall_k, engine=cfg.search_engine.name, scored=scored, dims=config.nested_dims(cfg))
    further = [*callbacks, *config.further_callbacks(cfg)]
    bars = config.progress_bars(cfg, further)
    startup, health, memory = Startup(entry.STARTED), Health(folder), PeakMemory()
    trainer = instantiate(
        cfg.trainer,
        strategy=start.strategy(cfg),
        logger=[instantiate(each, save_dir=folder) for each in cfg.logger.values()],
        callbacks=[
            startup,
            memory,
            recall,
            *further,
            health,
            RunRecord(),
            StopOnSignal(),
            *run_checkpoints(folder, SELECTING if scored else None, cfg.trainer.check_val_every_n_epoch, further),
            *(each for each in bars if each not in further),
        ],
        enable_progress_bar=bool(bars),
        plugins=[BackgroundWriter(), SyncBatchNorms()],
        default_root_dir=folder,
    )
    start.check_processes(cfg, trainer)
    reset_peak_memory(trainer.strategy.root_device)
    net = config.make_network(cfg)
    splits = config.load_splits(cfg)
    chosen = config.fit_to_images(cfg, splits, recall, num_ranks=trainer.world_size)
    data = ImageDataModule(splits, seed=cfg.seed, **cfg.data, **cfg.dataset.images)
    recall.check(data.splits)
    loss = instantiate(cfg.loss, num_classes=data.splits.train.num_classes, embedding_dim=cfg.embedding_dim)
    cfg.compile = config.whether_to_compile(cfg, net, len(data.splits.train), before)
    metadata = config.run_metadata(cfg, data.splits, before)
    learner = MetricLearner(
        net,
        loss,
        regularisers=config.make_regularisers(cfg),
        seed=cfg.seed,
        **config.learning(cfg),
        metadata=metadata,
        **config.compilation(cfg, data.num_eval_images),
    )

    described = [f"run folder: {folder}", data.describe(), config.describe_training(cfg, net), chosen]
    print("\n".join(filter(None, [*described, config.describe_stopping(trainer)])), flush=True)
    with messages.explained(cfg), naming_bad_images(data.splits, data.on_bad_image):
        if before is None:
            trainer.validate(learner, data, verbose=False)
            config.write_beginning(cfg, folder, data.splits)  # not earlier: a refused run writes nothing
            for logger in trainer.loggers:
                logger.log_hyperparams(metadata["config"])
            untrained = format_recall(recall.history[0].recall) if scored else "Recall is not computed"
            print(f"{data.describe_loading()}\nbefore training: {untrained}", flush=True)
        trainer.fit(learner, data, ckpt_path=before and before.path)

    if not scored:
        print(f"no {RESULT_FILE}: a run on a part of the images has no Recall.", flush=True)
        return {}
    result = make_result(recall, data, trainer, startup.seconds, memory, resumed=before is not None) | {
        "warnings": health.warnings,
        "float32_precision": cfg.float32_precision,
        "data": metadata["data"],
        "seed": cfg.seed,
        "config": metadata["config"],
    }
    if trainer.is_global_zero:
        previous_version(folder / LAST).unlink(missing_ok=True)
        finish_run(folder, learner.metadata["config"], result, data, recall.selected_embeddings)
    return result


def cross_validate(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """One run per fold of the training classes in its own folder; returns their mean."""
    from proxy_anchor.reports.run import fold_summary, write_folds

    checks.require_scored(cfg, "validation=folds")
    check_int("validation.num_folds", cfg.validation.num_folds, 2)
    if cfg.resume == "never":  # otherwise each fold looks into its own folder
        start.require_new(folder)
    if rank() == 0:
        (folder / FAILURE_FILE).unlink(missing_ok=True)
    results = []
    for fold in range(cfg.validation.num_folds):
        job = deepcopy(cfg)  # a run writes into its config what it chooses for its own images
        job.validation.fold = fold
        results.append(train(job, folder / f"fold{fold}"))
        entry.forget_last_run()
    combined = fold_summary(results)
    if rank() == 0:
        print(write_folds(folder, combined))
    return combined


def main(cfg: DictConfig) -> float:
    """Train; returns the Recall at the smallest K that selected the epoch, for a sweep."""
    folder = entry.output_folder()
    if (num_ranks := start.ranks_to_start(cfg, folder)) > 1:
        with held(folder):
            result = entry.run_as_ranks(cfg, folder, num_ranks)
    elif cfg.validation.name == "folds" and cfg.validation.fold is None:
        result = cross_validate(cfg, folder)
    else:
        result = train(cfg, folder)
    return selecting_recall(result) if result else math.nan


if __name__ == "__main__":
    entry.run(main, "train")
