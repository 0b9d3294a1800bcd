"""The project's own files agree with each other: dependencies, documents, configs."""

from __future__ import annotations

import importlib
import json
import re
import runpy
import tomllib
from unittest.mock import Mock

import pytest
import torch
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


def test_the_record_of_make_test_gpu_says_where_the_tests_ran_and_how_they_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "NVIDIA H200")
    outcomes = Mock(getreports={"passed": [1, 2], "failed": [], "error": [], "skipped": [3]}.get)
    file = tmp_path / "test_gpu.jsonl"
    conftest = runpy.run_path(str(REPOSITORY / "tests/conftest.py"))
    conftest["pytest_terminal_summary"](outcomes, Mock(getoption=lambda name: file, spec=["getoption"]))
    row = json.loads(file.read_text())
    assert row | {"device": "NVIDIA H200", "passed": 2, "failed": 0, "error": 0, "skipped": 1} == row
    assert {"date", "commit", "versions"} <= row.keys()


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


def test_runs_of_the_grid_have_the_settings_that_name_them_and_are_drawn(tables):
    assert tables.pictures()["alpha_delta"].axes[0].images[0].get_array().shape == (5, 5)
    for name, [run] in tables.by_name("cars_half_alpha_delta").items():
        assert name == f"alpha{run['config']['loss']['alpha']:g}_delta{run['config']['loss']['delta']:g}"
