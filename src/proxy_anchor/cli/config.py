"""From the config to the objects and arguments of a run.

Only the entry points and this room see the Hydra config; the rooms below take named arguments. Slow imports stand
inside the functions that need them, so that errors come at once.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from proxy_anchor.errors import UsageError, check_int, counted
from proxy_anchor.utils import CLASSES_FILE, rank, write_json, write_text

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from proxy_anchor.data.table import Splits
    from proxy_anchor.models.embedding_net import EmbeddingNet
    from proxy_anchor.training.callbacks.recall import RecallCallback
    from proxy_anchor.training.checkpoint import Checkpoint

_CPU_BATCH = 32  # images; at 224 pixels EfficientNet-Lite0 takes 4.3 GiB for them, and 20 GiB for 180
# Of a GPU's memory, for an image of 224 x 224 pixels. EfficientNet-Lite0 takes 0.085 in float32 (15.4 GiB for 180, in
# docs/results/cars_half/seed5.json); the rest is room for other networks and for cached images.
_GPU_GIB = 0.12
GROUP_KEYS = ("proxy_lr_mult", "warmup_epochs", "layer_decay")  # keys of `optimizer` that torch's class does not take


def absolute(path: str) -> str:
    """A path that is relative to the user's working directory."""
    return str(Path(path).expanduser().resolve())


def make_paths_absolute(cfg: DictConfig) -> None:
    """Make the data set's paths absolute: a checkpoint keeps them and is used from other places."""
    for key in ("root", "csv"):
        if (path := cfg.dataset.get(key)) is not None:
            if not isinstance(path, str):
                raise UsageError(f"dataset.{key}={path}: expected a path.")
            cfg.dataset[key] = absolute(path)


def load_splits(cfg: DictConfig, *, training: bool = True) -> Splits:
    """The data set, with held-out classes and label noise as the config says.

    training: whether training images are needed; data.on_bad_image=skip then reads all to leave out bad ones.
    """
    from hydra.utils import instantiate

    from proxy_anchor.data.bad_images import drop_bad_images
    from proxy_anchor.data.splits import hold_out_classes, mislabel, take_fold

    skip = cfg.data.get("on_bad_image") == "skip"  # a checkpoint may be older than this key
    # With allow_partial the loaders leave out and count missing files; all others are found below.
    verify = {"verify_files": False} if skip and not cfg.dataset.load.get("allow_partial") else {}
    splits = instantiate(cfg.dataset.load, **verify)
    arguments = {key: value for key, value in cfg.validation.items() if key != "name"}
    if cfg.validation.name == "classes":
        splits = hold_out_classes(splits, **arguments)
    elif cfg.validation.name == "folds":
        splits = take_fold(splits, **arguments)
    if skip and training:  # after the hold-out: held-out images are searched, and none of those is left out
        splits = drop_bad_images(splits)
    # After the hold-out: held-out images keep their labels. A checkpoint may be older than these keys.
    return mislabel(splits, share=cfg.dataset.get("label_noise", 0.0), seed=cfg.dataset.get("label_noise_seed", 0))


def fit_to_images(cfg: DictConfig, splits: Splits, recall: RecallCallback, *, num_ranks: int = 1) -> str:
    """Fit batch and images per class to the training images, and K of Recall to the user's own.

    Changes `cfg` where it leaves the batch size open, and `recall` where a K is larger than the gallery of
    dataset=folder. Returns one line on it, or "". Raises UsageError for fewer than two classes.
    """
    import torch

    chosen = []
    train, data = splits.train, cfg.data
    if train.num_classes < 2:
        raise UsageError(
            f"{splits.name} has {counted(train.num_classes, 'training class')}: without a second one there are no "
            "negatives, and all embeddings become equal. Add classes to train on."
        )
    if data.batch_size is None:
        least, most = 1, [cfg.backbone.recipe.batch_size, len(train) // 2]
        if cfg.trainer.accelerator == "cpu" or not torch.cuda.is_available():
            most.append(_CPU_BATCH)
        else:  # all memory, not what is free: equal on all ranks, and in every start
            gpus = map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
            room = min(each.total_memory for each in gpus) / 2**30 / _GPU_GIB
            most.append(num_ranks * int(room * (224 / cfg.dataset.images.crop) ** 2))
        if data.images_per_class is not None:
            check_int("data.images_per_class", data.images_per_class, 2)
            k = data.images_per_class = min(data.images_per_class, max(2, len(train) // train.num_classes))
            least, num_ranks = 2 * k, math.lcm(k, num_ranks)
            most.append(k * train.num_classes)
            chosen.append(f"data.images_per_class={k}")
        data.batch_size = max(min(most) // num_ranks, -(-least // num_ranks)) * num_ranks
        chosen.append(f"data.batch_size={data.batch_size}")
    if cfg.dataset.name == "folder" and recall.fit(splits):
        chosen.append(f"recall_k={recall.k}")
    return f"chosen for {len(train):,} training images: {', '.join(chosen)}" if chosen else ""


def describe_training(cfg: DictConfig, net: EmbeddingNet) -> str:
    """One line: the network and its recipe."""
    from torch.nn import Identity

    from proxy_anchor.data.augment import described_colors

    colors = described_colors(cfg.dataset.images)
    pooling = "its own" if isinstance(net.pool, Identity) else cfg.backbone.pooling.replace("auto", "avg+max")
    return (
        f"network: {cfg.backbone.name}, pooling {pooling}, {cfg.embedding_dim}-d; {cfg.trainer.max_epochs} epochs of "
        f"batches of {cfg.data.batch_size}, {cfg.optimizer.warmup_epochs} of them warm-up; "
        f"{_described(cfg.optimizer)}, {_described(cfg.scheduler)}; batch norm {cfg.batch_norm}"
        f"{f'; colours {colors}' if colors else ''}; drop path {cfg.backbone.drop_path:g}, no dropout"
        f"{f'; searched with {net.search_with}, {net.embedding_dim}-d' if net.search_with else ''}"
    )


def _described(node: DictConfig) -> str:
    """'StepLR(step_size=10, gamma=0.5)': class and arguments of an object of the config, without learning rates."""
    plain: Any = OmegaConf.to_container(node, resolve=True)
    hidden = ("_target_", "lr", *GROUP_KEYS)
    arguments = ", ".join(f"{key}={value}" for key, value in plain.items() if value is not None and key not in hidden)
    return f"{plain['_target_'].rpartition('.')[2]}({arguments})"


def _members(cfg: DictConfig, group: str, kind: type, called: str) -> dict[str, Any]:
    """{name: what its `_target_` makes} of a group. Raises UsageError for another kind than this, as it is called."""
    from hydra.utils import instantiate

    found = {str(name): instantiate(each) for name, each in cfg[group].items()}
    for name, each in found.items():
        if not isinstance(each, kind):
            raise UsageError(f"{group}.{name}: expected a {called} by its _target_, received {type(each).__name__}.")
    return found


def further_callbacks(cfg: DictConfig) -> list[pl.Callback]:
    """Callbacks of the group `callbacks`, in a debug mode without those that watch a Recall.

    Raises UsageError for anything else.
    """
    import pytorch_lightning as pl

    found = _members(cfg, "callbacks", pl.Callback, "pytorch_lightning.Callback")
    return [each for each in found.values() if is_scored(cfg) or "recall" not in str(getattr(each, "monitor", ""))]


def describe_stopping(trainer: pl.Trainer) -> str:
    """One line on early stopping, or ""."""
    from proxy_anchor.training.callbacks.recall import SELECTING

    if (stopping := trainer.early_stopping_callback) is None:
        return ""
    watched = "the Recall that selects the epoch" if stopping.monitor == SELECTING else stopping.monitor
    return (
        f"early stopping: training ends when {watched} has not improved in "
        f"{counted(stopping.patience, 'evaluation')} (callbacks=none: after all {trainer.max_epochs} epochs)"
    )


def progress_bars(cfg: DictConfig, further: Sequence[pl.Callback]) -> list[pl.Callback]:
    """The progress bar: one of the user's callbacks, or the one with the loss where stderr is a terminal."""
    from pytorch_lightning.callbacks import ProgressBar

    from proxy_anchor.training.callbacks.progress import LossBar

    given: list[pl.Callback] = [each for each in further if isinstance(each, ProgressBar)]
    return given or ([LossBar()] if cfg.trainer.enable_progress_bar and sys.stderr.isatty() else [])


def is_scored(cfg: DictConfig) -> bool:
    """Whether evaluations see all images, as Recall needs; Lightning's debug modes do not."""
    limits = (cfg.trainer.get(key) for key in ("fast_dev_run", "overfit_batches"))
    return not any(limits) and repr(cfg.trainer.get("limit_val_batches", 1.0)) in ("1.0", "None")


def write_beginning(cfg: DictConfig, folder: Path, splits: Splits) -> None:
    """Write config.yaml, classes.json and the list of skipped images. Only the first rank writes."""
    from proxy_anchor.data.bad_images import BAD_IMAGES_FILE

    if rank() == 0:
        folder.mkdir(parents=True, exist_ok=True)
        OmegaConf.save(cfg, folder / "config.yaml", resolve=True)
        searched = {name: list(query.classes) for name, (query, _) in splits.evaluated.items()}
        write_json(folder / CLASSES_FILE, {"train": list(splits.train.classes), **searched})
        if splits.skipped:
            write_text(folder / BAD_IMAGES_FILE, "".join(f"{line}\n" for line in splits.skipped))


def make_network(cfg: DictConfig) -> EmbeddingNet:
    """The embedding network of a run."""
    from proxy_anchor.models.embedding_net import EmbeddingNet, fixed_size

    images, name = cfg.dataset.images, cfg.backbone.name
    side = images.get("eval_crop")  # a data set of one's own may leave it out
    if side not in (None, images.crop) and fixed_size(name) is not None:
        raise UsageError(f"dataset.images.eval_crop={side}: {name} takes images of one size; leave it out.")
    backbone = {key: cfg.backbone[key] for key in ("pooling", "pretrained", "weights", "drop_path")}
    shape = {"image_size": images.crop, "batch_norm": cfg.batch_norm}
    # A config of one's own may leave it out.
    return EmbeddingNet(name, cfg.embedding_dim, search_with=cfg.backbone.get("search_with"), **shape, **backbone)


def whether_to_compile(cfg: DictConfig, net: EmbeddingNet, num_images: int, before: Checkpoint | None) -> bool:
    """Resolve compile=auto by the training images of the whole run; a resumed run stays as it began."""
    if cfg.compile != "auto":
        return cfg.compile
    if before is not None and isinstance(decided := before.metadata["config"].get("compile"), bool):
        return decided
    import torch

    from proxy_anchor.training.compile import COMPILE_FROM, check_file, recall_check
    from proxy_anchor.training.distributed import decided_by_first, world_size

    trained = num_images * cfg.trainer.max_epochs
    if trained >= COMPILE_FROM or not torch.cuda.is_available():
        return trained >= COMPILE_FROM
    # The compiler's cache may hold this network. Ranks may have different caches, but must decide alike.
    batch, side = cfg.data.batch_size // world_size(), cfg.dataset.images.crop
    precision = {"32": "32-true"}.get(str(cfg.trainer.precision), cfg.trainer.precision)
    file = check_file(net.train(), (batch, 3, side, side), precision, torch.device("cuda"))
    synchronised = world_size() > 1 and cfg.batch_norm == "train"  # other layers, which are made later
    if not (cfg.deterministic or synchronised) and decided_by_first(lambda: recall_check(file) is not None):
        return True
    print(
        f"network not compiled: {trained:,} training images do not pay for it (from {COMPILE_FROM:,} on they do); "
        "compile=true compiles, and later starts find the result.",
        flush=True,
    )
    return False


def learning(cfg: DictConfig) -> dict[str, Any]:
    """Arguments of MetricLearner: optimizer, scheduler, and what sets the parameter groups apart."""
    from hydra.utils import instantiate

    arguments = {key: value for key, value in cfg.optimizer.items() if key not in GROUP_KEYS}
    return {
        "optimizer": instantiate(arguments, _partial_=True),
        "scheduler": instantiate(cfg.scheduler, _partial_=True),
        **{key: cfg.optimizer[key] for key in GROUP_KEYS},
    }


def make_regularisers(cfg: DictConfig) -> dict[str, Any]:
    """{name: regulariser} of the group `regulariser`. Raises UsageError for anything else."""
    from proxy_anchor.losses.regulariser import Regulariser

    return _members(cfg, "regulariser", Regulariser, "proxy_anchor.losses.regulariser.Regulariser")


def nested_dims(cfg: DictConfig) -> list[int]:
    """Numbers of leading dimensions that `Nested` trains as embeddings of their own."""
    regularisers = (cfg.get("regulariser") or {}).values()  # a checkpoint may be older than this key
    nested = [each for each in regularisers if each["_target_"].endswith(".Nested")]
    if nested and "features" in (cfg.backbone.get("search_with") or ""):
        raise UsageError("regulariser=nested trains the head: leave features out of backbone.search_with.")
    return sorted({dim for each in nested for dim in each.get("dims", ())})


def compilation(cfg: DictConfig, num_eval_images: int) -> dict[str, Any]:
    """Arguments of MetricLearner: whether to compile, and how many images all evaluations of the run embed."""
    evaluations = cfg.trainer.max_epochs // cfg.trainer.check_val_every_n_epoch
    return {"compile": cfg.get("compile", False), "num_evaluated": num_eval_images * evaluations}


def run_metadata(cfg: DictConfig, splits: Splits, before: Checkpoint | None) -> dict[str, Any]:
    """What every checkpoint holds about its run, in plain types.

    Raises UsageError where `before` was made from other images.
    """
    from proxy_anchor.data.table import data_fingerprint, require_same_data

    data = data_fingerprint(splits)
    require_same_data(before.metadata.get("data") if before else None, data)
    config = OmegaConf.to_container(cfg, resolve=True)
    return {"config": config, "classes": list(splits.train.classes), "data": data}
