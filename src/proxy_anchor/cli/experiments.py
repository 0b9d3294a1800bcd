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

_FIELD = re.compile(r"# (\w+): *(.*\n(?:#   .*\n)*)")
_EXPECTED = re.compile(r"((?:\S+=\S+ )*)(R@\d+ \d+\.\d(?:, R@\d+ \d+\.\d)*)")


@dataclass(frozen=True)
class Experiment:
    """A file of conf/experiment.

    Attributes:
        labels: the tables and figures of the paper, by their labels in its source.
        expect: {overrides of a job, () in a single run: {K: the paper's Recall@K in percent}}.
        jobs: the overrides of each job as Hydra makes them, [()] for a single run.
    """

    name: str
    labels: list[str]
    expect: dict[tuple[str, ...], dict[int, float]]
    dataset: str
    jobs: tuple[tuple[str, ...], ...]


def read_experiment(file: Path) -> Experiment:
    """Read one file. Raises UsageError, naming it, for a contract that is missing or not complete."""
    text = file.read_text(encoding="utf-8")
    contract = text.partition("\ndefaults:")[0] + "\n"
    fields = {name: re.sub(r"\n#? *", "\n", value).strip() for name, value in _FIELD.findall(contract)}
    lines = [_EXPECTED.fullmatch(line) for line in fields.get("expect", "").splitlines()]
    dataset = re.search(r"^  - override /dataset: (\w+)", text, re.M)
    if not ("paper" in fields and lines and all(lines) and dataset):
        raise UsageError(
            f"{file}: expected a contract in comments at the top, as in conf/experiment/cub_batch_size.yaml, and "
            "defaults that hold 'override /dataset: NAME'."
        )
    labels = re.findall(r"(?:tab|fig):\w+", fields["paper"])
    expect = {}
    for overrides, recalls in (line.groups() for line in lines if line):
        found = re.findall(r"R@(\d+) ([\d.]+)", recalls)
        expect[tuple(overrides.split())] = {int(k): float(value) for k, value in found}
    params = OmegaConf.select(OmegaConf.load(file), "hydra.sweeper.params") or {}
    choices = [[f"{key}={value}" for value in re.split(r",(?![^{]*})", str(params[key]))] for key in params]
    return Experiment(file.stem, labels, expect, dataset[1], tuple(product(*choices)))


def read_experiments(folder: Path) -> list[Experiment]:
    """All files of conf/experiment by name. Raises UsageError as `read_experiment`."""
    return [read_experiment(file) for file in sorted(folder.glob("*.yaml"))]


def experiment_rows(experiments: Sequence[Experiment]) -> list[dict[str, Any]]:
    """Rows for `format_table`: name, the paper's table or figure, data set, what varies, jobs, expected Recall@1."""
    return [
        {
            "experiment": each.name,
            "paper": ", ".join(each.labels) or None,
            "dataset": each.dataset,
            "varies": ", ".join(override.partition("=")[0] for override in each.jobs[0]) or None,
            "jobs": len(each.jobs),
            "expected Recall@1": _recall_range(each),
        }
        for each in experiments
    ]


def _recall_range(experiment: Experiment) -> str:
    ends = dict.fromkeys(f"{end(each[1] for each in experiment.expect.values()):.1f}" for end in (min, max))
    known, jobs = len(experiment.expect), len(experiment.jobs)
    return " to ".join(ends) + (f" ({known} of {jobs} jobs)" if known < jobs else "")
