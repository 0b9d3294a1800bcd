"""Search for settings with Optuna: `python src/tune.py search='{loss.alpha: [16, 32, 64]}' trials=20 dataset=cars`.

Each trial is a run of `train.py` in runs/NAME/trialN, judged on held-out training classes.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from proxy_anchor.cli import jobs
from proxy_anchor.cli import main as entry
from proxy_anchor.cli.folds import cross_validate
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.tables import format_table
from proxy_anchor.sweeps import launcher
from proxy_anchor.training.run_lock import HELD_BY_PARENT, held
from proxy_anchor.utils import selecting_recall, write_json
from train import train

WORKER = "PROXY_ANCHOR_TUNING_WORKER"  # set where `work_together` started this command; a job of a sweep is none


def tune(cfg: DictConfig, folder: Path) -> dict[str, Any]:
    """All trials that are not there yet, then their table; the best one's settings.

    A trial that fails is listed, and the others go on. Raises UsageError at the end when one did.
    """
    from proxy_anchor.sweeps.tuning import Pruning, Tuning, first_values, make_space

    search, shared = jobs.tuning_settings(cfg)
    space = make_space(search)
    jobs.tuning_job(cfg, shared, first_values(space), "trial0")  # what no trial could do is said now
    made_of = {"search": search, "other arguments": jobs.decisive(shared)}
    pruning = {key: cfg[key] for key in ("prune_after_epochs", "unpruned_trials")}
    study = Tuning(folder, space, made_of, seed=cfg.seed, **pruning)

    def run(trial: Any) -> float:
        place = study.folder_of(trial)
        job = jobs.tuning_job(cfg, shared, trial.params, place.name)
        with held(place):
            entry.clear_failure(job, place)
            if job.validation.name == "folds":
                return selecting_recall(cross_validate(train, job, place))
            return selecting_recall(train(job, place, [Pruning(trial)]))

    if not (is_worker := WORKER in os.environ):
        study.repeat_failed()
        if cfg.launcher.name != "basic":
            work_together(cfg, folder)
    while True:
        with study.next_trial(cfg.trials) as trial:
            if trial is None:
                break
            place = study.folder_of(trial)
            place.mkdir(exist_ok=True)
            print(f"\n{place}: {' '.join(jobs.as_overrides(trial.params))}", flush=True)
            try:
                print(f"{place.name}: {study.run(trial, lambda: run(trial))}", flush=True)
            except Exception as error:  # whatever stopped this trial, the others are still wanted
                entry.mark_failed(place, error)
                print(f"{place.name}: failed: {entry.reason(error)}", flush=True)
        entry.forget_last_run()
    return {} if is_worker else report(study.rows(), list(space), folder, shared)


def work_together(cfg: DictConfig, folder: Path) -> None:
    """This command once per GPU of this host (launcher=local), all at work on the one study, until no trial is left."""
    shared = {WORKER: "1", HELD_BY_PARENT: str(folder.resolve())}
    slots = [{**slot, **shared} for slot in jobs.job_slots(cfg)]
    command = jobs.alone_command(cfg, HydraConfig.get().overrides.task, folder)
    workers = [launcher.Job(command, Path.cwd(), folder / f"worker{number}") for number in range(len(slots))]
    print(f"{len(workers)} trials at once; they print to {folder}/workerN.log", flush=True)
    launcher.run_here(
        workers, slots, lambda number, code: print(f"worker {number} ended, exit code {code}", flush=True)
    )


def report(rows: list[dict[str, Any]], searched: list[str], folder: Path, shared: list[str]) -> dict[str, Any]:
    """Print the trials, the best first, and how to train with its settings; write them to tuning.json."""
    print("\n" + format_table([row | {key: str(row.get(key)) for key in searched} for row in rows]), flush=True)
    write_json(folder / "tuning.json", {"trials": rows})
    best = rows[0]
    if best["state"] == "complete":
        again = jobs.train_command(shared, {key: best[key] for key in searched})
        print(f"best: {best['trial']}. On all training classes: {again}", flush=True)
    if failed := [row["trial"] for row in rows if row["state"] == "failed"]:
        told = f"{len(failed)} of {len(rows)} trials failed ({', '.join(failed)}; see {launcher.FAILURE_FILE} in their folders)"
        raise UsageError(f"{told}; the same command with run={folder.name} repeats them.")
    return best


def main(cfg: DictConfig) -> None:
    """Search in the folder that Hydra made."""
    tune(cfg, entry.output_folder())


if __name__ == "__main__":
    entry.run(main, "tune")
