"""Read every image of a data set and list what is wrong."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import DictConfig

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError, check_number


def check(cfg: DictConfig) -> bool:
    """Print unusable and odd images; returns whether all are usable."""
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import BAD, NEAR, check_images, format_findings, write_findings

    config.make_paths_absolute(cfg)
    check_number("similarity", cfg.similarity, 0, maximum=1)
    output = Path(cfg.output or "check.csv")
    if output.suffix == ".html":
        raise UsageError(f"output={output}: expected a .csv file; near=true writes a page next to it, as .html.")
    if not output.parent.is_dir():
        raise UsageError(f"output={output}: there is no folder {output.parent}: make it, or choose another file.")
    if "allow_partial" in cfg.dataset:
        cfg.dataset.allow_partial = True  # a wrong number of images is printed; the files are checked all the same
    embedder = None
    if cfg.near:  # a wrong checkpoint is refused before images are read
        from proxy_anchor.inference.checkpoint import load_trained
        from proxy_anchor.inference.embedder import Embedder
        from proxy_anchor.inference.near import near_findings, published_features
        from proxy_anchor.reports.pages import write_findings_page

        net = published_features() if cfg.checkpoint is None else load_trained(cfg.checkpoint)
        embedder = Embedder(net, **cfg.embed)
    splits = instantiate(cfg.dataset.load, verify_files=False)
    print(splits.describe(), flush=True)
    findings = check_images(splits)
    print(format_findings(findings, sum(len(table) for table in splits.tables.values())), flush=True)
    if embedder is not None:
        found = near_findings(splits, embedder, cfg.similarity)
        for kind, meaning in NEAR.items():
            print(f"{kind}: {sum(finding.kind == kind for finding, _ in found):,} ({meaning})")
        page = output.with_suffix(".html")
        write_findings_page(page, found)
        print(f"written: {page}")
        findings += [finding for finding, _ in found]
    if cfg.output is not None:
        write_findings(output, findings)
    return not any(finding.kind in BAD for finding in findings)


if __name__ == "__main__":
    entry.run(lambda cfg: check(cfg) or sys.exit(1), "check")
