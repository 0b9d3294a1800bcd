"""A checkpoint in a form for other programs: `python src/export.py checkpoint=runs/NAME/best.ckpt format=onnx`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig

import entry
import settings


def export(cfg: DictConfig) -> float:
    """Write the folder and print how far its embeddings are from the checkpoint's; returns that difference."""
    from proxy_anchor.training.export import TOLERANCE, export
    from proxy_anchor.training.trained import load_trained

    settings.check_retrieval(cfg, "export")
    trained = load_trained(cfg.checkpoint)
    folder = Path(settings.absolute(cfg.output or str(trained.path.with_name(cfg.format))))
    difference = export(trained, cfg.format, folder)
    print(f"{folder}: largest difference from the checkpoint {difference:.1e} (at most {TOLERANCE:.0e})")
    return difference


if __name__ == "__main__":
    entry.run(export, "export")
