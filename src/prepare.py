"""Unpack and verify a benchmark's archives: `python src/prepare.py dataset=cub archive=FILE|URL [dataset.root=DIR]`."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError


def main(cfg: DictConfig) -> None:
    """HostCopy, verify, unpack and count; what stands complete under dataset.root is left alone."""
    from hydra.utils import instantiate

    from proxy_anchor.data.prepare import prepare

    if cfg.dataset.name == "glyphs":
        raise UsageError("dataset=glyphs comes in no archive: it is drawn on first use. Choose another data set.")
    if cfg.dataset.root is None:
        raise UsageError("dataset.root is needed: add dataset.root=DIR, where the data set shall stand.")
    config.make_paths_absolute(cfg)
    archives = list(cfg.archive) if isinstance(cfg.archive, ListConfig) else [cfg.archive]
    splits = prepare(
        cfg.dataset.root,
        [str(each) if "://" in str(each) else config.absolute(str(each)) for each in archives],
        load=lambda root: instantiate(cfg.dataset.load, root=str(root)),
        verify_checksum=cfg.verify_checksum,
    )
    print(splits.describe(), f"ready: {Path(cfg.dataset.root)}", sep="\n")


if __name__ == "__main__":
    entry.run(main, "prepare")
