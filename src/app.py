"""Serve a local page that searches a gallery by picture."""

from __future__ import annotations

from omegaconf import DictConfig

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError


def serve(cfg: DictConfig) -> None:
    """Index the gallery with one or two models, then serve until interrupted."""
    from proxy_anchor.inference.app.server import LOCAL, make_app, run
    from proxy_anchor.inference.gallery import open_index

    checks.check_use(cfg, "app")
    if cfg.compare is None and cfg.compare_index is not None:
        raise UsageError(f"compare_index={cfg.compare_index}: it belongs to a second model; add compare=CHECKPOINT.")
    indices = {cfg.checkpoint: cfg.index} | ({} if cfg.compare is None else {cfg.compare: cfg.compare_index})
    retrievers = {model: open_index(model, cfg.gallery, index, **cfg.embed) for model, index in indices.items()}
    limits = {"max_upload_mb": cfg.max_upload_mb, "max_pixels": cfg.max_pixels}
    app = make_app(retrievers, hosts=LOCAL if cfg.host in LOCAL else ["*"], **limits)
    run(app, cfg.host, cfg.port)


if __name__ == "__main__":
    entry.run(serve, "app")
