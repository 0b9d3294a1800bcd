"""Recall@K of a checkpoint: `python src/evaluate.py checkpoint=runs/NAME/best.ckpt [dataset=...]`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, OmegaConf

import entry


def evaluate(cfg: DictConfig) -> dict[int, float]:
    """{K: recall in [0, 1]} of the checkpoint, on its own data set or on another one."""
    import pytorch_lightning as pl
    from hydra.utils import instantiate
    from torch import nn

    from proxy_anchor.data.datamodule import ImageDataModule
    from proxy_anchor.reports.tables import write_json
    from proxy_anchor.training.checkpoint import load_checkpoint, load_embedding_net
    from proxy_anchor.training.module import MetricLearner
    from proxy_anchor.training.recall_callback import RecallCallback, format_recall

    saved = load_checkpoint(cfg.checkpoint)
    net = load_embedding_net(saved)
    trained = OmegaConf.create(saved.metadata["config"])
    if cfg.dataset.name == "from_checkpoint":
        dataset = trained.dataset
        if cfg.dataset.root is not None:
            dataset.load.root = entry.absolute(cfg.dataset.root)
    else:
        entry.make_paths_absolute(cfg)
        dataset = cfg.dataset

    # The images are prepared as the network saw them in training, whatever the data set.
    images = {**trained.dataset.images}
    batch_size = cfg.data.eval_batch_size or trained.data.eval_batch_size or trained.data.batch_size
    data = ImageDataModule(
        instantiate(dataset.load), batch_size=1, eval_batch_size=batch_size, num_workers=cfg.data.num_workers, **images
    )
    recall = RecallCallback(cfg.recall_k or dataset.recall_k, engine=cfg.search_engine.name)
    trainer = pl.Trainer(
        accelerator=trained.trainer.accelerator,
        devices=1,
        precision=trained.trainer.precision,
        callbacks=[recall],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    print(data.describe(), flush=True)
    trainer.validate(MetricLearner(net, nn.Identity()), data, verbose=False)
    result = recall.history[-1].recall
    if cfg.output is not None:
        write_json(Path(cfg.output), {"checkpoint": entry.absolute(cfg.checkpoint), "recall": result})
    print(f"{cfg.checkpoint} (epoch {saved.epoch}): {format_recall(result, digits=2)}")
    return result


if __name__ == "__main__":
    entry.run(evaluate, "evaluate")
