"""Checks of the config that need no data: types, known keys, and ranges that no constructor knows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf

from proxy_anchor.cli.config import absolute, is_scored, learning, make_paths_absolute, make_regularisers
from proxy_anchor.errors import UsageError, check_choice, check_int, check_number, did_you_mean

# Values of more than one type; every other value has the type of its default.
_ANY_TYPE = (
    "run",
    "logger.wandb.name",
    "trainer.gradient_clip_val",
    "recall_k",
    "dataset.images.resize",
    "compile",
    "trainer.precision",
    "trainer.devices",
    "trainer.strategy",
    "trainer.deterministic",
    "data.images_per_class",
    "embed.precision",
)
_OPEN = ("logger", "callbacks", "regulariser")  # groups that take any key: each member is built by its `_target_`
_KINDS: dict[Any, str] = {ListConfig: "a list", str: "a string", bool: "true or false"}  # others are numbers


def check_types(cfg: DictConfig, default: DictConfig, place: str = "") -> None:
    """Raise UsageError for an unknown key, or a value of another type than its default."""
    group, known = place.rstrip("."), sorted(map(str, default))
    for key in map(str, cfg) if group not in _OPEN and "_target_" not in known else ():
        if key not in known:
            where = f"in {group}" if group else "at the top"
            raise UsageError(f"unknown key {place}{key}.{did_you_mean(key, known)} Known {where}: {', '.join(known)}.")
    for key in map(str, default):
        name = f"{place}{key}"
        if name in _ANY_TYPE or key not in cfg or OmegaConf.is_missing(default, key) or default[key] is None:
            continue
        given: Any = cfg[key]
        usual: Any = default[key]
        if isinstance(usual, DictConfig):
            if not isinstance(given, DictConfig):
                raise UsageError(f"{name}={given}: expected a group of keys ({', '.join(map(str, usual))}).")
            check_types(given, usual, f"{name}.")
            continue
        if type(given) is not type(usual) and not {type(given), type(usual)} <= {int, float}:
            raise UsageError(f"{name}={given}: expected {_KINDS.get(type(usual), 'a number')}, as in {name}={usual}.")


def _check_against_defaults(cfg: DictConfig, config_name: str) -> None:
    if not HydraConfig.initialized():
        return  # called from Python with a config that is no command line
    choices = HydraConfig.get().runtime.choices
    chosen = [f"{group}={choice}" for group, choice in choices.items() if "/" not in group and choice is not None]
    check_types(cfg, compose(config_name, overrides=[each for each in chosen if not each.startswith("experiment=")]))


def check_use(cfg: DictConfig, config_name: str) -> None:
    """Raise UsageError for a value of evaluate, search, embed, export or app.yaml out of range; make paths absolute."""
    from proxy_anchor.retrieval.reranking import RERANKINGS

    _check_against_defaults(cfg, config_name)
    keys = set(cfg)  # `in cfg` leaves out what is needed and not given; reading it raises
    for key in ("checkpoint", "query", "images", "gallery", "index", "output", "compare", "compare_index"):
        needed = key in ("checkpoint", "query", "images")
        if key in keys and not isinstance(cfg[key], str) and (needed or cfg[key] is not None):
            raise UsageError(f"{key}={cfg[key]}: expected a path.")
        if key in keys and cfg[key] is not None and key not in ("checkpoint", "compare"):
            cfg[key] = absolute(cfg[key])
    if "gallery" in cfg and cfg.gallery is None and cfg.index is None:
        raise UsageError("gallery is needed: add gallery=DIR, or index=DIR of an earlier search.")
    if (output := cfg.get("output")) is not None:
        if not Path(output).parent.is_dir():
            raise UsageError(f"output={output}: its folder does not exist.")
        if config_name == "evaluate" and Path(output).is_dir():
            raise UsageError(f"output={output}: expected a file.")
        if config_name == "embed" and Path(output).suffix not in (".npz", ".parquet"):
            raise UsageError(f"output={output}: expected a name that ends in .npz or .parquet.")
    if "rerank" in cfg:
        check_choice("rerank", cfg.rerank, RERANKINGS)
    for key, minimum in {"k": 1, "port": 0, "max_pixels": 1}.items():
        if key in keys:
            check_int(key, cfg[key], minimum)
    if cfg.get("false_accept_rate") is not None:
        check_number("false_accept_rate", cfg.false_accept_rate, 0, maximum=1, exclusive=True)
    if "max_upload_mb" in cfg:
        check_number("max_upload_mb", cfg.max_upload_mb, 0, exclusive=True)
    if "embed" in cfg:
        cfg.embed.precision = str(cfg.embed.precision)


def require_scored(cfg: DictConfig, what: str) -> None:
    """Raise UsageError for a debug mode, whose runs have no Recall, where `what` needs it."""
    if not is_scored(cfg):
        raise UsageError(f"{what} needs the Recall of all images: a debug mode (debug=...) is for train.py alone.")


def overrides_for_runs(cfg: DictConfig, what: str) -> dict[str, str]:
    """{override: its key} of the command, from which `what` composes its runs.

    Raises UsageError for several devices and for a debug mode.
    """
    if cfg.trainer.devices != 1:
        raise UsageError(f"trainer.devices={cfg.trainer.devices}: {what} trains on one device; use devices=1.")
    require_scored(cfg, what)
    return {each: each.partition("=")[0].lstrip("+~") for each in HydraConfig.get().overrides.task}


def compose_run(name: str, overrides: list[str]) -> DictConfig:
    """The config of `python src/train.py OVERRIDES` in runs/`name`, checked as there."""
    cfg = compose("train", overrides)
    cfg.run = name
    check_config(cfg)
    return cfg


def check_config(cfg: DictConfig) -> None:
    """Raise UsageError for a value of train.yaml that is out of range, before any image or weight is read.

    Makes the data set's paths absolute. Constructors know most ranges; the cheap ones are called once without data.
    """
    import torch
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import ON_BAD_IMAGE
    from proxy_anchor.training.optim import check_learning

    make_paths_absolute(cfg)
    cfg.callbacks = cfg.callbacks or {}  # callbacks=none is null, which also removes the recipe's
    _check_against_defaults(cfg, "train")
    if cfg.launcher.name != "basic" and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN:
        raise UsageError(f"launcher={cfg.launcher.name}: it runs the jobs of a sweep; add -m, or leave launcher out.")
    check_choice("resume", cfg.resume, ["auto", "never"])
    check_int("embedding_dim", cfg.embedding_dim, 1)
    check_int("seed", cfg.seed, 0)
    check_number("seed", cfg.seed, 0, maximum=2**32 - 1)
    check_int("trainer.max_epochs", cfg.trainer.max_epochs, 1)
    check_int("trainer.check_val_every_n_epoch", cfg.trainer.check_val_every_n_epoch, 1)
    if cfg.trainer.max_epochs % cfg.trainer.check_val_every_n_epoch:
        raise UsageError(
            f"trainer.check_val_every_n_epoch={cfg.trainer.check_val_every_n_epoch} does not divide trainer.max_epochs="
            f"{cfg.trainer.max_epochs}: the last epoch would not be evaluated. Choose a divisor."
        )
    accelerator = cfg.trainer.accelerator
    found = torch.cuda.is_available() or (accelerator == "gpu" and torch.backends.mps.is_available())
    if accelerator in ("gpu", "cuda") and not found:  # the trainer's error names no repair
        raise UsageError(
            f"trainer.accelerator={accelerator}: torch {torch.__version__} finds no GPU on this machine. Set "
            "trainer.accelerator=cpu or auto, or install a torch for its driver."
        )
    for key in ("max_steps", "max_time"):
        if cfg.trainer.get(key) not in (None, -1) and cfg.trainer.check_val_every_n_epoch > 1:
            raise UsageError(
                f"trainer.{key}={cfg.trainer[key]} may end training in an epoch that trainer.check_val_every_n_epoch="
                f"{cfg.trainer.check_val_every_n_epoch} leaves unevaluated. Set trainer.check_val_every_n_epoch=1."
            )
    for key in ("callbacks", "logger", "default_root_dir", "plugins", "val_check_interval"):
        if key in cfg.trainer:
            raise UsageError(
                f"trainer.{key}: a run sets it itself: leave it out. Callbacks and loggers are groups: add yours with "
                "+callbacks.NAME._target_=module.Class, +logger.NAME._target_=module.Class."
            )
    check_choice("data.on_bad_image", cfg.data.on_bad_image, ON_BAD_IMAGE)
    check_choice("compile", cfg.compile, [False, True, "auto"])
    check_choice("trainer.deterministic", cfg.trainer.deterministic, [False, True, "warn"])
    if cfg.trainer.deterministic and cfg.trainer.benchmark:
        raise UsageError(
            "deterministic=true and trainer.benchmark=true: cudnn.benchmark chooses kernels by timing, which is not "
            "reproducible. Add trainer.benchmark=false."
        )
    if cfg.trainer.gradient_clip_val is not None:
        check_number("trainer.gradient_clip_val", cfg.trainer.gradient_clip_val, 0, exclusive=True)
    if not str(cfg.run).strip() or cfg.run is None or ".." in Path(str(cfg.run)).parts:
        raise UsageError(f"run={cfg.run!r}: expected a name for the run folder below runs/.")
    check_choice("trainer.precision", cfg.trainer.precision, [32, "32-true", "bf16-mixed", "16-mixed"])
    loss = instantiate(cfg.loss, num_classes=2, embedding_dim=cfg.embedding_dim)
    for each in make_regularisers(cfg).values():
        each.check(loss)
    check_learning(**learning(cfg))
    if cfg.optimizer.warmup_epochs >= cfg.trainer.max_epochs:
        raise UsageError(
            f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} of trainer.max_epochs={cfg.trainer.max_epochs}: "
            "the backbone would never move. Train longer, or set optimizer.warmup_epochs=0."
        )
    if cfg.batch_norm.startswith("frozen") and not cfg.backbone.pretrained and cfg.backbone.weights is None:
        raise UsageError(
            "frozen batch norm needs pretrained weights: add batch_norm=train to backbone.pretrained=false."
        )
