"""Reads the contracts at the top of the files in conf/experiment.

A contract is a block of comments after the line `# @package _global_`: a title, then `# field: value` for each of
paper, expect, command, duration, memory and, optionally, note. A line that is indented further continues its field.
`expect` holds the paper's numbers, `R@1 68.4, R@2 79.2`; in a sweep one line per job, its overrides first. Jobs whose
number the paper does not print are left out.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from proxy_anchor.errors import UsageError

REQUIRED = ("paper", "expect", "command", "duration", "memory")
_FIELDS = (*REQUIRED, "note")
_PACKAGE = "# @package _global_"


@dataclass(frozen=True)
class Expectation:
    """What the paper reports for one job: its overrides (none in a single run) and {K: Recall@K in percent}."""

    overrides: tuple[str, ...]
    recall: dict[int, float]


@dataclass(frozen=True)
class Experiment:
    """A file of conf/experiment. jobs: the overrides of each job as Hydra makes them, [()] for a single run."""

    name: str
    title: str
    paper: str
    expect: tuple[Expectation, ...]
    command: str
    duration: str
    memory: str
    note: str
    dataset: str
    jobs: tuple[tuple[str, ...], ...]
    varied: tuple[str, ...]

    @property
    def labels(self) -> list[str]:
        """The tables and figures of the paper, by their labels in its source."""
        return re.findall(r"(?:tab|fig):\w+", self.paper)


def read_experiment(file: Path) -> Experiment:
    """Read one file. Raises UsageError, naming file and field, for a contract that is missing or not complete."""
    title, fields = _read_contract(file)
    try:
        config: Any = OmegaConf.to_container(OmegaConf.load(file))
        datasets = [entry["override /dataset"] for entry in config["defaults"] if "override /dataset" in entry]
        dataset = datasets[0]
    except (OSError, LookupError, TypeError) as error:
        raise UsageError(f"{file}: expected defaults that hold 'override /dataset: NAME'.") from error
    params = config.get("hydra", {}).get("sweeper", {}).get("params", {})
    return Experiment(
        name=file.stem,
        title=title,
        expect=_read_expectations(file, fields.pop("expect")),
        dataset=dataset,
        jobs=_jobs(params),
        varied=tuple(params),
        note=fields.pop("note", ""),
        **fields,
    )


def _read_contract(file: Path) -> tuple[str, dict[str, str]]:
    lines = file.read_text(encoding="utf-8").splitlines()
    comments = lines[: next((row for row, line in enumerate(lines) if not line.startswith("#")), len(lines))]
    if len(comments) < 2 or comments[0] != _PACKAGE:
        raise UsageError(f"{file} has no contract: expected '{_PACKAGE}', a title and {', '.join(REQUIRED)}.")
    fields: dict[str, str] = {}
    name = ""
    for line in comments[2:]:
        if name and line.startswith("#   "):
            fields[name] = f"{fields[name]}\n{line[1:].strip()}".strip()
        elif (match := re.fullmatch(r"# (\w+):\s*(.*)", line)) and match[1] in _FIELDS and match[1] not in fields:
            name = match[1]
            fields[name] = match[2]
        else:
            raise UsageError(f"{file}: {line!r} is not a new field of the contract; known: {', '.join(_FIELDS)}.")
    if missing := [field for field in REQUIRED if not fields.get(field)]:
        raise UsageError(f"{file}: the contract lacks {', '.join(missing)}; add '# {missing[0]}: ...' at the top.")
    return comments[1][1:].strip(), fields


def _read_expectations(file: Path, text: str) -> tuple[Expectation, ...]:
    """`[override ...] R@K value, R@K value` per line."""
    result = []
    for line in text.splitlines():
        overrides, separator, numbers = line.partition("R@")
        found = re.findall(r"R@(\d+) (\d+\.\d)(?:, |$)", separator + numbers)
        if ", ".join(f"R@{k} {value}" for k, value in found) != separator + numbers or not found:
            raise UsageError(f"{file}: expect: {line!r}; expected '[key=value ...] R@1 68.4, R@2 79.2, ...'.")
        result.append(Expectation(tuple(overrides.split()), {int(k): float(value) for k, value in found}))
    return tuple(result)


def _jobs(params: dict[str, Any]) -> tuple[tuple[str, ...], ...]:
    """The product of the choices in hydra.sweeper.params, separated by commas."""
    return tuple(
        product(
            *([f"{key}={value}" for value in re.split(r",(?![^{]*})", str(given))] for key, given in params.items())
        )
    )


def read_experiments(folder: Path) -> list[Experiment]:
    """All files of conf/experiment by name. Raises UsageError as `read_experiment`, or when there are none."""
    files = sorted(folder.glob("*.yaml"))
    if not files:
        raise UsageError(f"{folder} holds no experiments (*.yaml).")
    return [read_experiment(file) for file in files]


def experiment_rows(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Rows for `format_table`: name, the paper's table or figure, data set, what varies, jobs, expected Recall@1."""
    return [
        {
            "experiment": each.name,
            "paper": ", ".join(each.labels) or None,
            "dataset": each.dataset,
            "varies": ", ".join(each.varied) or None,
            "jobs": len(each.jobs),
            "expected Recall@1": _recall_range(each),
        }
        for each in experiments
    ]


def _recall_range(experiment: Experiment) -> str:
    values = [each.recall[1] for each in experiment.expect]
    text = f"{min(values):.1f}" if len(values) == 1 else f"{min(values):.1f} to {max(values):.1f}"
    known, jobs = len(values), len(experiment.jobs)
    return text if known == jobs else f"{text} ({known} of {jobs} jobs)"
