"""Hyper-parameter search with Optuna: search space, study, pruning.

A trial is a run in a folder of its own. A repeated trial, after an interruption or a failure, is a new trial for Optuna
with the folder of the first; the last trial of a folder counts.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytorch_lightning as pl
from filelock import FileLock

from proxy_anchor.errors import UsageError
from proxy_anchor.training.callbacks.recall import SELECTING

try:
    import optuna
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise UsageError("tune.py needs Optuna: pip install 'optuna>=4,<6'.") from error

Space = dict[str, BaseDistribution]


def make_space(search: Any) -> Space:
    """Search space of {"loss.alpha": [16, 32], "optimizer.lr": {"min": 1e-5, "max": 1e-3, "log": True}}.

    A list is categorical; a range of integers gives integers. Raises UsageError for anything else.
    """
    try:
        return {str(key): _distribution(given) for key, given in search.items()}
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        example = "'{optimizer.lr: {min: 1e-5, max: 1e-3, log: true}, loss.alpha: [16, 32, 64]}'"
        raise UsageError(
            f"search={search}: expected, for each key, a list of values or a range with min and max: search={example}."
        ) from error


def _distribution(given: Any) -> BaseDistribution:
    if isinstance(given, (list, tuple)):
        return optuna.distributions.CategoricalDistribution(given)
    options = dict(given)
    low, high = options.pop("min"), options.pop("max")
    whole = isinstance(low, int) and isinstance(high, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(low, high, **options)


class Tuning:
    """A study in a folder, shared by the processes of one host.

    Args:
        folder: holds study.db and a folder per trial.
        seed: of the sampler.
        pruner: an Optuna pruner; None: trials run to their end.

    Raises UsageError where the study has another search space.
    """

    def __init__(self, folder: Path, space: Space, seed: int = 1, pruner: Any = None) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.space, self.seed = folder, space, seed
        self._alone = FileLock(folder / "study.lock")
        with self._alone:
            self.study = optuna.create_study(
                storage=f"sqlite:///{(folder / 'study.db').absolute()}",
                study_name="tuning",
                pruner=pruner or optuna.pruners.NopPruner(),
                direction="maximize",
                load_if_exists=True,
            )
        searched = [item for trial in self.trials().values() for item in trial.distributions.items()]
        if different := sorted({key for key, values in searched if space.get(key) != values}):
            raise UsageError(
                f"{folder} holds a search of other values ({', '.join(different)}): choose another run=NAME."
            )

    def trials(self) -> dict[str, FrozenTrial]:
        """{folder name: its last trial}."""
        return {self.folder_of(each).name: each for each in self.study.get_trials(deepcopy=False)}

    def folder_of(self, trial: Trial | FrozenTrial) -> Path:
        """Run folder of a trial."""
        return self.folder / trial.user_attrs.get("folder", f"trial{trial.number}")

    def repeat_failed(self) -> None:
        """Queue failed trials again. No other process uses the study: running trials count as failed."""
        for name, trial in self.trials().items():
            if trial.state == TrialState.RUNNING:
                self.study.tell(trial.number, state=TrialState.FAIL)
            if trial.state in (TrialState.RUNNING, TrialState.FAIL):
                self.study.enqueue_trial(trial.params, user_attrs={"folder": name})

    def next_trial(self, count: int) -> Trial | None:
        """The next of `count` trials, or a queued one; None when all have started."""
        with self._alone:
            known = self.trials()
            if len(known) >= count and all(each.state != TrialState.WAITING for each in known.values()):
                return None
            # A sampler with the same seed would propose the first points again.
            self.study.sampler = optuna.samplers.TPESampler(seed=hash((self.seed, len(known))) % 2**32)
            trial = self.study.ask(self.space)
            if "folder" not in trial.user_attrs:
                trial.set_user_attr("folder", f"trial{len(known)}")
            return trial

    def rows(self) -> list[dict[str, Any]]:
        """A row per trial, the best first: folder, state, Recall in percent, epochs, settings."""
        rows = []
        for name, trial in self.trials().items():
            steps = trial.intermediate_values
            value = trial.value if trial.value is not None else steps.get(max(steps, default=0))
            state = trial.state.name.lower() if trial.state in (TrialState.COMPLETE, TrialState.PRUNED) else "failed"
            recall = None if value is None else 100 * value
            row = {"trial": name, "state": state, "validation recall": recall, "epochs": max(steps, default=None)}
            rows.append(row | trial.params)
        return sorted(rows, key=lambda row: (row["state"] != "complete", -(row["validation recall"] or 0)))


class Pruning(pl.Callback):
    """Reports the Recall that selects the epoch to the study.

    Raises optuna.TrialPruned where the study prunes the trial.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """Report after each evaluation of `fit`."""
        if trainer.state.fn == "fit":
            self.trial.report(float(trainer.callback_metrics[SELECTING]), trainer.current_epoch + 1)
            if self.trial.should_prune():
                raise optuna.TrialPruned
