"""Read every image of a data set and list what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry


def check(cfg: DictConfig) -> bool:
    """Print unusable and odd images; returns whether all are usable."""
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import BAD, check_images, format_findings, write_findings

    config.make_paths_absolute(cfg)
    if "allow_partial" in cfg.dataset:
        cfg.dataset.allow_partial = True  # a wrong number of images is printed; the files are checked all the same
    splits = instantiate(cfg.dataset.load, verify_files=False)
    print(splits.describe(), flush=True)
    findings = check_images(splits, num_workers=cfg.num_workers)
    print(format_findings(findings, sum(len(table) for table in splits.tables.values())))
    if cfg.output is not None:
        write_findings(Path(cfg.output), findings)
    return not any(finding.kind in BAD for finding in findings)


def main(cfg: DictConfig) -> None:
    """Exit code 1 when an image is unusable."""
    if not check(cfg):
        sys.exit(1)


if __name__ == "__main__":
    entry.run(main, "check")
