"""How a run starts: alone or as several ranks; anew, resumed, or finished before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from proxy_anchor.cli.checks import check_config
from proxy_anchor.errors import FolderTaken, UsageError
from proxy_anchor.reports.runs import NO_EFFECT, PLACES, settings
from proxy_anchor.training.run_lock import take
from proxy_anchor.utils import FAILURE_FILE, RESULT_FILE, is_distributed, rank, read_result

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from proxy_anchor.training.checkpoint import Checkpoint


def ranks_to_start(cfg: DictConfig, folder: Path) -> int:
    """Number of processes that this command starts; 1 if it trains itself.

    Where it is more than 1, every check of the config has passed: its errors are printed once.
    """
    if is_distributed() or (cfg.trainer.devices == 1 and cfg.trainer.get("num_nodes", 1) == 1):
        return 1
    check_config(cfg)
    trainer = _bare_trainer(cfg, folder)
    _check_strategy(cfg, trainer)
    if cfg.resume == "auto" and read_result(folder) is not None:
        return 1  # this process reports that the run is finished
    cluster: Any = trainer.strategy
    if trainer.world_size == 1 or cluster.cluster_environment.creates_processes_externally:
        return 1
    if trainer.num_nodes > 1:
        raise UsageError(
            f"trainer.num_nodes={trainer.num_nodes}: start it on every node by torchrun or SLURM, see docs/scale.md."
        )
    if cfg.resume == "never":
        require_new(folder)
    else:
        _require_same_begun(cfg, folder)
    return trainer.num_devices


def check_processes(cfg: DictConfig, trainer: pl.Trainer) -> None:
    """Raise UsageError for processes that cannot train together as one would."""
    _check_strategy(cfg, trainer)
    if trainer.world_size == 1 or not HydraConfig.initialized():
        return
    # torchrun and srun compose the config in each process, each with its own time in the default name.
    if not any(each.startswith("run=") for each in HydraConfig.get().overrides.task):
        raise UsageError(
            "run is needed where torchrun or srun starts the processes: add run=NAME, their common folder."
        )


def strategy(cfg: DictConfig) -> Any:
    """The trainer's strategy: its name, or this package's form of ddp."""
    from proxy_anchor.training.distributed import LeanDDP

    given = cfg.trainer.get("strategy", "auto")
    several = is_distributed() and (cfg.trainer.devices != 1 or cfg.trainer.get("num_nodes", 1) != 1)
    return LeanDDP() if given == "ddp" or (given == "auto" and several) else given


def _check_strategy(cfg: DictConfig, trainer: pl.Trainer) -> None:
    from pytorch_lightning.strategies import DDPStrategy

    from proxy_anchor.data.sampling import check_divisible
    from proxy_anchor.training.distributed import LeanDDP

    if trainer.world_size == 1:
        return
    forked = any(each in str(cfg.trainer.strategy) for each in ("spawn", "fork", "notebook"))
    if type(trainer.strategy) not in (DDPStrategy, LeanDDP) or forked:
        raise UsageError(f"trainer.strategy={cfg.trainer.strategy}: several devices train with trainer.strategy=ddp.")
    if cfg.trainer.use_distributed_sampler:
        raise UsageError("trainer.use_distributed_sampler=true would replace the order of the batches: leave it out.")
    if cfg.data.batch_size is not None:
        check_divisible(cfg.data.batch_size, trainer.world_size)


def _bare_trainer(cfg: DictConfig, folder: Path) -> pl.Trainer:
    from hydra.utils import instantiate

    return instantiate(cfg.trainer, logger=False, enable_checkpointing=False, default_root_dir=folder)


def resume_or_start(cfg: DictConfig, folder: Path) -> tuple[dict[str, Any] | None, Checkpoint | None]:
    """(result of a finished run, None), (None, checkpoint to resume), or (None, None) for a new run.

    The caller holds the folder's lock. Of several ranks the first takes it and looks for all.
    Raises FolderTaken where another process works in the folder, or it holds another run.
    """

    def look() -> tuple[dict[str, Any] | None, Checkpoint | None]:
        if is_distributed():
            take(folder)
        result = read_result(folder) if cfg.resume == "auto" else None
        if result is not None:
            require_same(cfg, folder)
            print(f"{folder} holds this run, finished: it is not repeated (numbers: {RESULT_FILE}).", flush=True)
        before = checkpoint_to_continue(cfg, folder) if result is None else None
        (folder / FAILURE_FILE).unlink(missing_ok=True)  # of an earlier attempt at this run
        return result, before

    if not is_distributed():
        return look()
    from proxy_anchor.training.distributed import decided_by_first

    trainer = _bare_trainer(cfg, folder)
    check_processes(cfg, trainer)
    trainer.strategy.setup_environment()  # joins the process group, which the run's own trainer finds
    keys = ("batch_size", "images_per_class")
    found, chosen = decided_by_first(
        lambda: (look(), {"data": {key: cfg.data[key] for key in keys}, "recall_k": cfg.recall_k})
    )
    cfg.merge_with(chosen)  # `look` changes them on the first rank alone
    return found


def _content(folder: Path) -> list[Path]:
    """The files of a run folder, without the trace of a failed attempt."""
    return [each for each in folder.glob("*") if each.name != FAILURE_FILE]


def require_new(folder: Path) -> None:
    """Raise FolderTaken where the folder holds a run. Only the first rank looks."""
    if rank() == 0 and _content(folder):
        raise FolderTaken(f"{folder} already holds a run: choose another run=NAME, or remove that folder.")


def checkpoint_to_continue(cfg: DictConfig, folder: Path) -> Checkpoint | None:
    """The checkpoint that an interrupted run continues from, without its tensors; None for a new run."""
    from proxy_anchor.training.run_folder import clear_beginning, newest_checkpoint

    if cfg.resume == "never" or not _content(folder):
        require_new(folder)
        return None
    _require_same_begun(cfg, folder)
    if (checkpoint := newest_checkpoint(folder)) is None:
        if not clear_beginning(folder):
            require_new(folder)
        print("interrupted before its first checkpoint, and begun anew", flush=True)
        return None
    print(f"continued after epoch {checkpoint.epoch} of {cfg.trainer.max_epochs} ({checkpoint.path.name})", flush=True)
    return replace(checkpoint, state={})


def _require_same_begun(cfg: DictConfig, folder: Path) -> None:
    """As `require_same`, unless the run in `folder` has trained nothing: then it is begun anew."""
    if (folder / "config.yaml").is_file() and any(folder.glob("*.ckpt*")):
        require_same(cfg, folder, moved=True)  # the checkpoint knows the content of its images


def require_same(cfg: DictConfig, folder: Path, *, moved: bool = False) -> None:
    """Raise FolderTaken where the run in `folder` has other settings. moved: its images may be in another place."""
    file = folder / "config.yaml"
    try:
        made: Any = OmegaConf.to_container(OmegaConf.load(file))
    except Exception as error:  # the YAML parser has several kinds, and bytes that are no text another
        raise FolderTaken(
            f"{file} is damaged or missing and does not say which run the folder holds: choose another run=NAME, or "
            "remove that folder."
        ) from error
    # What `config.fit_to_images` chose when the run began is taken over, where the command leaves it open.
    if cfg.data.batch_size is None and "data" in made:
        cfg.data.batch_size, k = made["data"]["batch_size"], made["data"].get("images_per_class")
        if k is not None and k < (cfg.data.images_per_class or 0):
            cfg.data.images_per_class = k
    wanted: Any = OmegaConf.to_container(cfg, resolve=True)
    one, other = (settings(each, (*NO_EFFECT, *(PLACES if moved else ()))) for each in (made, wanted))
    if different := sorted(key for key in {*one, *other} if one.get(key) != other.get(key)):
        raise FolderTaken(
            f"{folder} holds a run with other settings ({', '.join(different)}): choose another run=NAME, or remove "
            "that folder."
        )
