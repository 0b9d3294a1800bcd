"""The project's own files agree with each other: dependencies, documents, configs."""

from __future__ import annotations

import importlib
import re
import statistics
import tomllib

import pytest
import yaml
from commands import REPOSITORY

PYPROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
CONDA_NAMES = {"torch": "pytorch", "matplotlib": "matplotlib-base"}


def _parse(requirement: str) -> tuple[str, str]:
    name, bound = re.fullmatch(r"([A-Za-z0-9_.-]+?)\s*([<>=!~].*)?", requirement.strip()).groups()
    return name.lower().replace("_", "-"), bound or ""


def test_environment_yml_names_the_same_dependencies():
    environment = yaml.safe_load((REPOSITORY / "environment.yml").read_text())["dependencies"]
    plain = [each for each in environment if isinstance(each, str)]
    from_pip = next(each["pip"] for each in environment if isinstance(each, dict))
    conda = dict(map(_parse, plain + from_pip))
    assert conda.pop("python") == PYPROJECT["project"]["requires-python"]
    conda.pop("pip")
    assert conda.pop("faiss-gpu")
    project = dict(map(_parse, PYPROJECT["project"]["dependencies"]))
    assert {CONDA_NAMES.get(name, name): bound for name, bound in project.items()} == conda


def test_the_two_builds_of_faiss_are_never_asked_for_together():
    extras = PYPROJECT["project"]["optional-dependencies"]
    assert [_parse(each)[0] for each in extras["cpu"]] == ["faiss-cpu"]
    assert [_parse(each)[0] for each in extras["gpu"]] == ["faiss-gpu"]
    assert not any("faiss" in each for each in PYPROJECT["project"]["dependencies"])


def test_ci_runs_what_the_readme_says():
    assert "make test" in (REPOSITORY / ".ci" / "run").read_text()
    readme = (REPOSITORY / "README.md").read_text()
    assert "make demo" in readme
    assert "make test" in readme


def test_make_help_lists_every_public_target():
    makefile = (REPOSITORY / "Makefile").read_text()
    phony = re.search(r"^\.PHONY: (.*)$", makefile, re.M).group(1).split()
    described = re.findall(r"^([a-z-]+):.*##", makefile, re.M)
    assert sorted(phony) == sorted(described)


# Documents and their tables


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    return importlib.import_module("tables")


def test_tables_of_the_documents_are_what_the_records_say(tables):
    found = []
    for file in tables.DOCUMENTS:
        text = file.read_text()
        assert tables.current(text) == text, f"{file.name}: python benchmarks/tables.py writes it"
        found += re.findall(r"<!-- table (\w+) -->", text)
    assert {*found} == {*tables.TABLES, *tables.COMPUTED}


def test_a_number_that_no_record_holds_is_seen(tables):
    text = (REPOSITORY / "README.md").read_text()
    assert "| 75.3 ± 0.2 |" in text
    assert tables.current(text.replace("| 75.3 ± 0.2 |", "| 76.3 ± 0.2 |")) == text


def test_what_a_table_computes(tables):
    runs = tables.read("seed1", "seed2", "seed3")
    percent = [100 * run["best"]["recall"]["1"] for run in runs]
    assert tables.recall(runs, "best") == f"{statistics.mean(percent):.1f} ± {statistics.stdev(percent):.1f}"
    history = [
        {"epoch": e, "recall": {"1": r}, "train_seconds": 2, "eval_seconds": 1}
        for e, r in enumerate((0, 0.5, 0.74, 0.7))
    ]
    assert tables.reached({"history": history}) == (2, 6, 9)
    sop = tables.scale.SCALES[0]
    assert (
        tables.scale.TRAINING["proxies, gradient, moments: 16 C D"](sop) == "92.7 MB"
    )  # 16 x 11,318 x 512 = 92,717,056
    assert tables.scale.GALLERY["embeddings, float32: 4 G D"](sop) == "124 MB"  # 4 x 60,502 x 512 = 123,908,096
    assert all("commit" in row for name in ("throughput", "devices", "loss") for row in tables.latest(name))


def test_runs_of_the_grids_have_the_settings_that_name_them():
    folder = REPOSITORY / "docs" / "results"
    for file in sorted(folder.glob("cars_half_alpha_delta/*/config.yaml")):
        loss = yaml.safe_load(file.read_text())["loss"]
        assert file.parent.name == f"alpha{loss['alpha']}_delta{loss['delta']:g}"
    for file in sorted(folder.glob("cars_half_dimension_batch/*/config.yaml")):
        config = yaml.safe_load(file.read_text())
        setting = {"dimension": config["embedding_dim"], "batch": config["data"]["batch_size"]}
        assert setting | {k: int(v) for k, v in re.findall(r"([a-z]+)(\d+)", file.parent.name)} == setting
