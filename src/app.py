"""A local page to search by picture: `python src/app.py checkpoint=runs/NAME/best.ckpt gallery=DIR`."""

from __future__ import annotations

from omegaconf import DictConfig

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry


def serve(cfg: DictConfig) -> None:
    """Index the gallery with one or two checkpoints, then answer until interrupted."""
    from proxy_anchor.inference.app.server import LOCAL, make_app, run
    from proxy_anchor.inference.retriever import open_index

    checks.check_retrieval(cfg, "app")
    retrievers = {cfg.checkpoint: open_index(cfg.checkpoint, cfg.gallery, cfg.index, **cfg.embed)}
    if cfg.compare is not None:
        retrievers[cfg.compare] = open_index(cfg.compare, cfg.gallery, cfg.compare_index, **cfg.embed)
    limits = {"max_upload_mb": cfg.max_upload_mb, "max_pixels": cfg.max_pixels}
    app = make_app(retrievers, hosts=LOCAL if cfg.host in LOCAL else ["*"], **limits)
    run(app, cfg.host, cfg.port)


if __name__ == "__main__":
    entry.run(serve, "app")
