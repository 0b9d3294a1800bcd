"""Evaluate a checkpoint on its own data set or another one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from proxy_anchor.cli import checks, config
from proxy_anchor.cli import main as entry


def evaluate(cfg: DictConfig) -> dict[str, float]:
    """Print and return {metric: value in [0, 1]}."""
    import pytorch_lightning as pl
    import torch
    from hydra.utils import instantiate
    from torch import nn

    from proxy_anchor.data.bad_images import naming_bad_images
    from proxy_anchor.data.datamodule import ImageDataModule
    from proxy_anchor.inference.gallery import warn_of_collapse
    from proxy_anchor.retrieval.clustering import nmi
    from proxy_anchor.retrieval.metrics import metrics_at_r
    from proxy_anchor.retrieval.reranking import reranked_metrics
    from proxy_anchor.training.callbacks.recall import RecallCallback, format_recall
    from proxy_anchor.training.checkpoint import checkpoint_of, load_checkpoint, load_embedding_net
    from proxy_anchor.training.float32 import set_float32_precision
    from proxy_anchor.training.module import MetricLearner
    from proxy_anchor.utils import write_json

    checks.check_use(cfg, "evaluate")
    saved = load_checkpoint(checkpoint_of(cfg.checkpoint))
    trained = OmegaConf.create(saved.metadata["config"])
    if cfg.search_with is not None:
        trained.backbone.search_with = saved.metadata["model"]["search_with"] = cfg.search_with
    net = load_embedding_net(saved)
    set_float32_precision(trained.float32_precision)
    if cfg.dataset.name == "from_checkpoint":
        recall_k = trained.recall_k
        if cfg.dataset.root is not None:
            trained.dataset.load.root = config.absolute(cfg.dataset.root)
        splits = config.load_splits(trained, training=False)
    else:
        config.make_paths_absolute(cfg)
        if "test_fraction" in cfg.dataset and cfg.dataset.test_fraction is None:
            cfg.dataset.test_fraction = 1.0  # no training here: a data set without a split is searched whole
        recall_k, splits = cfg.dataset.recall_k, instantiate(cfg.dataset.load)

    # Images are prepared as in training, for every data set.
    batch_size = cfg.data.eval_batch_size or trained.data.eval_batch_size or trained.data.batch_size
    loading = {"eval_batch_size": batch_size, "num_workers": cfg.data.num_workers}
    data = ImageDataModule(splits, batch_size=1, **loading, **trained.dataset.images)
    recall = RecallCallback(
        recall_k if cfg.recall_k is None else cfg.recall_k,
        engine=cfg.search_engine.name,
        dims=config.nested_dims(trained),
    )
    if cfg.recall_k is None:
        recall.fit(splits)  # as training did
    recall.check(splits)
    bars = config.progress_bars(trained, [])
    trainer = pl.Trainer(
        devices=1,
        precision=trained.trainer.precision,
        callbacks=[recall, *bars],
        enable_progress_bar=bool(bars),
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    print(data.describe(), flush=True)
    if seen := set(saved.metadata["classes"]) & set(splits.query.classes):
        print(f"note: {len(seen)} of {splits.query.num_classes} searched classes have the name of a training class.")
    with naming_bad_images(splits):
        compilation = config.compilation(trained, data.num_eval_images)  # as in training, for equal numbers
        trainer.validate(MetricLearner(net, nn.Identity(), **compilation), data, verbose=False)

    recalls = recall.history[-1].recall
    print(f"{saved.path} (epoch {saved.epoch}): {format_recall(recalls, digits=2)}")
    # Ranked on the network's device.
    embeddings = [each.to(trainer.strategy.root_device) for each in recall.selected_embeddings]
    warn_of_collapse(torch.cat(embeddings))
    gallery: dict[str, Any] = {}
    if splits.gallery is not None:
        gallery = {"gallery": embeddings[1], "gallery_labels": splits.gallery.labels}
    logged, place = trainer.callback_metrics, f"{splits.searched}/"  # of the validation classes too
    nested = {key.removeprefix(place): float(logged[key]) for key in logged if key.startswith(place) and "_dim" in key}
    others = nested | metrics_at_r(embeddings[0], splits.query.labels, **gallery)
    if cfg.rerank != "none":
        others |= reranked_metrics(cfg.rerank, embeddings[0], splits.query.labels, list(recalls), **gallery)
    if cfg.nmi:
        others["nmi"] = nmi(embeddings[0], splits.query.labels)
    print("  ".join(f"{name} {100 * value:.2f}" for name, value in others.items()))
    results = {f"recall_at_{k}": value for k, value in recalls.items()} | others
    if cfg.output is not None:
        write_json(Path(cfg.output), {"checkpoint": config.absolute(str(saved.path)), **results})
    return results


if __name__ == "__main__":
    entry.run(evaluate, "evaluate")
