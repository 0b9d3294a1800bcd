"""Finished runs: reading, names as in the paper, comparison of settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import yaml

from proxy_anchor.errors import UsageError
from proxy_anchor.utils import RESULT_FILE, read_result

CONFIG_FILE = "config.yaml"

# As the paper's tables print them; any other loss goes by its own name.
_METHODS = {
    "ProxyAnchorLoss": "Proxy-Anchor",
    "ProxyNCALoss": "Proxy-NCA",
    "multi_similarity": "MS",
    "soft_triple": "SoftTriple",
    "margin": "Margin",
    "RankedListLoss": "RLL-H",
}
_BACKBONES = {
    "bninception": "BN",
    "googlenet": "G",
    "resnet50": "R50",
    "resnet101": "R101",
    "tf_efficientnet_lite0": "EL0",
}

# Settings that do not change what a result means: seed, paths, loading speed, how the run is started, what it logs.
NO_EFFECT = (  # change no weight by more than rounding
    "run",
    "resume",
    "launcher",
    "logger",
    "callbacks.lr_monitor",
    "callbacks.rich_progress_bar",
    "compile",
    "search_engine",
    "recipe",  # its values stand under other keys
    "backbone.recipe",
    "validation.share",
    "data.num_workers",
    "data.eval_batch_size",
    "data.cache",
    "data.cache_dir",
    "trainer.enable_progress_bar",
    "trainer.enable_model_summary",
    "trainer.log_every_n_steps",
    "trainer.profiler",
)
PLACES = ("dataset.root", "dataset.csv", "dataset.load.root", "dataset.load.csv_file")
_UNIMPORTANT = (
    *NO_EFFECT,
    *PLACES,
    "seed",
    "recall_k",
    "dataset.recall_k",
    "data.crop_on",
    "trainer.accelerator",
    "trainer.benchmark",
    "trainer.deterministic",
    "deterministic",
)


def training_seconds(history: Iterable[Mapping[str, Any]]) -> list[float]:
    """Seconds of training up to each evaluation of a run.

    An epoch without evaluation is assumed to take as long as the next one that has it.
    """
    between = pairwise([{"epoch": 0}, *history])
    return list(accumulate(row["train_seconds"] * (row["epoch"] - before["epoch"]) for before, row in between))


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of n values.

    Attributes:
        deviation: None for a single value.
        runs: how many values there could have been.
    """

    mean: float
    deviation: float | None
    n: int
    runs: int

    @classmethod
    def of(cls, values: Iterable[float | None]) -> Spread | None:
        """Over all values but None; None when there is no other."""
        everything = list(values)
        if not (known := [value for value in everything if value is not None]):
            return None
        return cls(mean(known), stdev(known) if len(known) > 1 else None, len(known), len(everything))

    def __str__(self) -> str:
        digits = 0 if self.mean >= 1000 else 1
        text = f"{self.mean:.{digits}f}"
        if self.deviation is not None:
            text += f" ± {self.deviation:.{digits}f}"
        return text if self.n == self.runs else f"{text} ({self.n} of {self.runs})"


@dataclass(frozen=True, eq=False)
class Run:
    """A finished run.

    Attributes:
        config: contents of config.yaml, plain types.
        result: contents of result.json.
        name: path of the run folder, relative to the folder that was searched.
        data: equal for runs on the same images: a benchmark's name, or the fingerprint of all images and labels.
        data_name: `data` for people; different data have different names.
    """

    config: Mapping[str, Any]
    result: Mapping[str, Any]
    name: str
    data: str
    data_name: str

    @property
    def dataset(self) -> str:
        """Name in conf/dataset."""
        return str(self.config["dataset"]["name"])

    def recall(self, k: int = 1) -> float:
        """Recall@k of the selected epoch in percent."""
        return 100 * self.result["selected"]["recall"][str(k)]


def read_runs(folder: Path, left_out: list[str] | None = None) -> list[Run]:
    """Every finished run below a folder, at any depth: single runs, sweeps, comparisons.

    Args:
        folder: folder to search.
        left_out: receives one line for each other folder with a run's files, with the reason: not finished, damaged, or
            a fold, whose Recall@K is that of held-out training classes.

    Raises:
        UsageError: when no run is left.
    """
    if not folder.is_dir():
        raise UsageError(f"runs={folder}: no such folder.")
    runs, reasons = [], [] if left_out is None else left_out
    for place in sorted({file.parent for name in (RESULT_FILE, CONFIG_FILE) for file in folder.rglob(name)}):
        try:
            runs.append(_read_run(place, folder))
        except UsageError as error:
            reasons.append(f"{place}: {error}")
    if not runs:
        found = f"; {reasons[0]}" if reasons else ""
        raise UsageError(
            f"runs={folder} holds no finished run: expected {RESULT_FILE} next to {CONFIG_FILE} below it{found}."
        )
    return _with_own_names(runs)


def _with_own_names(runs: Sequence[Run]) -> list[Run]:
    """The same runs, with numbers for different data of one name."""
    named = []
    for run in runs:
        data = list(dict.fromkeys(each.data for each in runs if each.data_name == run.data_name))
        number = f" ({data.index(run.data) + 1})" if len(data) > 1 else ""
        named.append(replace(run, data_name=f"{run.data_name}{number}"))
    return named


def _read_run(folder: Path, searched_in: Path) -> Run:
    for name, reason in ((RESULT_FILE, "not finished"), (CONFIG_FILE, f"no {CONFIG_FILE}")):
        if not (folder / name).is_file():
            raise UsageError(reason)
    try:
        result = read_result(folder) or {}
        config: Any = yaml.safe_load((folder / CONFIG_FILE).read_text(encoding="utf-8"))
        searched = result["searched"]
        # Everything that tables and figures read.
        _ = [result[row]["recall"] for row in ("selected", "best", "last")], result["history"][0]
        _ = [(row["epoch"], row["recall"], row["train_seconds"]) for row in result["history"]]
        _ = config["dataset"]["name"], config["backbone"]["name"], config["loss"]["_target_"], config["embedding_dim"]
        _ = config["data"]["batch_size"], config["dataset"]["images"]["crop"]
        # Some records in docs/results are older than "data".
        data = result.get("data") or {key: result[key] for key in ("num_train_images", "num_eval_images")}
    except (ValueError, LookupError, TypeError, yaml.YAMLError) as error:
        raise UsageError(f"{RESULT_FILE} or {CONFIG_FILE} is damaged ({type(error).__name__})") from error
    if searched != "test":
        raise UsageError("searches held-out classes, as a fold does")
    name = folder.relative_to(searched_in).as_posix() if folder != searched_in else folder.name
    dataset = config["dataset"]
    place = dataset.get("csv") or dataset.get("root")
    data_name = Path(place).name if dataset["name"] == "folder" and place else str(dataset["name"])
    content = dataset["name"] if is_whole_benchmark(config) else repr(sorted(data.items()))
    return Run(config, result, name, content, data_name)


def is_benchmark(config: Mapping[str, Any]) -> bool:
    """Whether the data are a named benchmark, read by its own loader."""
    dataset = config["dataset"]
    loader = str(dataset.get("load", {}).get("_target_", ""))
    return loader.startswith(f"proxy_anchor.data.benchmarks.{dataset['name']}.")


def is_whole_benchmark(config: Mapping[str, Any]) -> bool:
    """Whether the data set's name determines its images: the loader has counted them."""
    return is_benchmark(config) and not config["dataset"].get("allow_partial")


def method_name(config: Mapping[str, Any]) -> str:
    """The loss as the paper's tables print it, and what was added to it: 'Proxy-Anchor + tcm'."""
    name = str(config["loss"]["_target_"]).rpartition(".")[2]
    return " + ".join([_METHODS.get(name, name.removesuffix("Loss")), *config.get("regulariser", {})])


def backbone_name(config: Mapping[str, Any]) -> str:
    """The backbone's name in timm, without the tag of its weights."""
    return str(config["backbone"]["name"]).partition(".")[0]


def backbone_abbreviation(name: str | None) -> str:
    """The paper's BN, G, R50, R101; other names unchanged; "" for None."""
    return "" if name is None else _BACKBONES.get(name, name)


def settings(config: Mapping[str, Any], ignored: Sequence[str] = _UNIMPORTANT) -> dict[str, Any]:
    """{dotted key: value} of the settings that change what a result means; ignored: keys and groups that do not."""
    return {
        key: _one_form(value)
        for key, value in flat(config)
        if value is not None and not any(key == each or key.startswith(f"{each}.") for each in ignored)
    }  # null is the same as a key that an older run did not have


def identity(run: Run, *left_out: str) -> str:
    """Equal for two runs exactly when data and all settings but `left_out` are equal."""
    return repr((run.data, sorted((key, each) for key, each in settings(run.config).items() if key not in left_out)))


def _one_form(value: Any) -> Any:
    """Whole floats as int: the config's 32.0 equals 32."""
    if isinstance(value, list | tuple):
        return [_one_form(each) for each in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def flat(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a plain nested dictionary."""
    for name, value in config.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{place}{name}.")
        else:
            yield f"{place}{name}", value


def differences(config: Mapping[str, Any], contract: Mapping[str, Any]) -> list[str]:
    """'loss.alpha 16 (contract 32)' for every setting that differs."""
    have, want = settings(config), settings(contract)
    return [
        f"{key} {_text(have, key)} (contract {_text(want, key)})"
        for key in sorted({*have, *want})
        if have.get(key) != want.get(key)
    ]


def _text(values: Mapping[str, Any], key: str) -> str:
    return str(values[key]) if key in values else "null or absent"


def told_apart(
    groups: Sequence[Sequence[Run]], look: Callable[[Run], Any]
) -> Iterator[tuple[Any, Sequence[Run], list[str]]]:
    """(look, group, 'alpha 16' for each of its settings that most groups of that look do not share)."""
    alike: dict[Any, list[Sequence[Run]]] = {}
    for group in groups:
        alike.setdefault(look(group[0]), []).append(group)
    for shown, same in alike.items():
        values = [settings(group[0].config) for group in same]
        told: list[list[str]] = [[] for _ in values]
        for key in sorted({key for each in values for key in each}):
            texts = [_text(each, key) for each in values]
            for each, text in zip(told, texts, strict=True):
                if 2 * texts.count(text) <= len(texts):
                    each.append(f"{key.removeprefix('dataset.').removeprefix('loss.')} {text}")
        yield from zip([shown] * len(same), same, told, strict=True)


def by_seed(runs: Sequence[Run]) -> list[list[Run]]:
    """Groups of runs that differ only in the seed."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(identity(run), []).append(run)
    return list(groups.values())
