"""The project's own files agree with each other: dependencies, documents, configs."""

from __future__ import annotations

import csv
import itertools
import json
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


RESULT_ROWS = {
    "float32": (["seed1", "seed2", "seed3"], ["untrained", "best", "last"]),
    "bf16-mixed": (["seed1_bf16"], ["untrained", "best", "last"]),
    "bf16-mixed, `speed=fast`": ([f"fast_seed{seed}" for seed in (1, 2, 3)], ["untrained", "best", "last"]),
    "held-out training classes": ([f"validation_seed{seed}" for seed in (1, 2, 3)], ["selected", "best", "last"]),
}


@pytest.mark.parametrize("row", RESULT_ROWS)
def test_results_table_is_what_the_runs_wrote(row):
    folder = REPOSITORY / "docs" / "results" / "cars_half"
    files, epochs = RESULT_ROWS[row]
    runs = [json.loads((folder / f"{name}.json").read_text()) for name in files]
    cells = [f"{100 * statistics.mean(run[which]['recall']['1'] for run in runs):.1f}" for which in epochs]
    [line] = [
        line for line in (REPOSITORY / "docs" / "results.md").read_text().splitlines() if line.startswith(f"| {row} |")
    ]
    found = re.findall(r"\d+\.\d", line.replace("±", " "))
    for cell in cells:
        assert cell in found, (cell, line)


@pytest.mark.parametrize(
    ("folders", "names"),
    [(["losses"], ["best R@1", "last R@1"]), (["losses", "noise20", "noise40"], [])],
    ids=["losses", "noise"],
)
def test_comparison_tables_are_what_the_runs_wrote(folders, names):
    from proxy_anchor.reports.tables import comparison_rows, noise_rows, read_comparison

    results = [read_comparison(REPOSITORY / "docs" / "results" / f"cars_half_{folder}") for folder in folders]
    rows = noise_rows(results) if len(results) > 1 else comparison_rows(results[0])
    text = (REPOSITORY / "docs" / "results.md").read_text()
    part = text.split("## Wrong labels")[1 if len(results) > 1 else 0].split("## Losses compared")[-1]
    for row in rows:
        lines = [line for line in part.splitlines() if line.startswith(f"| `{row['loss']}`")]
        if not lines:  # not a row of the noise table: no such runs
            assert "-" in row.values()
            continue
        given = [cell.strip(" *") for cell in lines[0].strip("|").split("|")][1:]
        columns = names or [name for name in row if name != "loss"]
        assert given[: len(columns)] == [str(row[name]).removesuffix(" (n = 2)") for name in columns]


@pytest.mark.parametrize(
    ("row", "files", "epochs"),
    [
        ("the test classes", [f"seed{seed}" for seed in (1, 2, 3)], ["untrained", "best", "last"]),
        ("held-out training classes", [f"validation_seed{seed}" for seed in (1, 2, 3)], ["selected", "last"]),
    ],
)
def test_results_of_the_readme_are_what_the_runs_wrote(row, files, epochs):
    runs = [json.loads((REPOSITORY / "docs/results/cars_half" / f"{name}.json").read_text()) for name in files]
    [line] = [line for line in (REPOSITORY / "README.md").read_text().splitlines() if line.startswith(f"| {row}")]
    values = [[100 * run[which]["recall"]["1"] for run in runs] for which in epochs]
    expected = [f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in values]
    assert re.findall(r"\d+\.\d ± \d+\.\d", line) == expected


def test_the_tables_of_what_scale_takes_are_what_the_script_computes(monkeypatch):
    monkeypatch.syspath_prepend(str(REPOSITORY / "benchmarks"))
    import scale

    document = (REPOSITORY / "docs" / "scale.md").read_text()
    assert scale.table(scale.TRAINING) in document
    assert scale.table(scale.GALLERY) in document
    sop = scale.SCALES[0]
    assert scale.TRAINING["proxies, gradient, moments: 16 C D"](sop) == "92.7 MB"  # 16 x 11,318 x 512 = 92,717,056
    assert scale.GALLERY["embeddings, float32: 4 G D"](sop) == "124 MB"  # 4 x 60,502 x 512 = 123,908,096


RECIPES = ["cosine", "ema", "ema_lr", "ema_proxies25", "ema_alpha16", "ema_delta03"]
COLOR_RECIPES = [
    "base",
    "color",
    "strong",
    "strong_80",
    "strong_m25",
    "strong_lr6",
    "strong_b",
    "drop_strong",
    "strong_nca",
]


@pytest.mark.parametrize("file", [*RECIPES, *(f"color_search/{name}" for name in COLOR_RECIPES)])
def test_table_of_recipes_is_what_the_runs_wrote(file):
    run = json.loads((REPOSITORY / "docs/results/cars_half_recipe" / f"{file}.json").read_text())
    name, lines = file.rpartition("/")[2], (REPOSITORY / "docs/results.md").read_text().splitlines()
    [line] = [each for each in lines if re.match(rf"\| `{name}`[: ]", each)]
    selected, first = run["selected"], next(e["epoch"] for e in run["history"] if e["recall"]["1"] > 0.739)
    expected = [f"{100 * selected['validation']['1']:.1f}", str(selected["epoch"])]
    expected += [f"{100 * each['recall']['1']:.1f}" for each in (selected, run["last"])]
    assert [cell.strip(" *") for cell in line.strip("|").split("|")][1:] == [*expected, str(first)]


@pytest.mark.parametrize("delta", ["0", "0.1", "0.2", "0.3", "0.4"])
def test_table_of_alpha_and_delta_is_what_the_runs_wrote(delta):
    part = (REPOSITORY / "docs/results.md").read_text().split("## Alpha and delta")[1]
    [line] = [each for each in part.splitlines() if each.startswith(f"| {delta} |")]
    expected = []
    for alpha in (4, 8, 16, 32, 64):
        folder = REPOSITORY / f"docs/results/cars_half_alpha_delta/alpha{alpha}_delta{delta}"
        config = yaml.safe_load((folder / "config.yaml").read_text())
        assert (config["loss"]["alpha"], config["loss"]["delta"]) == (alpha, float(delta))
        expected.append(f"{100 * json.loads((folder / 'result.json').read_text())['best']['recall']['1']:.1f}")
    assert [cell.strip(" *") for cell in line.strip("|").split("|")][1:] == expected


def percent(recall: dict[str, float], *ks: str) -> list[str]:
    return [f"{100 * recall[k]:.1f}" for k in ks]


def cells_of(section: str, row: str) -> list[str]:
    """What stands behind the first cell of that row, in the section of docs/results.md that begins with this."""
    part = (REPOSITORY / "docs/results.md").read_text().split(section)[1].partition("\n## ")[0]
    [line] = [each for each in part.splitlines() if each.startswith(f"| {row} |")]
    return [cell.strip(" *") for cell in line.strip("|").split("|")][1:]


@pytest.mark.parametrize("dimension", [32, 64, 128, 256, 512, 1024])
def test_table_of_dimensions_is_what_the_runs_wrote(dimension):
    name = "dimension512_batch180" if dimension == 512 else f"dimension{dimension}"
    folder = REPOSITORY / "docs/results/cars_half_dimension_batch" / name
    assert yaml.safe_load((folder / "config.yaml").read_text())["embedding_dim"] == dimension
    run = json.loads((folder / "result.json").read_text())
    expected = percent(run["untrained"]["recall"], "1") + percent(run["best"]["recall"], "1", "2", "4", "8")
    assert cells_of("## Embedding dimension", str(dimension)) == expected


@pytest.mark.parametrize("batch", [30, 60, 90, 120, 150, 180])
def test_table_of_batch_sizes_is_what_the_runs_wrote(batch):
    folder = REPOSITORY / "docs/results/cars_half_dimension_batch"
    folder /= "dimension512_batch180" if batch == 180 else f"batch{batch}"
    assert yaml.safe_load((folder / "config.yaml").read_text())["data"]["batch_size"] == batch
    run = json.loads((folder / "result.json").read_text())
    *recalls, paper, rate = cells_of("## Batch size", str(batch))
    assert recalls == percent(run["best"]["recall"], "1", "2", "4", "8")
    assert rate == f"{run['train_images_per_second']:,.0f}"
    printed = csv.DictReader((REPOSITORY / "src/proxy_anchor/reports/paper_results.csv").read_text().splitlines())
    keys = {"table": "tab:batch_size_fine", "batch_size": str(batch), "dataset": "cars", "k": "1"}
    assert [paper] == [row["value"] for row in printed if keys.items() <= row.items()]


@pytest.mark.parametrize("devices", [1, 2, 4])
def test_table_of_cards_is_what_the_runs_wrote(devices):
    name = "fast_seed1" if devices == 1 else f"fast_devices{devices}_seed1"
    run = json.loads((REPOSITORY / f"docs/results/cars_half/{name}.json").read_text())
    assert run["num_devices"] == devices
    best, last = run["best"], run["last"]
    expected = [*percent(best["recall"], "1"), str(best["epoch"]), *percent(last["recall"], "1")]
    expected += [*percent(best["recall"], "2", "4", "8"), f"{run['seconds_per_epoch']:.2f}"]
    assert cells_of("The same on several cards", str(devices)) == expected


@pytest.mark.parametrize("name", ["color", "strong", "strong_m25", "drop_strong"])
def test_table_of_folds_is_what_the_runs_wrote(name):
    run = json.loads((REPOSITORY / "docs/results/cars_half_recipe/folds" / f"{name}.json").read_text())
    lines = (REPOSITORY / "docs/results.md").read_text().splitlines()
    [line] = [each for each in lines if each.startswith(f"| `{name}`, by folds |")]
    selected, last = (
        f"{100 * run[at]['recall']['1']:.1f} ± {100 * run[at]['deviation']['1']:.1f}" for at in ("selected", "last")
    )
    assert len(run["folds"]) == 4
    assert [cell.strip(" *") for cell in line.strip("|").split("|")][1:] == [
        selected,
        str(run["selected"]["epoch"]),
        last,
    ]


FAST_RUNS = {
    "40 | 1, 2, 3, 4": [f"epochs40_seed{seed}" for seed in (1, 2, 3, 4)],
    "40, evaluation compiled too | 1, 2": [f"epochs40_compiled_evaluation_seed{seed}" for seed in (1, 2)],
    "100, evaluation compiled too | 1, 2": [f"epochs100_seed{seed}" for seed in (1, 2)],
}


@pytest.mark.parametrize("row", FAST_RUNS)
def test_table_of_the_fast_recipe_is_what_the_runs_wrote(row):
    folder = REPOSITORY / "docs/results/cars_half_fast"
    runs = [json.loads((folder / f"{name}.json").read_text()) for name in FAST_RUNS[row]]
    columns: list[list[float]] = []
    for run in runs:
        seconds = list(
            itertools.accumulate(each["train_seconds"] + each["eval_seconds"] for each in run["history"][1:])
        )
        first = next(each["epoch"] for each in run["history"] if each["recall"]["1"] > 0.739)
        recalls = [100 * run[which]["recall"]["1"] for which in ("best", "last")]
        columns.append([*recalls, first, seconds[first - 1], seconds[-1]])
    best, last, *others = zip(*columns, strict=True)
    expected = [f"{statistics.mean(each):.1f} ± {statistics.stdev(each):.1f}" for each in (best, last)]
    expected += [f"{statistics.mean(each):.1f}" for each in others]
    lines = (REPOSITORY / "docs/results.md").read_text().splitlines()
    [line] = [each for each in lines if each.startswith(f"| {row} |")]
    assert [cell.strip(" *") for cell in line.strip("|").split("|")][2:] == expected


def test_table_of_the_worst_classes_is_what_the_report_wrote():
    folder = REPOSITORY / "docs/results/cars_half_report"
    rows = list(csv.DictReader((folder / "class_recall.csv").read_text().splitlines()))
    text = (REPOSITORY / "docs/results.md").read_text()
    for row in rows[:10]:
        recalls = " | ".join(f"{100 * float(row[name]):.1f}" for name in ("proxy_anchor", "proxy_nca"))
        assert f"| {row['class']} | {row['queries']} | {recalls} |" in text
    recalls = [[float(row[name]) for row in rows] for name in ("proxy_anchor", "proxy_nca")]
    ahead = [sum(a > b for a, b in zip(*pair, strict=True)) for pair in (recalls, recalls[::-1])]
    assert f"correlation over classes {statistics.correlation(*recalls):.2f}" in text
    assert f"each is ahead on {ahead[0]} of the 98, level on {98 - sum(ahead)}" in text
    assert ahead[0] == ahead[1]
    runs = [json.loads((folder / f"{name}.json").read_text()) for name in ("proxy_anchor", "proxy_nca")]
    best = " and ".join(f"{100 * run['best']['recall']['1']:.1f}" for run in runs)
    seconds = {f"{sum(e['train_seconds'] + e['eval_seconds'] for e in run['history'][1:]):.1f} s" for run in runs}
    assert f"best Recall@1 {best}, {seconds.pop()} of" in text
    assert not seconds


@pytest.mark.parametrize("rerank", ["none", "query_expansion", "k_reciprocal"])
def test_table_of_reranking_is_what_the_runs_wrote(rerank):
    file = "k_reciprocal" if rerank == "none" else rerank
    numbers = json.loads((REPOSITORY / f"docs/results/cars_half/rerank_{file}.json").read_text())
    prefix = "" if rerank == "none" else f"{rerank}_"
    keys = ("recall_at_1", "recall_at_2", "map_at_r", "r_precision")
    [line] = [
        each for each in (REPOSITORY / "docs/search.md").read_text().splitlines() if each.startswith(f"| `{rerank}`")
    ]
    cells = [cell.strip(" *") for cell in line.strip("|").split("|")][1:]
    assert cells == [f"{100 * numbers[prefix + key]:.1f}" for key in keys]


def test_rates_of_the_documents_are_those_of_the_records():
    records = REPOSITORY / "benchmarks" / "results"
    text = (REPOSITORY / "docs" / "speed.md").read_text()
    plain = text.replace("*", "")
    for row in map(json.loads, (records / "throughput.jsonl").read_text().splitlines()):
        train, evaluation = (f"{row[f'{name}_per_s']:,.0f} | {row[f'{name}_share']:.2f}" for name in ("train", "eval"))
        assert f"| {train} | {evaluation} | {row['s_per_epoch']:.2f} |" in text
    devices = [json.loads(line) for line in (records / "devices.jsonl").read_text().splitlines()][-8:]
    for row in devices:
        alone = next(each for each in devices if each["devices"] == 1 and each["overrides"] == row["overrides"])
        share = row["eval_per_s"] / (row["devices"] * alone["eval_per_s"])
        cells = (f"{row['devices']} | {row['batch']}", f"{row['train_per_s']:,.0f} | {row['efficiency']:.2f}")
        evaluated = f"{row['eval_per_s']:,.0f} | {share:.2f} | {row['s_per_epoch']:.2f}"
        assert f"| {' | '.join(cells)} | {evaluated} |" in text
    starts = [json.loads(line) for line in (records / "fast_start.jsonl").read_text().splitlines()]
    for row in (each for each in starts if "environment" in each):
        parts = (row[f"{name}_s"] for name in ("start", "images", "first_eval", "compile", "other"))
        assert f"| {row['compiler_cache']} | {' | '.join(f'{each:.1f}' for each in parts)} |" in plain
    for row in map(json.loads, (records / "loss.jsonl").read_text().splitlines()[-12:]):
        names = ("ms", "time_ratio", "graph_ms", "graph_ratio", "memory_ratio")
        cells = " | ".join("" if row[name] is None else f"{row[name]:.2f}" for name in names).replace("  ", " ")
        assert f" | {cells} |" in plain
    text = (REPOSITORY / "docs" / "search.md").read_text()
    for device in ("h200", "cpu"):
        for row in json.loads((records / f"retrieval_{device}.json").read_text())["embedding"]:
            assert all(f"{row[key]:,.0f}" in text for key in ("folder images/s", "ceiling images/s"))


def test_recall_by_float32_precision_is_that_of_the_records():
    text = (REPOSITORY / "docs" / "speed.md").read_text()
    for name in ("tf32", "ieee"):
        result = json.loads((REPOSITORY / "docs" / "results" / "cars_half_float32" / f"{name}.json").read_text())
        assert result["float32_precision"] == name
        best, last = (100 * result[which]["recall"]["1"] for which in ("best", "last"))
        assert f"| `{name}` | {best:.1f} | {last:.1f} |" in text
