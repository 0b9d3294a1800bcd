"""Search for settings with Optuna.

Each trial is a run of `train.py` in runs/NAME/trialN, judged on held-out training classes.
"""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.utils import instantiate
from omegaconf import DictConfig, OmegaConf

from proxy_anchor.cli import checks, messages, start
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.reports.tables import format_table, write_table
from proxy_anchor.sweeps import launcher
from proxy_anchor.training.run_lock import HELD_BY_PARENT, held
from proxy_anchor.utils import selecting_recall, write_json
from train import cross_validate, train

WORKER = "PROXY_ANCHOR_TUNING_WORKER"  # set by `work_together`


def tune(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """Run the missing trials, print all, and return the best one.

    A failed trial is listed and the others run. Raises UsageError at the end where one failed.
    """
    from optuna import TrialPruned
    from optuna.trial import TrialState

    from proxy_anchor.sweeps.tuning import Pruning, Tuning, make_space

    search: Any = OmegaConf.to_container(cfg.search) if isinstance(cfg.search, DictConfig) else cfg.search
    space: dict[str, Any] = make_space(search)
    shared = shared_arguments(cfg, list(space))
    first = {key: each.choices[0] if hasattr(each, "choices") else each.low for key, each in space.items()}
    trial_config(cfg, shared, first, "trial0")  # raises for what no trial can do
    study = Tuning(folder, space, cfg.seed, cfg.pruner and instantiate(cfg.pruner))
    for name, known in study.trials().items():
        if (folder / name / "config.yaml").is_file():
            start.require_same(trial_config(cfg, shared, known.params, name), folder / name)

    if not (is_worker := WORKER in os.environ):
        study.repeat_failed()
        if cfg.launcher.name == "local":
            work_together(cfg, folder)
    while (trial := study.next_trial(cfg.trials)) is not None:
        place = study.folder_of(trial)
        print(f"\n{place}: {' '.join(as_overrides(trial.params))}", flush=True)
        try:
            job = trial_config(cfg, shared, trial.params, place.name)
            in_folds = job.validation.name == "folds"
            result = cross_validate(job, place) if in_folds else train(job, place, [Pruning(trial)])
            study.study.tell(trial, selecting_recall(result))
            print(f"{place.name}: complete", flush=True)
        except TrialPruned:
            study.study.tell(trial, state=TrialState.PRUNED)
            print(f"{place.name}: pruned", flush=True)
        except Exception as error:  # the other trials run
            study.study.tell(trial, state=TrialState.FAIL)
            entry.mark_failed(place, error)
            print(f"{place.name}: failed: {messages.reason(error)}", flush=True)
        entry.forget_last_run()
    return {} if is_worker else report(study.rows(), list(space), folder, shared)


def shared_arguments(cfg: DictConfig, searched: list[str]) -> list[str]:
    """The arguments that all trials share.

    Raises UsageError for a search on test classes, or for numbers out of range.
    """
    check_int("trials", cfg.trials, 1)
    check_choice("launcher", cfg.launcher.name, ["basic", "local"])
    if cfg.validation.name == "test":
        raise UsageError("the test classes would choose the settings: use validation=classes or validation=folds.")
    given = checks.overrides_for_runs(cfg, "a search")
    for each, key in given.items():
        if key in searched:
            raise UsageError(f"{each}: {key} is searched; give it in one place.")
    own = ("search", "trials", "pruner", "launcher", "run", "validation")
    shared = [each for each, key in given.items() if key.partition(".")[0] not in own or key.startswith("validation.")]
    return [f"validation={cfg.validation.name}", *shared]


def trial_config(cfg: DictConfig, shared: list[str], values: dict[str, Any], name: str) -> DictConfig:
    """Config of a trial with these values, checked as by train.py."""
    return checks.compose_run(f"{cfg.run}/{name}", [*shared, *as_overrides(values)])


def as_overrides(values: dict[str, Any]) -> list[str]:
    """Values as arguments of the command line."""
    return [f"{key}={value if isinstance(value, str) else json.dumps(value)}" for key, value in values.items()]


def work_together(cfg: DictConfig, folder: Path) -> None:
    """launcher=local: run this command once per GPU; all share the study until no trial is left."""
    slots = launcher.make_slots(int(cfg.trainer.accelerator != "cpu"), cfg.launcher.jobs_at_once)
    command = launcher.job_command(HydraConfig.get().overrides.task, cfg.run, folder)
    workers = [launcher.Job(command, Path.cwd(), folder / f"worker{number}") for number in range(len(slots))]
    print(f"{len(workers)} trials at once; they print to {folder}/workerN.log", flush=True)
    launcher.run_here(
        workers,
        [slot | {WORKER: "1", HELD_BY_PARENT: str(folder.resolve())} for slot in slots],
        lambda number, reason: print(f"worker {number} {f'failed: {reason}' if reason else 'finished'}", flush=True),
    )


def report(rows: list[dict[str, Any]], searched: list[str], folder: Path, shared: list[str]) -> dict[str, Any]:
    """Print the trials and the command of the best one; write tuning.json, table, figure and page."""
    from proxy_anchor.reports.figures import recall_by_settings

    write_json(folder / "tuning.json", {"trials": rows})  # with all digits
    shown = [
        row | {key: f"{v:.4g}" if isinstance(v := row.get(key), float) else str(v) for key in searched} for row in rows
    ]
    figures = {"recall_by_settings": recall_by_settings(shown, searched, "validation recall")}
    print(f"\n{format_table(shown)}\n{write_table(folder, 'tuning', shown, figures)}", flush=True)
    best = rows[0]
    if best["state"] == "complete":
        words = [each for each in shared if not each.startswith("validation")]
        words += as_overrides({key: best[key] for key in searched})
        again = shlex.join(["python", "src/train.py", *words])
        print(f"best: {best['trial']}. On all training classes: {again}", flush=True)
    entry.report_failed("trials", [row["trial"] for row in rows if row["state"] == "failed"], len(rows), folder.name)
    return best


def main(cfg: DictConfig) -> None:
    """Search in Hydra's run folder."""
    folder = entry.output_folder()
    with held(folder):
        tune(cfg, folder)


if __name__ == "__main__":
    entry.run(main, "tune")
