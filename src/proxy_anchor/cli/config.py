"""From the config to arguments: paths, splits, and every check that needs no data.

Only the entry points and this room see the Hydra config; the rooms below take named arguments. Imports that cost seconds
stand inside the functions that need them, so that errors come at once.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from hydra.errors import InstantiationException
from hydra.types import RunMode
from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from proxy_anchor.errors import FolderTaken, UsageError, check_choice, check_int, check_number, did_you_mean
from proxy_anchor.reports.runs import BEFORE
from proxy_anchor.training.run_lock import take
from proxy_anchor.utils import FAILURE_FILE, RESULT_FILE, one_of_several, rank, read_result

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from proxy_anchor.data.table import Splits
    from proxy_anchor.models.embedding_net import EmbeddingNet
    from proxy_anchor.training.checkpoint import Checkpoint


def absolute(path: str) -> str:
    """A path that the user gave relative to where they stand."""
    return str(Path(path).expanduser().resolve())


def make_paths_absolute(cfg: DictConfig) -> None:
    """Make the data set's paths absolute: a checkpoint remembers them and is used from elsewhere."""
    for key in ("root", "csv"):
        if (path := cfg.dataset.get(key)) is not None:
            if not isinstance(path, str):
                raise UsageError(f"dataset.{key}={path}: expected a path.")
            cfg.dataset[key] = absolute(path)


def take_former_names(config: Any) -> str | None:
    """Rename what earlier versions wrote: `data.decode` is now `data.crop_on`; a benchmark's loader has another module.

    config: plain, or Hydra's. Returns what to say about a key that the user gave. Raises UsageError when both are given.
    """
    if "callbacks" not in config:
        config["callbacks"] = {}  # what runs had before there was the group
    load = (config.get("dataset") or {}).get("load") or {}
    if isinstance(target := load.get("_target_"), str):
        load["_target_"] = re.sub(r"(?<=^proxy_anchor\.data\.)(?=(cub|cars|sop|inshop)\.)", "benchmarks.", target)
    data = config.get("data")
    former = data.pop("decode", None) if data is not None and "decode" in data else None
    if former is None:
        return None
    if data.get("crop_on", "auto") not in ("auto", former):
        raise UsageError(
            f"data.decode={former} and data.crop_on={data['crop_on']}: decode is the former name; leave it out."
        )
    data["crop_on"] = former
    return f"data.decode={former} is now data.crop_on={former}: it says where images are cropped; worker processes decode them."


def selecting_set(cfg: DictConfig) -> str:
    """Which set's Recall chooses the epoch."""
    return "test" if cfg.validation.name == "test" else "validation"


def load_splits(cfg: DictConfig, *, training: bool = True) -> Splits:
    """The data set, with classes held out of training and labels made wrong where the config asks for it.

    training: whether its training images are needed; data.on_bad_image=skip then reads all images to leave out bad ones.
    """
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import leave_out_unusable
    from proxy_anchor.data.splits import hold_out_classes, mislabel, take_fold

    skip = cfg.data.get("on_bad_image") == "skip"  # a checkpoint may be older than this key
    # allow_partial has loaders leave out, and count, what is missing; everything else is seen below.
    verify = {"verify_files": False} if skip and not cfg.dataset.load.get("allow_partial") else {}
    splits = instantiate(cfg.dataset.load, **verify)
    arguments = {key: value for key, value in cfg.validation.items() if key != "name"}
    if cfg.validation.name == "classes":
        splits = hold_out_classes(splits, **arguments)
    elif cfg.validation.name == "folds":
        splits = take_fold(splits, **arguments)
    if skip and training:  # after the hold-out: held-out images are searched, and none of those is left out
        splits = leave_out_unusable(splits, progress=cfg.trainer.enable_progress_bar)
    # After the hold-out: held-out images keep their labels. A checkpoint may be older than these keys.
    return mislabel(splits, share=cfg.dataset.get("label_noise", 0.0), seed=cfg.dataset.get("label_noise_seed", 0))


def describe_training(cfg: DictConfig) -> str:
    """One line: the network and what its recipe resolved to."""
    from proxy_anchor.data.augment import described_colors

    colors = described_colors(cfg.dataset.images)
    added = f"; colours {colors}" if colors else ""
    added += f"; drop path {cfg.backbone.drop_path:g}, no dropout"
    return (
        f"network: {cfg.backbone.name}, {cfg.embedding_dim}-d; {cfg.trainer.max_epochs} epochs of batches of "
        f"{cfg.data.batch_size}, {cfg.optimizer.warmup_epochs} of them warm-up; {_described(cfg.optimizer)}, {_described(cfg.scheduler)}; batch norm {cfg.batch_norm}{added}"
    )


def _described(node: DictConfig) -> str:
    """'StepLR(step_size=10, gamma=0.5)': an object of the config by its class and arguments, without the rates."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    arguments = ", ".join(
        f"{key}={value}" for key, value in plain.items() if key not in ("_target_", "lr", *GROUP_KEYS)
    )
    return f"{plain['_target_'].rpartition('.')[2]}({arguments})"


def num_folds(cfg: DictConfig) -> int:
    """How many runs a cross-validation takes."""
    check_int("validation.num_folds", cfg.validation.num_folds, 2)
    return cfg.validation.num_folds


def further_callbacks(cfg: DictConfig) -> list[pl.Callback]:
    """Those of the group `callbacks`. Raises UsageError for what is none."""
    import pytorch_lightning as pl
    from hydra.utils import instantiate

    found = {name: instantiate(each) for name, each in cfg.callbacks.items()}
    for name, each in found.items():
        if not isinstance(each, pl.Callback):
            raise UsageError(
                f"callbacks.{name}: expected a pytorch_lightning.Callback by its _target_, received {type(each).__name__}."
            )
    return list(found.values())


def _progress_bars(cfg: DictConfig, further: Sequence[pl.Callback]) -> list[pl.Callback]:
    """The bar, if it is on and none was given, looking at the loss every 20 steps: each look waits for the GPU."""
    from pytorch_lightning.callbacks import ProgressBar

    from proxy_anchor.training.callbacks.progress import LossBar

    if not cfg.trainer.enable_progress_bar or any(isinstance(each, ProgressBar) for each in further):
        return []
    on_gpu = cfg.trainer.accelerator != "cpu"
    return [LossBar(refresh_rate=20 if on_gpu else 1)]


def is_scored(cfg: DictConfig) -> bool:
    """Whether evaluations see all images; in Lightning's debug modes they do not, and Recall of a part means nothing."""
    limits = (cfg.trainer.get(key) for key in ("fast_dev_run", "overfit_batches"))
    return not any(limits) and repr(cfg.trainer.get("limit_val_batches", 1.0)) in ("1.0", "None")


def bookkeeping(
    cfg: DictConfig, folder: Path, monitor: str | None, health: pl.Callback, further: Sequence[pl.Callback]
) -> list[pl.Callback]:
    """The checkpoints, the progress bar if it is on, and what watching a run and continuing it takes.

    further: those that the user has added, which may hold a progress bar.
    """
    from proxy_anchor.training.callbacks.checkpoint import run_checkpoints
    from proxy_anchor.training.run_folder import RunRecord, StopOnSignal

    every = cfg.trainer.check_val_every_n_epoch
    checkpoints: list[pl.Callback] = [
        *run_checkpoints(folder, monitor, every),
        *_progress_bars(cfg, further),
    ]
    return [health, RunRecord(), StopOnSignal(), *checkpoints]


def write_beginning(cfg: DictConfig, folder: Path, splits: Splits) -> None:
    """The first files of a run, by the first process: its config, and the images that it leaves out, if there are any."""
    from proxy_anchor.data.bad_images import write_skipped

    if rank() == 0:
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
        write_skipped(folder, splits)


def make_network(cfg: DictConfig, **others: Any) -> EmbeddingNet:
    """The embedding network of a run, but for these arguments of `EmbeddingNet`."""
    from proxy_anchor.models.embedding_net import EmbeddingNet

    backbone = {key: cfg.backbone[key] for key in ("pooling", "pretrained", "weights", "drop_path")}
    shape = {"image_size": cfg.dataset.images.crop, "batch_norm": cfg.batch_norm}
    return EmbeddingNet(cfg.backbone.name, cfg.embedding_dim, **{**shape, **backbone, **others})


def whether_to_compile(cfg: DictConfig, net: EmbeddingNet, num_images: int, before: Checkpoint | None) -> bool:
    """What compile=auto means for a run with these training images per epoch; a run that goes on stays as it began."""
    if cfg.compile != "auto":
        return cfg.compile
    if before is not None and isinstance(decided := before.metadata["config"].get("compile"), bool):
        return decided
    import torch

    from proxy_anchor.training.compile import COMPILE_FROM, check_file, recall_check

    trained = num_images * cfg.trainer.max_epochs
    if trained >= COMPILE_FROM or not torch.cuda.is_available():
        return trained >= COMPILE_FROM
    # The compiler's cache holds this network. Ranks may not see the same cache, and must not differ.
    side = cfg.dataset.images.crop
    precision = {"32": "32-true"}.get(str(cfg.trainer.precision), cfg.trainer.precision)
    file = check_file(net.train(), (cfg.data.batch_size, 3, side, side), precision, torch.device("cuda"))
    if not one_of_several() and not cfg.deterministic and recall_check(file) is not None:
        return True
    print(
        f"network not compiled: {trained:,} training images do not pay for it (from {COMPILE_FROM:,} on they do); "
        "compile=true compiles, and later starts find the result.",
        flush=True,
    )
    return False


GROUP_KEYS = ("proxy_lr_mult", "warmup_epochs")  # of `optimizer`, but not arguments of torch's class


def learning(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of MetricLearner: optimizer, schedule, and what sets the parameter groups apart."""
    from hydra.utils import instantiate

    arguments = {key: value for key, value in cfg.optimizer.items() if key not in GROUP_KEYS}
    return {
        "optimizer": instantiate(arguments, _partial_=True),
        "scheduler": instantiate(cfg.scheduler, _partial_=True),
        **{key: cfg.optimizer[key] for key in GROUP_KEYS},
    }


def compilation(cfg: DictConfig, num_eval_images: int) -> dict[str, Any]:
    """Arguments of MetricLearner: whether the network is compiled, and how many images the run's evaluations embed."""
    evaluations = cfg.trainer.max_epochs // cfg.trainer.check_val_every_n_epoch
    return {"compile": cfg.get("compile", False), "num_evaluated": num_eval_images * evaluations}


def run_metadata(cfg: DictConfig, splits: Splits, before: Checkpoint | None) -> dict[str, Any]:
    """What every checkpoint says about its run, in plain types; raises UsageError when `before` was made of other images."""
    from proxy_anchor.data.table import data_fingerprint, require_same_data

    data = data_fingerprint(splits)
    if before is not None:
        require_same_data(before.metadata.get("data"), data)
    config = OmegaConf.to_container(cfg, resolve=True)
    return {"config": config, "classes": list(splits.train.classes), "data": data}


def ranks_to_start(cfg: DictConfig, folder: Path) -> int:
    """How many processes of this host the command has to become; 1 if it trains alone, or is one of several already.

    Where it is more, everything that can refuse the configuration has been asked, so that it is said once.
    """
    if one_of_several() or (cfg.trainer.devices == 1 and cfg.trainer.get("num_nodes", 1) == 1):
        return 1
    from hydra.utils import instantiate

    make_paths_absolute(cfg)
    check_config(cfg)
    given = cfg.trainer.get("strategy", "auto")
    if isinstance(given, str) and given != "auto" and not given.startswith("ddp"):
        raise _only_ddp(cfg)  # before the trainer says of it what has another repair
    try:
        trainer = instantiate(cfg.trainer, logger=False, enable_checkpointing=False, default_root_dir=folder)
    except InstantiationException as error:
        reason = " ".join(str(error.__cause__ or error).split())
        raise UsageError(
            f"trainer.devices={cfg.trainer.devices} is not possible here: {reason} Set trainer.devices=1, or as many as are here."
        ) from error
    _check_strategy(cfg, trainer)
    if cfg.resume == "auto" and read_result(folder) is not None:
        return 1  # finished: this process says so
    if trainer.world_size == 1 or trainer.strategy.cluster_environment.creates_processes_externally:
        return 1
    if trainer.num_nodes > 1:
        raise UsageError(
            f"trainer.num_nodes={trainer.num_nodes}: start it on every node by torchrun or SLURM, see docs/scale.md."
        )
    if cfg.resume == "never":
        require_new(folder)
    elif (folder / "config.yaml").is_file():
        require_same(cfg, folder)
    return trainer.num_devices


def check_processes(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Refuse processes that cannot train together as one would."""
    _check_strategy(cfg, trainer)
    if trainer.world_size == 1:
        return
    if not trainer.strategy.cluster_environment.creates_processes_externally:  # type: ignore[attr-defined]
        raise UsageError(
            f"trainer.devices={cfg.trainer.devices}: several devices are for the command `python src/train.py`, which "
            "starts a process for each; use devices=1 here."
        )
    # Other launchers compose the configuration once per process, each with the time of its own start.
    if HydraConfig.initialized() and not any(each.startswith("run=") for each in HydraConfig.get().overrides.task):
        raise UsageError("run is needed where processes are started from outside: add run=NAME, for their one folder.")


def strategy(cfg: DictConfig) -> Any:
    """The trainer's strategy: its name, or this package's form of ddp."""
    from proxy_anchor.training.distributed import LeanDDP

    given = cfg.trainer.get("strategy", "auto")
    several = one_of_several() and (cfg.trainer.devices != 1 or cfg.trainer.get("num_nodes", 1) != 1)
    return LeanDDP() if given == "ddp" or (given == "auto" and several) else given


def _check_strategy(cfg: DictConfig, trainer: pl.Trainer) -> None:
    from pytorch_lightning.strategies import DDPStrategy

    from proxy_anchor.data.sampling import check_divisible
    from proxy_anchor.training.distributed import LeanDDP

    if trainer.world_size == 1:
        return
    chosen = trainer.strategy
    if type(chosen) not in (DDPStrategy, LeanDDP) or chosen._start_method != "popen":  # type: ignore[attr-defined]
        raise _only_ddp(cfg)
    if cfg.trainer.use_distributed_sampler:
        raise UsageError("trainer.use_distributed_sampler=true would replace the order of the batches: leave it out.")
    check_divisible(cfg.data.batch_size, trainer.world_size)


def _only_ddp(cfg: DictConfig) -> UsageError:
    return UsageError(f"trainer.strategy={cfg.trainer.strategy}: several devices train with trainer.strategy=ddp.")


def _content(folder: Path) -> list[Path]:
    """What a run folder holds, but for the trace of an attempt that failed."""
    return [each for each in folder.glob("*") if each.name != FAILURE_FILE]


def require_new(folder: Path) -> None:
    """Refuse a run folder that holds another run: their files would be mixed. The first process looks, for all."""
    if rank() == 0 and _content(folder):
        raise FolderTaken(f"{folder} already holds a run: choose another run=NAME, or remove that folder.")


def take_up(cfg: DictConfig, folder: Path) -> tuple[dict[str, Any] | None, Checkpoint | None]:
    """(the result of a run that is finished, None) or (None, where this one goes on, None for a new run).

    Of several processes the first takes the folder, looks into it, and removes and renames there, before any other reads.
    Raises FolderTaken, as `run_lock.take`.
    """

    def look() -> tuple[dict[str, Any] | None, Checkpoint | None]:
        result = finished(cfg, folder)
        before = checkpoint_to_continue(cfg, folder) if result is None else None
        (folder / FAILURE_FILE).unlink(missing_ok=True)  # the folder is this run's: an earlier attempt left it
        return result, before

    if not one_of_several():
        return look()  # the caller holds the folder
    from hydra.utils import instantiate

    from proxy_anchor.training.distributed import decided_by_first

    def take_and_look() -> tuple[dict[str, Any] | None, Checkpoint | None]:
        take(folder)
        return look()

    trainer = instantiate(cfg.trainer, logger=False, enable_checkpointing=False, default_root_dir=folder)
    check_processes(cfg, trainer)
    trainer.strategy.setup_environment()  # joins the others; the run's own trainer finds them joined
    return decided_by_first(take_and_look)


def finished(cfg: DictConfig, folder: Path) -> dict[str, Any] | None:
    """The result of a finished run with these settings in `folder`, which is said and not repeated; None if there is none."""
    check_choice("resume", cfg.resume, ["auto", "never"])
    result = read_result(folder) if cfg.resume == "auto" else None
    if result is not None:
        require_same(cfg, folder)
        print(f"{folder} holds this run, finished: it is not repeated (its numbers are in {RESULT_FILE}).", flush=True)
    return result


def checkpoint_to_continue(cfg: DictConfig, folder: Path) -> Checkpoint | None:
    """Where an interrupted run with these settings goes on, without its tensors; None for a new run.

    Raises UsageError when the folder holds something else, or resume=never finds anything.
    """
    if cfg.resume == "never" or not _content(folder):
        require_new(folder)
        return None
    from proxy_anchor.training.run_folder import clear_beginning, newest_checkpoint

    if (folder / "config.yaml").is_file():
        require_same(cfg, folder)
    checkpoint = newest_checkpoint(folder)
    if checkpoint is None:
        if not clear_beginning(folder):
            require_new(folder)
        print("interrupted before its first checkpoint, and begun anew", flush=True)
        return None
    print(f"continued after epoch {checkpoint.epoch} of {cfg.trainer.max_epochs} ({checkpoint.path.name})", flush=True)
    return replace(checkpoint, state={})


# Neither name nor place of a run or of its images, nor what it prints or how many it embeds at once, changes a weight of it by
# more than rounding.
UNIMPORTANT = (
    "run",
    "logger",
    "launcher",
    "resume",
    "trainer.enable_progress_bar",
    "data.num_workers",
    "data.cache",
    "data.cache_dir",
    "data.eval_batch_size",
    "compile",
)


def require_same(cfg: DictConfig, folder: Path) -> None:
    """Refuse to take up a run whose settings were others: its numbers would be half of one run, half of the other."""
    if not (folder / "config.yaml").is_file():
        raise FolderTaken(f"{folder} has no config.yaml to say which run it holds: choose another run=NAME.")
    try:
        made: Any = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
    except Exception as error:  # of the YAML parser, for text that is none, or for bytes that are no text
        raise FolderTaken(
            f"{folder / 'config.yaml'} is damaged and does not say which run it holds: choose another run=NAME, or remove "
            "that folder."
        ) from error
    wanted: Any = OmegaConf.to_container(cfg, resolve=True)
    for each in (made, wanted):
        take_former_names(each)
    differences = [key for key in _differences(made, wanted) if key not in UNIMPORTANT]
    # A run that is older than a setting goes on with what that was before.
    before = {key for key, value in BEFORE.items() if OmegaConf.select(cfg, key) == value and _at(made, key) is None}
    different = [key for key in differences if key not in before]
    if different:
        raise FolderTaken(
            f"{folder} holds a run with other settings ({', '.join(sorted(different))}): choose another run=NAME, or remove "
            "that folder."
        )


def _at(config: Any, key: str) -> Any:
    """The value at a dotted key of a plain dictionary; None where there is none."""
    for part in key.split("."):
        config = config.get(part) if isinstance(config, dict) else None
    return config


def _differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Dotted keys whose values differ, or that only one of two plain dictionaries has."""
    if not (isinstance(one, dict) and isinstance(other, dict)):
        return [] if one == other else [place]
    keys = {*one, *other} - ({*UNIMPORTANT} if not place else set())
    return [
        name
        for key in keys
        for name in _differences(one.get(key), other.get(key), f"{place}.{key}" if place else str(key))
    ]


# Values of more than one type; everything else has the type of its default.
_ANY_TYPE = (
    "run",
    "logger.wandb.name",
    "trainer.gradient_clip_val",
    "recall_k",
    "compile",
    "trainer.precision",
    "trainer.devices",
    "trainer.strategy",
    "trainer.deterministic",
    "data.images_per_class",
    "embed.precision",
)


# Groups that take any key: their members are built by `_target_`, which says itself what it takes.
_OPEN = ("logger", "callbacks")


def check_types(cfg: DictConfig, default: DictConfig, place: str = "") -> None:
    """Raise for a value of another type than its default (a number for a text, a text for a group, ...), or a key added to
    a group that takes no others.
    """
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
        kinds: tuple[type, ...] = (ListConfig,) if isinstance(usual, ListConfig) else (type(usual),)
        if isinstance(usual, (int, float)) and not isinstance(usual, bool):
            kinds = (int, float)  # which of them, and the range, is checked where it is used
        if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
            raise UsageError(f"{name}={given}: expected {_KINDS.get(kinds[0], 'another type')}, as in {name}={usual}.")


_KINDS: dict[Any, str] = {ListConfig: "a list", str: "a text", bool: "true or false", int: "a number"}


def _check_against_defaults(cfg: DictConfig, config_name: str) -> None:
    if not HydraConfig.initialized():
        return  # called from Python with a config that is no command line
    choices = HydraConfig.get().runtime.choices
    chosen = [f"{group}={choice}" for group, choice in choices.items() if "/" not in group and choice is not None]
    check_types(cfg, compose(config_name, overrides=[each for each in chosen if not each.startswith("experiment=")]))


def check_evaluation(cfg: DictConfig) -> None:
    """Raise for a value of evaluate.yaml that is out of range, before the checkpoint is read."""
    from proxy_anchor.retrieval.reranking import RERANKINGS

    _check_against_defaults(cfg, "evaluate")
    check_choice("rerank", cfg.rerank, RERANKINGS)
    for key in ("checkpoint", "output"):
        if not isinstance(cfg[key], str) and (key == "checkpoint" or cfg[key] is not None):
            raise UsageError(f"{key}={cfg[key]}: expected the path of a file.")
    if cfg.output is not None and (not Path(cfg.output).resolve().parent.is_dir() or Path(cfg.output).is_dir()):
        raise UsageError(f"output={cfg.output}: expected a file in a folder that exists.")
    for key, minimum in {"eval_batch_size": 1, "num_workers": 0}.items():
        if cfg.data[key] is not None:
            check_int(f"data.{key}", cfg.data[key], minimum)


def check_retrieval(cfg: DictConfig, config_name: str) -> None:
    """Raise for a value of search.yaml, embed.yaml, export.yaml or app.yaml that is out of range, before anything is read."""
    from proxy_anchor.retrieval.reranking import RERANKINGS

    _check_against_defaults(cfg, config_name)
    for key in ("checkpoint", "gallery", "index", "query", "images", "output", "compare", "compare_index"):
        if key in cfg and not isinstance(cfg[key], str) and cfg[key] is not None:
            raise UsageError(f"{key}={cfg[key]}: expected a path.")
        if key in cfg and cfg[key] is not None and key not in ("checkpoint", "compare"):
            cfg[key] = absolute(cfg[key])
    if "gallery" in cfg and cfg.gallery is None and cfg.index is None:
        raise UsageError("gallery is needed: add gallery=DIR, or index=DIR of an earlier search.")
    if cfg.get("output") is not None and not Path(cfg.output).parent.is_dir():
        raise UsageError(f"output={cfg.output}: its folder does not exist.")
    if config_name == "embed" and Path(cfg.output).suffix not in (".npz", ".parquet"):
        raise UsageError(f"output={cfg.output}: expected a name that ends in .npz or .parquet.")
    if "k" in cfg:
        check_int("k", cfg.k, 1)
        check_choice("rerank", cfg.rerank, RERANKINGS)
    if cfg.get("false_accept_rate") is not None:
        check_number("false_accept_rate", cfg.false_accept_rate, 0, maximum=1, exclusive=True)
    if "port" in cfg:
        check_int("port", cfg.port, 0)
        check_number("max_upload_mb", cfg.max_upload_mb, 0, exclusive=True)
        check_int("max_pixels", cfg.max_pixels, 1)
    if "embed" in cfg:
        cfg.embed.precision = str(cfg.embed.precision)


def check_launcher(cfg: DictConfig) -> None:
    """Refuse a launcher where there is nothing to launch: it would be dropped without a word."""
    if cfg.launcher.name != "basic" and HydraConfig.initialized() and HydraConfig.get().mode == RunMode.RUN:
        raise UsageError(f"launcher={cfg.launcher.name}: it runs the jobs of a sweep; add -m, or leave launcher out.")


# Arguments of the trainer that a run sets itself, and what does their work.
_OWN_TRAINER_KEYS = {
    "callbacks": "add yours with +callbacks.NAME._target_=module.Class",
    "logger": "choose with logger=..., or add yours with +logger.NAME._target_=module.Class",
    "plugins": "leave it out",
    "default_root_dir": "choose the run folder with run=NAME",
}


def check_config(cfg: DictConfig) -> None:
    """Raise for a value that is out of range, before any image or weight is read.

    Ranges are known to the constructors alone, so the cheap ones are called once on nothing.
    """
    from hydra.utils import instantiate

    from proxy_anchor.data.augment import COLOR_KEYS, CentralCrop, RandomColors, RandomCrops
    from proxy_anchor.data.bad_images import ON_BAD_IMAGE
    from proxy_anchor.data.datamodule import check_cropping
    from proxy_anchor.models.embedding_net import check_drop_path
    from proxy_anchor.training.float32 import FLOAT32_PRECISIONS
    from proxy_anchor.training.optim import check_learning

    _check_against_defaults(cfg, "train")
    with open_dict(cfg):
        notice = take_former_names(cfg)
    if notice is not None and rank() == 0:
        print(notice, flush=True)
    check_launcher(cfg)
    check_int("embedding_dim", cfg.embedding_dim, 1)
    check_int("seed", cfg.seed, 0)
    if cfg.seed >= 2**32:
        raise UsageError(f"seed={cfg.seed}: expected a whole number below 2**32.")
    check_int("trainer.max_epochs", cfg.trainer.max_epochs, 1)
    check_int("trainer.check_val_every_n_epoch", cfg.trainer.check_val_every_n_epoch, 1)
    if cfg.trainer.max_epochs % cfg.trainer.check_val_every_n_epoch:
        raise UsageError(
            f"trainer.check_val_every_n_epoch={cfg.trainer.check_val_every_n_epoch} does not divide trainer.max_epochs="
            f"{cfg.trainer.max_epochs}: the last epoch would not be evaluated. Choose a divisor."
        )
    _check_evaluations(cfg.trainer)
    _check_accelerator(cfg.trainer.accelerator)
    for key, instead in _OWN_TRAINER_KEYS.items():
        if key in cfg.trainer:
            raise UsageError(f"trainer.{key}: a run sets it itself; {instead}.")
    check_choice("compile", cfg.compile, [False, True, "auto"])
    check_choice("trainer.deterministic", cfg.trainer.deterministic, [False, True, "warn"])
    if cfg.trainer.deterministic and cfg.trainer.benchmark:
        raise UsageError(
            "deterministic=true and trainer.benchmark=true: the kernels would be those that a clock "
            "prefers. Add trainer.benchmark=false."
        )
    if cfg.validation.name == "classes":
        check_number("validation.fraction", cfg.validation.fraction, 0, maximum=1, exclusive=True)
    if cfg.validation.name != "test":
        check_int("validation.seed", cfg.validation.seed, 0)
    if cfg.trainer.gradient_clip_val is not None:
        check_number("trainer.gradient_clip_val", cfg.trainer.gradient_clip_val, 0, exclusive=True)
    if not str(cfg.run).strip() or cfg.run is None or ".." in Path(str(cfg.run)).parts:
        raise UsageError(f"run={cfg.run!r}: expected a name for the run folder below runs/.")
    check_choice("trainer.precision", cfg.trainer.precision, [32, "32-true", "bf16-mixed", "16-mixed"])
    check_choice("float32_precision", cfg.float32_precision, FLOAT32_PRECISIONS)
    for key in ("batch_size", "eval_batch_size"):
        if cfg.data[key] is not None:
            check_int(f"data.{key}", cfg.data[key], 1)
    if cfg.data.images_per_class is not None:
        check_int("data.images_per_class", cfg.data.images_per_class, 2)
    check_number("dataset.label_noise", cfg.dataset.label_noise, 0, maximum=1)
    check_int("dataset.label_noise_seed", cfg.dataset.label_noise_seed, 0)
    check_choice("data.on_bad_image", cfg.data.on_bad_image, ON_BAD_IMAGE)
    check_cropping(cfg.data.crop_on, cfg.data.cache, cfg.data.cache_side)
    instantiate(cfg.loss, num_classes=2, embedding_dim=1)
    check_learning(**learning(cfg))
    if cfg.optimizer.warmup_epochs >= cfg.trainer.max_epochs:
        raise UsageError(
            f"optimizer.warmup_epochs={cfg.optimizer.warmup_epochs} of trainer.max_epochs={cfg.trainer.max_epochs}: the "
            "backbone would never move. Train longer, or set optimizer.warmup_epochs=0."
        )
    images = cfg.dataset.images
    RandomCrops(images.crop, images.scale, images.flip)
    RandomColors(**{key: images[key] for key in COLOR_KEYS if key in images})
    CentralCrop(images.crop, images.resize)
    check_drop_path(cfg.backbone.drop_path)
    check_choice("batch_norm", cfg.batch_norm, ["frozen_statistics", "frozen", "train"])
    if cfg.batch_norm != "train" and not cfg.backbone.pretrained and cfg.backbone.weights is None:
        raise UsageError(
            "frozen batch norm needs pretrained weights: add batch_norm=train to backbone.pretrained=false."
        )


def _check_evaluations(trainer: DictConfig) -> None:
    """Refuse evaluations of other weights than a checkpoint's: no file would have their Recall."""
    if (interval := trainer.get("val_check_interval")) not in (None, 1.0) or isinstance(interval, int):
        raise UsageError(
            f"trainer.val_check_interval={interval}: checkpoints are written at the end of an epoch, and their Recall is "
            "measured there. Leave it out; trainer.check_val_every_n_epoch sets how many epochs apart."
        )
    if not isinstance(trainer.get("max_time"), str | None):
        raise UsageError(f"trainer.max_time={trainer.max_time}: expected days, hours, minutes, seconds: 00:08:00:00.")
    for key in ("max_steps", "max_time"):
        if trainer.get(key) not in (None, -1) and trainer.check_val_every_n_epoch > 1:
            raise UsageError(
                f"trainer.{key}={trainer[key]} may end training in an epoch that trainer.check_val_every_n_epoch="
                f"{trainer.check_val_every_n_epoch} leaves unevaluated. Set trainer.check_val_every_n_epoch=1."
            )


def _check_accelerator(name: object) -> None:
    """Raise UsageError for a GPU where torch finds none: the trainer would not say what to do about it."""
    import torch

    found = torch.cuda.is_available() or (name == "gpu" and torch.backends.mps.is_available())
    if name in ("gpu", "cuda") and not found:
        raise UsageError(
            f"trainer.accelerator={name}: torch {torch.__version__} finds no GPU on this machine. Set trainer.accelerator=cpu or "
            "auto, or install a torch for its driver."
        )
