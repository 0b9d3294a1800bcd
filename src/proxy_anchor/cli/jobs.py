"""From the config to the jobs of a sweep, a comparison or a search for settings: their configurations and commands."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, ListConfig, OmegaConf

from proxy_anchor.cli.config import UNIMPORTANT, check_config, make_paths_absolute
from proxy_anchor.errors import UsageError, check_choice, check_int, check_number

_COMPARISON_KEYS = ("losses", "seeds", "levels")
_LISTS = {"losses": "[proxy_anchor,triplet]", "seeds": "[1,2]", "levels": "[60,70]"}
_TUNING_KEYS = ("search", "trials", "prune_after_epochs", "unpruned_trials")


def comparison_jobs(cfg: DictConfig) -> dict[tuple[str, int], DictConfig]:
    """{(loss, seed): config} of a comparison, all losses of a seed together; each checked as train.py would.

    Raises UsageError for what no run of it could do: an unknown loss, a key that one of the losses does not have.
    """
    for key in ("losses", "seeds"):
        if not isinstance(cfg[key], ListConfig) or not len(cfg[key]) or len(set(cfg[key])) < len(cfg[key]):
            raise UsageError(f"{key}={cfg[key]}: expected a list of different ones, for example {key}={_LISTS[key]}.")
    for seed in cfg.seeds:
        check_int("seeds", seed, 0)
    for loss in cfg.losses:
        if not isinstance(loss, str):
            raise UsageError(f"losses={cfg.losses}: expected names, for example losses={_LISTS['losses']}.")
    if not (cfg.levels is None or isinstance(cfg.levels, ListConfig)):
        raise UsageError(f"levels={cfg.levels}: expected a list, for example levels={_LISTS['levels']}.")
    for level in cfg.levels or ():
        check_number("levels", level, 0, maximum=100)
    if cfg.validation.name == "folds":
        raise UsageError("validation=folds: a comparison takes whole runs; use validation=classes, or leave it out.")
    given = HydraConfig.get().overrides.task
    for key, instead in {"loss": "losses=[...]", "seed": "seeds=[...]"}.items():
        if any(override.lstrip("+~").partition("=")[0] == key for override in given):
            raise UsageError(f"{key}=...: a comparison takes {instead}.")
    shared = [each for each in given if each.partition("=")[0].lstrip("+~") not in _COMPARISON_KEYS]
    jobs = {}
    for seed in cfg.seeds:
        for loss in cfg.losses:
            job = compose("train", [*shared, f"loss={loss}", f"seed={seed}"])
            job.run = f"{cfg.run}/{loss}/seed{seed}"
            make_paths_absolute(job)
            check_config(job)
            if job.trainer.devices != 1:
                raise UsageError(
                    f"trainer.devices={job.trainer.devices}: a comparison trains on one device; use devices=1."
                )
            jobs[loss, seed] = job
    return jobs


def tuning_settings(cfg: DictConfig) -> tuple[Any, list[str]]:
    """(what may vary, as given; the arguments that all trials share) of tune.py.

    Raises UsageError for a search that would choose by test classes, or whose numbers are out of range.
    """
    check_int("trials", cfg.trials, 1)
    check_int("unpruned_trials", cfg.unpruned_trials, 1)
    if cfg.prune_after_epochs is not None:
        check_int("prune_after_epochs", cfg.prune_after_epochs, 1)
    check_choice("launcher", cfg.launcher.name, ["basic", "local"])
    if cfg.validation.name == "test":
        raise UsageError("validation=test would choose settings by the test classes: use validation=classes or folds.")
    if cfg.trainer.devices != 1:
        raise UsageError(f"trainer.devices={cfg.trainer.devices}: a trial trains on one device; use devices=1.")
    search: Any = OmegaConf.to_container(cfg.search) if isinstance(cfg.search, DictConfig) else cfg.search
    shared = []
    for each in HydraConfig.get().overrides.task:
        key = each.partition("=")[0].lstrip("+~")
        if search and key in search:
            raise UsageError(f"{each}: {key} is searched; give it in one place.")
        if key.partition(".")[0] not in (*_TUNING_KEYS, "launcher", "run"):
            shared.append(each)
    if not any(each.startswith("validation=") for each in shared):
        shared.append(f"validation={cfg.validation.name}")
    return search, shared


def decisive(overrides: Sequence[str]) -> list[str]:
    """Those arguments that change a number."""

    def is_unimportant(override: str) -> bool:
        key = override.partition("=")[0].lstrip("+~")
        return any(key == each or key.startswith(f"{each}.") for each in UNIMPORTANT)

    return sorted(each for each in overrides if not is_unimportant(each))


def tuning_job(cfg: DictConfig, shared: list[str], values: dict[str, Any], name: str) -> DictConfig:
    """The configuration of the trial of this name with these values, checked as train.py would."""
    job = compose("train", [*shared, *as_overrides(values)])
    job.run = f"{cfg.run}/{name}"
    make_paths_absolute(job)
    check_config(job)
    return job


def as_overrides(values: dict[str, Any]) -> list[str]:
    """Values as arguments of the command line."""
    words: dict[Any, str] = {True: "true", False: "false", None: "null"}
    return [
        f"{key}={words[value] if value is None or isinstance(value, bool) else value}" for key, value in values.items()
    ]


def train_command(shared: list[str], values: dict[str, Any]) -> str:
    """For a shell: what trains with these values on all training classes."""
    words = [each for each in shared if not each.startswith("validation")]
    return shlex.join(["python", "src/train.py", *words, *as_overrides(values)])


def job_slots(cfg: DictConfig) -> list[dict[str, str]]:
    """The environment of each job that launcher=local runs at once on this host."""
    from proxy_anchor.sweeps.launcher import make_slots, visible_gpus

    for key in ("jobs_per_gpu", "jobs_at_once"):
        if cfg.launcher[key] is not None:
            check_int(f"launcher.{key}", cfg.launcher[key], 1)
    cards = [] if cfg.trainer.accelerator == "cpu" else visible_gpus()
    return make_slots(cards, cfg.trainer.devices, cfg.launcher.jobs_per_gpu, cfg.launcher.jobs_at_once)


def alone_command(cfg: DictConfig, overrides: Sequence[str], folder: Path | str) -> tuple[str, ...]:
    """The command that runs this program with these arguments, less those of a launcher, in this folder."""
    own = [each for each in overrides if not each.lstrip("+~").startswith(("launcher=", "launcher.", "run="))]
    fixed = [f"run={_quoted(cfg.run)}", "hydra.mode=RUN", f"hydra.run.dir={_quoted(folder)}"]
    return (sys.executable, os.path.abspath(sys.argv[0]), *own, *fixed)


def _quoted(value: object) -> str:
    """As a value of Hydra's command line."""
    escaped = str(value).replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"
