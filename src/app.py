"""Serve a local page that searches a gallery by picture."""

from __future__ import annotations

from omegaconf import DictConfig

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry


def serve(cfg: DictConfig) -> None:
    """Index the gallery, then serve until interrupted."""
    from proxy_anchor.inference.app.server import LOCAL, make_app, run
    from proxy_anchor.inference.gallery import open_index

    checks.check_retrieval(cfg, "app")
    retriever = open_index(cfg.checkpoint, cfg.gallery, cfg.index, **cfg.embed)
    limits = {"max_upload_mb": cfg.max_upload_mb, "max_pixels": cfg.max_pixels}
    app = make_app(retriever, cfg.checkpoint, hosts=LOCAL if cfg.host in LOCAL else ["*"], **limits)
    run(app, cfg.host, cfg.port)


if __name__ == "__main__":
    entry.run(serve, "app")
