"""Cross-validation: a training per fold of the training classes, and their mean."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

import entry
import settings
from proxy_anchor.reports.files import RESULT_FILE, write_json
from proxy_anchor.training.processes import rank


def cross_validate(
    train: Callable[[DictConfig, Path], dict[str, Any]], cfg: DictConfig, folder: Path
) -> dict[str, Any]:
    """One run per fold, each in its own folder, and their mean."""
    from proxy_anchor.reports.run import fold_summary, format_folds

    if cfg.resume == "never":  # otherwise each fold looks into its own folder
        settings.require_new(folder)
    results = []
    for fold in range(settings.num_folds(cfg)):
        cfg.validation.fold = fold
        results.append(train(cfg, folder / f"fold{fold}"))
        entry.forget_last_run()
    combined = fold_summary(results)
    if rank() == 0:
        write_json(folder / RESULT_FILE, combined)
        print(format_folds(combined))
    return combined
