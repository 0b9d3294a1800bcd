"""Train an embedding network: `python src/train.py dataset=cars backbone=efficientnet_lite0`."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, OmegaConf

import entry
from proxy_anchor.errors import UsageError


def train(cfg: DictConfig) -> dict[str, Any]:
    """One run in its folder; returns what result.json holds: best and last evaluation, all evaluations, seconds."""
    import pytorch_lightning as pl
    from hydra.utils import instantiate
    from pytorch_lightning.callbacks import ModelCheckpoint

    from proxy_anchor.data.datamodule import ImageDataModule
    from proxy_anchor.models.embedding_net import EmbeddingNet
    from proxy_anchor.reports.gallery import retrieval_gallery
    from proxy_anchor.reports.run import make_result, summary
    from proxy_anchor.reports.tables import RESULT_FILE, write_json
    from proxy_anchor.training.module import MetricLearner
    from proxy_anchor.training.optim import OptimizerSettings
    from proxy_anchor.training.recall_callback import RecallCallback, format_recall

    # Everything that can refuse the configuration comes before the data.
    entry.make_paths_absolute(cfg)
    entry.check_config(cfg)
    folder = entry.output_folder()
    pl.seed_everything(cfg.seed, workers=True, verbose=False)
    recall = RecallCallback(cfg.recall_k, engine=cfg.search_engine.name)
    checkpoints = [
        ModelCheckpoint(folder, "best", monitor=recall.monitor, mode="max", enable_version_counter=False),
        ModelCheckpoint(folder, "last", enable_version_counter=False),
    ]
    loggers = [instantiate(each) for each in cfg.logger.values()]
    trainer = instantiate(cfg.trainer, logger=loggers, callbacks=[recall, *checkpoints], default_root_dir=folder)
    if trainer.world_size > 1:
        raise UsageError(
            f"trainer.devices={cfg.trainer.devices}: this version trains on one device; use trainer.devices=1."
        )
    net = EmbeddingNet(
        cfg.backbone.name,
        cfg.embedding_dim,
        pooling=cfg.backbone.pooling,
        image_size=cfg.dataset.images.crop,
        pretrained=cfg.backbone.pretrained,
        weights=cfg.backbone.weights,
        batch_norm=cfg.batch_norm,
    )

    data = ImageDataModule(instantiate(cfg.dataset.load), **cfg.data, **cfg.dataset.images)
    recall.check(data.splits)
    loss = instantiate(cfg.loss, num_classes=data.splits.train.num_classes, embedding_dim=cfg.embedding_dim)
    metadata = {"config": OmegaConf.to_container(cfg, resolve=True), "classes": list(data.splits.train.classes)}
    learner = MetricLearner(net, loss, OptimizerSettings(**cfg.optimizer), metadata=metadata)

    print(data.describe(), f"network: {cfg.backbone.name}, {cfg.embedding_dim}-d", sep="\n", flush=True)
    trainer.validate(learner, data, verbose=False)
    OmegaConf.save(cfg, folder / "config.yaml", resolve=True)  # not earlier: a refused run leaves nothing
    print(f"before training: {format_recall(recall.history[0].recall)}", flush=True)
    trainer.fit(learner, data)

    retrieval_gallery(data.splits, recall.best_embeddings).save(folder / "gallery.png")
    result = make_result(
        recall.history,
        recall.best,
        images_per_epoch=trainer.num_training_batches * cfg.data.batch_size,
        eval_images=data.num_eval_images,
        set_name=recall.set_name,
        device=trainer.strategy.root_device,
    )
    write_json(folder / RESULT_FILE, result)
    print(summary(result, folder), flush=True)
    return result


def main(cfg: DictConfig) -> float:
    """Train, and hand the best Recall@1 (or the smallest K's) to a sweep."""
    return next(iter(train(cfg)["best"]["recall"].values()))


if __name__ == "__main__":
    entry.run(main, "train")
