"""A search for settings with Optuna: what may vary, a study that outlives its process, and ending hopeless trials early.

A trial is a run in a folder of its own. Where it is tried again, after an interruption or a failure, Optuna counts a further
trial, which has the folder of the first: the last one of a folder is the one that counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl

from proxy_anchor.errors import UsageError
from proxy_anchor.training.callbacks.recall import RecallCallback

try:
    import optuna
    from optuna.trial import FrozenTrial, Trial, TrialState
except ImportError as error:
    raise UsageError("tune.py needs Optuna: pip install 'optuna>=4,<6'.") from error

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

Space = dict[str, "BaseDistribution"]
STUDY_FILE = "study.db"


def make_space(search: Mapping[str, Any] | None) -> Space:
    """What may vary: {"loss.alpha": [16, 32], "optimizer.lr": {"min": 1e-5, "max": 1e-3, "log": True}}.

    Values of a list are equals; a range of whole numbers gives whole numbers. Raises UsageError for anything else.
    """
    example = "'{optimizer.lr: {min: 1e-5, max: 1e-3, log: true}, loss.alpha: [16, 32, 64]}'"
    if not isinstance(search, Mapping) or not search:
        raise UsageError(f"search={search}: expected what may vary, for example search={example}.")
    space: Space = {}
    for key, given in search.items():
        try:
            space[str(key)] = _distribution(given)
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise UsageError(
                f"search: {key}: {given}: expected a list of values or a range with min and max, for example search={example}."
            ) from error
    return space


def _distribution(given: Any) -> BaseDistribution:
    if isinstance(given, (list, tuple)):
        return optuna.distributions.CategoricalDistribution(given)
    low, high, log = given["min"], given["max"], given.get("log", False)
    if given.keys() - {"min", "max", "log"} or not low < high or not isinstance(log, bool):
        raise ValueError(given)
    whole = isinstance(low, int) and isinstance(high, int)
    kind = optuna.distributions.IntDistribution if whole else optuna.distributions.FloatDistribution
    return kind(low, high, log=log)


def first_values(space: Space) -> dict[str, Any]:
    """One point of the space, to try what holds for all."""
    distributions: dict[str, Any] = dict(space)  # Any: the types are the same where Optuna is not installed
    return {key: each.choices[0] if hasattr(each, "choices") else each.low for key, each in distributions.items()}


class Tuning:
    """A study in a folder. Several processes of one host may work on it at once.

    Args:
        folder: holds STUDY_FILE and a folder per trial.
        settings: plain types that must be the same when a search goes on.
        seed: of the proposals. prune_after_epochs: None: no trial is ended early. unpruned_trials: before the first is.
    """

    def __init__(
        self,
        folder: Path,
        space: Space,
        settings: dict[str, Any],
        *,
        seed: int = 1,
        prune_after_epochs: int | None = 1,
        unpruned_trials: int = 5,
    ) -> None:
        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self.folder, self.space = folder, space
        pruner: optuna.pruners.BasePruner = optuna.pruners.NopPruner()
        if prune_after_epochs is not None:
            pruner = optuna.pruners.MedianPruner(unpruned_trials, prune_after_epochs)
        storage = f"sqlite:///{(folder / STUDY_FILE).absolute()}"
        self.seed = seed
        with self._alone():
            self.study = optuna.create_study(
                storage=storage, study_name="tuning", pruner=pruner, direction="maximize", load_if_exists=True
            )
            made = self.study.user_attrs.get("settings")
            if made is None:
                self.study.set_user_attr("settings", made := settings)
        different = sorted(key for key in {*made, *settings} if made.get(key) != settings.get(key))
        if different:
            raise UsageError(
                f"{folder} holds a search with other settings ({', '.join(different)}): choose another run=NAME."
            )

    def trials(self) -> dict[str, FrozenTrial]:
        """{name of its folder: trial}, the last one of each."""
        return {self.folder_of(each).name: each for each in self.study.get_trials(deepcopy=False)}

    def folder_of(self, trial: Trial | FrozenTrial) -> Path:
        """Where the trial's run is."""
        return self.folder / trial.user_attrs.get("folder", f"trial{trial.number}")

    def _lock_of(self, trial: Trial | FrozenTrial) -> Path:
        return self.folder / f"{self.folder_of(trial).name}.lock"

    def repeat_failed(self) -> None:
        """Have every failed trial tried again."""
        for trial in self.trials().values():
            if trial.state == TrialState.FAIL:
                self._again(trial)

    def _again(self, trial: FrozenTrial) -> None:
        self.study.enqueue_trial(trial.params, user_attrs={"folder": self.folder_of(trial).name})

    @contextmanager
    def next_trial(self, count: int) -> Iterator[Trial | None]:
        """The next of `count` trials, which is this process's own until the block ends; None when all are begun.

        A trial whose process has ended without a word is tried again, in its folder.
        """
        with self._alone():
            known = self.trials()
            for trial in known.values():
                if trial.state == TrialState.RUNNING and (lock := _lock(self._lock_of(trial))):
                    lock.close()
                    self.study.tell(trial.number, state=TrialState.FAIL)
                    self._again(trial)
            mine = lock = None
            if len(known) < count or any(each.state == TrialState.WAITING for each in self.trials().values()):
                # A sampler that started at the seed again would propose the first points a second time.
                seed = np.random.SeedSequence([self.seed, len(known)]).generate_state(1)[0]
                self.study.sampler = optuna.samplers.TPESampler(seed=int(seed))
                mine = self.study.ask(self.space)
                if "folder" not in mine.user_attrs:
                    mine.set_user_attr("folder", f"trial{len(known)}")
                lock = _lock(self._lock_of(mine))
        try:
            yield mine
        finally:
            if lock is not None:
                Path(lock.name).unlink(missing_ok=True)
                lock.close()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One process at a time."""
        lock = _lock(self.folder / "study.lock", wait=True)
        try:
            yield
        finally:
            if lock is not None:
                lock.close()

    def run(self, trial: Trial, function: Callable[[], float]) -> str:
        """Tell the trial's value, which the function returns, or that it was pruned, and say which; raises its other errors."""
        try:
            self.study.tell(trial, function())
        except optuna.TrialPruned:
            self.study.tell(trial, state=TrialState.PRUNED)
            return "pruned"
        except Exception:
            self.study.tell(trial, state=TrialState.FAIL)
            raise
        return "complete"

    def rows(self) -> list[dict[str, Any]]:
        """A line per trial, the best first: its folder, state, Recall in percent (a pruned one's last), epochs, settings."""
        rows = []
        for name, trial in self.trials().items():
            steps = trial.intermediate_values
            value = trial.value if trial.value is not None else steps.get(max(steps, default=0))
            row: dict[str, Any] = {
                "trial": name,
                "state": {"fail": "failed"}.get(state := trial.state.name.lower(), state),
            }
            row |= {"validation recall": None if value is None else 100 * value, "epochs": max(steps, default=None)}
            rows.append(row | trial.params)
        return sorted(rows, key=lambda row: (row["state"] != "complete", -(row["validation recall"] or 0)))


def _lock(file: Path, wait: bool = False) -> Any:
    """The open file, locked until it is closed or this process ends; None when another process holds it."""
    try:
        import fcntl
    except ImportError as error:
        raise UsageError("tune.py locks files as Linux and macOS do, which this system does not.") from error
    stream = file.open("a")
    try:
        fcntl.flock(stream, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        stream.close()
        return None
    return stream


class Pruning(pl.Callback):
    """Tells the study every evaluation's Recall at the smallest K on the selecting classes, and ends a trial that it gives up.

    Raises optuna.TrialPruned out of `fit`.
    """

    def __init__(self, trial: Trial) -> None:
        self.trial = trial
        self._told: set[int] = set()

    def on_validation_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """After the evaluation, which stands before this among the callbacks; also what came before a continued run."""
        [recall] = [each for each in trainer.callbacks if isinstance(each, RecallCallback)]  # type: ignore[attr-defined]
        for result in recall.history:
            if result.epoch > 0 and result.epoch not in self._told:
                self._told.add(result.epoch)
                self.trial.report((result.validation or result.recall)[recall.k[0]], result.epoch)
        if self._told and self.trial.should_prune():
            raise optuna.TrialPruned
