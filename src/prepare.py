"""Fetch, verify and unpack the archives of a benchmark."""

from __future__ import annotations

from pathlib import Path

from omegaconf import DictConfig, ListConfig

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError


def main(cfg: DictConfig) -> None:
    """Fetch, verify, unpack and count; a complete data set under dataset.root is not changed."""
    from hydra.utils import instantiate

    from proxy_anchor.data.prepare import prepare

    if cfg.dataset.root is None:
        raise UsageError("dataset.root is needed: add dataset.root=DIR, the folder of the data set.")
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
