"""Export a checkpoint for other programs."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

from proxy_anchor.cli import checks, config
from proxy_anchor.cli import main as entry


def export(cfg: DictConfig) -> float:
    """Write the folder; returns the largest difference from the checkpoint's embeddings."""
    from proxy_anchor.inference.checkpoint import load_trained
    from proxy_anchor.inference.export import TOLERANCE, export
    from proxy_anchor.training.checkpoint import checkpoint_of

    checks.check_use(cfg, "export")
    folder = Path(config.absolute(cfg.output or str(checkpoint_of(cfg.checkpoint).with_name(cfg.format))))
    difference = export(load_trained(cfg.checkpoint), cfg.format, folder)
    print(f"{folder}: largest difference from the checkpoint {difference:.1e} (at most {TOLERANCE:.0e})")
    return difference


if __name__ == "__main__":
    entry.run(export, "export")
