"""Cross-validation: a training per fold of the training classes, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.utils import RESULT_FILE, rank, write_json


def cross_validate(
    train: Callable[[DictConfig, Path], dict[str, Any]], cfg: DictConfig, folder: Path
) -> dict[str, Any]:
    """One run per fold, each in its own folder, and their mean."""
    from proxy_anchor.reports.run import fold_summary, format_folds

    if cfg.resume == "never":  # otherwise each fold looks into its own folder
        config.require_new(folder)
    results = []
    for fold in range(config.num_folds(cfg)):
        cfg.validation.fold = fold
        results.append(train(cfg, folder / f"fold{fold}"))
        entry.forget_last_run()
    combined = fold_summary(results)
    if rank() == 0:
        write_json(folder / RESULT_FILE, combined)
        print(format_folds(combined))
    return combined
