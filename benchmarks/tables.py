"""Write the tables and figures of README.md and docs/ from the records of runs: `python benchmarks/tables.py`.

A table is between `<!-- table NAME -->` and `<!-- end -->`; NAME is a function here. The records are files that the
runs wrote (docs/results, benchmarks/results). A test checks that the documents are current. The file is long because
it holds one function per table.
"""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean, median
from typing import Any

import complexity
import pandas
import scale
from omegaconf import OmegaConf

from proxy_anchor.reports.figures import alpha_delta_map, empty_figure, recall_curves
from proxy_anchor.reports.paper import paper_results
from proxy_anchor.reports.runs import Run, flat, training_seconds
from proxy_anchor.reports.tables import Spread, comparison_rows, markdown_table, paired_difference

REPOSITORY = Path(__file__).resolve().parent.parent
RESULTS, RECORDS = REPOSITORY / "docs" / "results", REPOSITORY / "benchmarks" / "results"
DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("*.md"))]
SETS = {"Cars-196": "cars_half", "CUB-200-2011": "cub_half"}
CURRENT = "callbacks=none backbone.drop_path=0.4"  # study.py's
NAMES = {"losses": "loss", "methods": "method"}
Rows = list[dict[str, Any]]


def read(*names: str, folder: str = "cars_half") -> list[dict[str, Any]]:
    """The results of these runs."""
    return [json.loads((RESULTS / folder / f"{name}.json").read_text(encoding="utf-8")) for name in names]


def records(name: str) -> list[dict[str, Any]]:
    """The lines of a benchmark's record."""
    return [json.loads(line) for line in (RECORDS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


def recall(runs: Iterable[dict[str, Any]], epoch: str, k: int = 1) -> str:
    """Mean ± standard deviation of Recall@k in percent at the "untrained", "selected", "best" or "last" epoch."""
    return str(Spread.of(100 * run[epoch]["recall"][str(k)] for run in runs))


def seeds(name: str, *numbers: int) -> list[str]:
    """Files of a run's seeds."""
    return [f"{name}seed{number}" for number in numbers]


# -- README.md, docs/results.md ------------------------------------------------------------------------------------


def recipe_rows(recipes: Sequence[tuple[str, str, str]]) -> Rows:
    """A row for each recipe: (name, folder of the study, beginning of the runs' names)."""
    rows = []
    for name, folder, prefix in recipes:
        files = sorted((RESULTS / folder).glob(f"{prefix}seed*.json"))
        runs = [json.loads(file.read_text(encoding="utf-8")) for file in files]
        row = {"recipe": name, "seeds": ", ".join(str(run["seed"]) for run in runs), "device": runs[0]["device"]}
        row |= {f"{epoch} Recall@1": recall(runs, epoch) for epoch in ("untrained", "best", "last")}
        rows.append(row | {f"best @{k}": recall(runs, "best", k) for k in (2, 4, 8)})
    return rows


def half_cars() -> Rows:
    """The paper's recipe on both paths, and the recipe of this project."""
    paper = [("the paper's, float32", "cars_half", ""), ("the paper's, `speed=fast`", "cars_half", "fast_")]
    return recipe_rows([*paper, ("`experiment=cars_fast`", "cars_half_fast", "epochs40_")])


def half_cub() -> Rows:
    """The paper's recipe on both paths."""
    return recipe_rows([("the paper's, float32", "cub_half", ""), ("the paper's, `speed=fast`", "cub_half", "fast_")])


def selection() -> Rows:
    """The epoch selected on test classes, as in the paper, or on held-out ones."""
    rows = []
    for images, folder in SETS.items():
        for name, epoch, files in (
            ("the test classes, as in the paper", "best", seeds("fast_", 1, 2, 3)),
            ("held-out training classes", "selected", seeds("validation_", 1, 2, 3)),
        ):
            runs = read(*files, folder=folder)
            row = {"half of": images, "epoch selected on": name, "n": len(runs), "untrained": recall(runs, "untrained")}
            chosen = {"selected": recall(runs, epoch), "best": recall(runs, "best"), "last": recall(runs, "last")}
            rows.append(row | chosen)
    return rows


def stopped(run: dict[str, Any], patience: int) -> tuple[dict[str, Any], int]:
    """(the selected evaluation, the last epoch) that early stopping would have left of a whole run."""
    rows = [row for row in run["history"] if row["epoch"] > 0]
    values = [(row["validation"] or row["recall"])["1"] for row in rows]
    best = last = 0
    while last + 1 < len(rows) and last - best < patience:
        last += 1
        best = last if values[last] > values[best] else best
    return rows[best], rows[last]["epoch"]


def early_stopping() -> Rows:
    """Runs of 40 epochs, and what early stopping would have left of them."""
    rows = []
    for images, folder in SETS.items():
        for name, files in (("test", seeds("fast_", 1, 2, 3, 4, 5)), ("held-out", seeds("validation_", 1, 2, 3))):
            runs = read(*files, folder=folder)
            row = {"half of": images, "epoch selected on": f"{name} classes", "n": len(runs)}
            row |= {"last": recall(runs, "last"), "all 40 epochs": recall(runs, "selected")}
            for patience in (5, 10):
                ends = [stopped(run, patience) for run in runs]
                row[f"patience {patience}"] = str(Spread.of(100 * selected["recall"]["1"] for selected, _ in ends))
                row[f"epochs, patience {patience}"] = ", ".join(str(last) for _, last in ends)
            rows.append(row)
    return rows


def float32_precision() -> Rows:
    """cuDNN's convolutions with inputs rounded to TF32, and in float32."""
    return [
        {"`float32_precision`": f"`{name}`", "best Recall@1": recall([run], "best"), "last": recall([run], "last")}
        for name, run in zip(("tf32", "ieee"), read("tf32", "ieee", folder="cars_half_float32"), strict=True)
    ]


def settings(run: dict[str, Any]) -> str:
    """What the search of a loss or method chose, of the run's command."""
    keys = ("optimizer.", "loss.", "regulariser.")
    chosen = [each for each in run["command"].split() if each.startswith(keys)]
    return ", ".join(re.sub(r"^(optimizer|regulariser\.\w+)\.", "", each) for each in chosen)


def searched(kind: str) -> Rows:
    """Recall@1 on held-out classes of all settings, and the chosen ones."""
    rows = []
    for images, folder in SETS.items():
        runs = by_name(f"{folder}_{kind}_search")
        for name in runs:
            ended = [run for run in runs[name] if "diverged" not in run]
            values = [100 * run["selected"]["validation"]["1"] for run in ended]
            best = ended[values.index(max(values))]
            row = {"half of": images, NAMES[kind]: name, "settings": len(runs[name])}
            row |= {"lowest": min(values), "highest": max(values)}
            rows.append(row | {"chosen": settings(best), "its epoch": best["selected"]["epoch"]})
    return rows


def by_name(study: str) -> dict[str, list[dict[str, Any]]]:
    """{loss or method: its runs} of a study, in the order of their seeds or settings."""
    found: dict[str, list[dict[str, Any]]] = {}
    for file in sorted((RESULTS / study).glob("*.json")):
        name = re.sub(r"_(seed)?\d+$", "", file.stem)
        found.setdefault(name, []).append(json.loads(file.read_text(encoding="utf-8")))
    return found


def evaluated_every_fifth(run: dict[str, Any], search: list[dict[str, Any]]) -> dict[str, Any]:
    """A run as if evaluated every fifth epoch, and its epoch that was best on the held-out classes of a search."""
    rows = [row for row in run["history"] if row["epoch"] and row["epoch"] % 5 == 0]
    chosen = max(search, key=lambda each: each["selected"]["validation"]["1"])["selected"]["epoch"]
    [selected] = [row for row in rows if row["epoch"] == chosen]
    return run | {"best": max(rows, key=lambda row: row["recall"]["1"]), "selected": selected}


def at_their_best(kind: str) -> Rows:
    """Every loss or method with the settings of its search, against Proxy-Anchor (its paper's settings for methods)."""
    rows = []
    for images, folder in SETS.items():
        runs, epochs = by_name(f"{folder}_{kind}"), ["best", "last"]
        if kind == "methods":
            searches = by_name(f"{folder}_methods_search") | {
                "proxy_anchor": read("proxy_anchor_3", folder=f"{folder}_losses_search")
            }
            runs["proxy_anchor"] = read(*seeds("fast_", 1, 2, 3, 4, 5), folder=folder)
            runs = {name: [evaluated_every_fifth(run, searches[name]) for run in own] for name, own in runs.items()}
            epochs.insert(1, "selected")
        reference = runs["proxy_anchor"]
        runs = dict(sorted(runs.items(), key=lambda each: -mean(run["best"]["recall"]["1"] for run in each[1])))
        for name, own in runs.items():
            row = {"half of": images, NAMES[kind]: name, "n": len(own)}
            for epoch in epochs:
                row |= {
                    epoch: recall(own, epoch),
                    f"{epoch}, against `proxy_anchor`": paired_difference(own, reference, epoch),
                }
            rows.append(row | {"best epoch": str(Spread.of(run["best"]["epoch"] for run in own))})
    return rows


def methods_seconds() -> Rows:
    """Training seconds of an epoch and peak memory of every method, one run at a time."""
    runs = {name: own[0] for name, own in by_name("cars_half_methods_seconds").items()}
    runs = {"proxy_anchor": runs.pop("proxy_anchor")} | runs
    seconds = {
        name: median(row["train_seconds"] for row in run["history"] if row["epoch"] > 2) for name, run in runs.items()
    }
    first = runs["proxy_anchor"]
    return [
        {"method": name, "s / epoch": f"{seconds[name]:.2f}", "ratio": f"{seconds[name] / seconds['proxy_anchor']:.2f}"}
        | {"memory, GiB": f"{run['peak_memory_training_gib']:.2f}"}
        | {"more, MiB": f"{1024 * (run['peak_memory_training_gib'] - first['peak_memory_training_gib']):.0f}"}
        for name, run in runs.items()
    ]


def losses_seconds() -> Rows:
    """How soon each loss learns: epochs over five seeds, seconds of one run at a time."""
    by_epoch = {row["loss"]: row for row in comparison_rows(by_name("cars_half_losses"))}
    epochs = [key for key in next(iter(by_epoch.values())) if key.startswith("epochs to ")]
    alone = comparison_rows(by_name("cars_half_seconds"), [float(key.split()[-1]) for key in epochs])
    rows = []
    for row in sorted(alone, key=lambda row: -by_epoch[row["loss"]]["best R@1"].mean):
        own = {key: by_epoch[row["loss"]][key] for key in ("loss", *epochs)}
        rows.append(own | {key: row[key] for key in row if key.startswith("s to ")} | {"images/s": row["images/s"]})
    return rows


def noise() -> Rows:
    """Losses at their best settings by share of wrong labels."""
    clean, noisy = by_name("cars_half_losses"), by_name("cars_half_noise")
    rows = []
    for loss in sorted({name.partition("_")[2] for name in noisy}):
        shares = {0: clean[loss]} | {share: noisy[f"noise{share / 100:.1f}_{loss}"] for share in (20, 40)}
        row: dict[str, Any] = {"loss": loss, "n": ", ".join(str(len(runs)) for runs in shares.values())}
        for epoch, (share, runs) in itertools.product(("best", "last"), shares.items()):
            row[f"{epoch}, {share} %"] = recall(runs, epoch)
        rows.append(row)
    return rows


def worst_classes() -> Rows:
    """Proxy-Anchor's ten worst."""
    table = pandas.read_csv(RESULTS / "cars_half_report" / "class_recall.csv").head(10)
    table[["proxy_anchor", "proxy_nca"]] *= 100
    return table.to_dict("records")


def alpha_delta() -> Rows:
    """Best Recall@1 over alpha and delta."""
    found = {name: recall(runs, "best") for name, runs in by_name("cars_half_alpha_delta").items()}
    return [
        {"delta": delta} | {f"alpha {alpha}": found.get(f"alpha{alpha}_delta{delta}") for alpha in (4, 8, 16, 32, 64)}
        for delta in ("0.4", "0.3", "0.2", "0.1", "0")
    ]


def varied(study: str, shared: str, *settings: str) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """{values of these settings: runs} of a study and of one run that another study has, in order."""
    runs = [json.loads(file.read_text(encoding="utf-8")) for file in (RESULTS / study).glob("*.json")]
    runs += read(shared, folder="")
    found: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for run in sorted(runs, key=lambda run: -int(run["config"]["trainer"]["max_epochs"])):
        config = dict(flat(run["config"]))
        found.setdefault(tuple(config[key] for key in settings), []).append(run)
    return dict(sorted(found.items()))


def dimensions() -> Rows:
    """By embedding dimension."""
    rows = []
    for (dimension,), runs in varied("cars_half_dimension", "cars_half/fast_seed1", "embedding_dim").items():
        row = {"dimension": dimension, "untrained @1": recall(runs, "untrained")}
        row |= {f"best @{k}": recall(runs, "best", k) for k in (1, 2, 4, 8)}
        rows.append(row | {"its epoch": runs[0]["best"]["epoch"]})
    return rows


def printed(table: str) -> list[Any]:
    """The paper's Recall@1 for Cars-196 in one of its tables."""
    return [each for each in paper_results() if (each.table, each.dataset, each.k) == (table, "cars", 1)]


def batch_sizes() -> Rows:
    """By batch size, with as many epochs, and with as many steps; with the paper's numbers."""
    paper = {each.batch_size: each.value for each in printed("tab:batch_size_fine")}
    rows = []
    for (batch,), runs in varied("cars_half_batch_size", "cars_half/fast_seed1", "data.batch_size").items():
        epochs, steps = runs[0], runs[-1]  # the longest first; one run for 180
        row = {"batch": batch, "epochs of 880 steps": steps["config"]["trainer"]["max_epochs"]}
        for title, run in {"40 epochs": epochs, "880 steps": steps}.items():
            row |= {f"{title}, {epoch} @1": recall([run], epoch) for epoch in ("best", "last")}
        rows.append(row | {"paper, 40 epochs": paper[batch]})
    return rows


def image_sizes() -> Rows:
    """By network and side of the crop, with the paper's numbers."""
    keys = ("backbone.name", "dataset.images.crop")
    rows = []
    for (network, side), runs in varied("cars_half_image_size", "cars_half_fast/epochs40_seed1", *keys).items():
        row = {"network": network, "side, px": side, "untrained @1": recall(runs, "untrained")}
        row |= {f"best @{k}": recall(runs, "best", k) for k in (1, 2, 4, 8)}
        rows.append(row | {"last @1": recall(runs, "last")})
    for each in printed("tab:eval_cub_cars_supp"):
        if each.backbone == "bninception":
            row = {"network": "paper: BN-Inception, whole Cars-196", "side, px": each.crop}
            rows.append(row | {"best @1": each.value})
    return rows


def recipe_search(study: str) -> Rows:
    """Changes of a recipe, one run each, by Recall@1 in the half of the training classes that did not train."""
    [start] = read("start", folder=study)
    names = sorted(file.stem for file in (RESULTS / study).glob("*.json"))
    others = ("mirrored_", "averaged_")  # `two_folds`
    runs = read(*(each for each in names if "fold1" not in each and not each.startswith(others)), folder=study)
    rows = []
    for run in sorted(runs, key=lambda each: -each["last"]["recall"]["1"]):
        row = {"changed": changes(start, run)}
        row |= {f"{epoch} Recall@1": f"{100 * run[epoch]['recall']['1']:.1f}" for epoch in ("last", "best")}
        rows.append(row | {"best epoch": run["best"]["epoch"]})
    return rows


def two_folds(begin: str, *prefixes: str) -> Rows:
    """Changes of a recipe on CUB by what they reach in both halves of the training classes: the rows of these prefixes.

    By MAP@R where the records have it, or by Recall@1, at the last epoch. begin: the run whose changes are named.
    """
    rows, study = [], "cub_half_recipe_search"
    [start] = read(begin, folder=study)
    for file in sorted(file for each in prefixes for file in (RESULTS / study).glob(f"{each}*+fold1.json")):
        runs = read(file.stem.removesuffix("+fold1"), file.stem, folder=study)
        row = {"changed": changes(start, runs[0])}
        if "map_at_r" in runs[0]["last"]:
            row["MAP@R, mean"] = sum(100 * run["last"]["map_at_r"] for run in runs) / 2
        row |= {f"last, fold {fold}": recall([run], "last") for fold, run in enumerate(runs)}
        for epoch in ("last", "best"):
            row[f"{epoch}, mean"] = sum(100 * run[epoch]["recall"]["1"] for run in runs) / 2
        rows.append(row)
    rows.sort(key=lambda row: -row.get("MAP@R, mean", row["last, mean"]))
    return [{key: f"{value:.1f}" if isinstance(value, float) else value for key, value in row.items()} for row in rows]


def changes(start: dict[str, Any], run: dict[str, Any]) -> str:
    """The overrides of a run that change a setting of the start."""
    own = [each for each in run["command"].split() if each not in start["command"].split()]
    values = dict(each.split("=", 1) for each in own)  # of two the last counts
    before, after = (OmegaConf.create(each["config"]) for each in (start, run))
    changed = [key for key in values if OmegaConf.select(before, key) != OmegaConf.select(after, key)]
    return ", ".join(f"`{key.removeprefix('dataset.images.')}={values[key]}`" for key in changed) or "nothing"


def best_recipes() -> Rows:
    """Our recipes on the test classes, with the seconds of one run on a GPU, without its start."""
    rows = []
    cars, cub = SETS
    for images, folder, recipe in (
        (cars, "cars_half_best", "experiment=cars_best"),
        (cars, "cars_half_best_central", "experiment=cars_best dataset.images.resize=288"),
        (cub, "cub_half_best", "experiment=cub_best"),
        (cub, "cub_half_best_current", f"experiment=cub_best {CURRENT}"),
        (cub, "cub_half_best_head", f"experiment=cub_best {CURRENT} backbone.search_with=null"),
    ):
        runs = [run for each in by_name(folder).values() for run in each]
        alone = [run for run in runs if run["parallel_jobs"] == 1]
        seconds = Spread.of(
            training_seconds(run["history"])[-1] + sum(each["eval_seconds"] for each in run["history"][1:])
            for run in alone
        )
        row = {"half of": images, "recipe": f"`{recipe}`", "n": len(runs)}
        row |= {f"{epoch} Recall@1": recall(runs, epoch) for epoch in ("untrained", "best", "last")}
        starts = Spread.of(run["startup_seconds"]["total"] for run in alone)
        rows.append(row | {"training and evaluation, s": str(seconds), "start, s": str(starts)})
    return rows


# -- docs/speed.md, search.md, losses.md ----------------------------------------------------------------------------


def latest(name: str) -> list[dict[str, Any]]:
    """What the last run of a benchmark wrote."""
    rows = records(name)
    return [row for row in rows if row["date"] == rows[-1]["date"]]


def short(value: float) -> str:
    """Two digits, or a whole number."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def throughput() -> Rows:
    """Training and evaluation as a share of the network alone: the last row of each network."""
    return [
        {
            "commit": row["commit"],
            "network": row["network"],
            "batch": row["batch"],
            "training images/s": f"{row['train_per_s']:,.0f}",
            "of the network alone": f"{row['train_share']:.2f}",
            "evaluating images/s": f"{row['eval_per_s']:,.0f}",
            "of the network alone ": f"{row['eval_share']:.2f}",
            "s / epoch": f"{row['s_per_epoch']:.2f}",
        }
        for row in {row["network"]: row for row in records("throughput")}.values()
    ]


def devices() -> Rows:
    """Training on several GPUs as a share of as many single ones."""
    images = {"cars": "half of Cars-196", "sop": "SOP's size"}
    return [
        {
            "images": next((name for key, name in images.items() if f"dataset={key} " in row["overrides"]), ""),
            "commit": row["commit"],
            "GPUs": row["devices"],
            "batch": row["batch"],
            "training images/s": f"{row['train_per_s']:,.0f}",
            "of as many single ones": f"{row['efficiency']:.2f}",
            "evaluating images/s": f"{row['eval_per_s']:,.0f}",
            "s / epoch": f"{row['s_per_epoch']:.2f}",
            "best Recall@1": f"{row['recall_at_1']:.1f}" if "dataset=cars " in row["overrides"] else "-",
        }
        for row in records("devices")
    ]


def ddp() -> Rows:
    """A step on several GPUs by the arguments of torch's wrapper."""
    keys = {"commit": "commit", "GPUs": "devices", "images per GPU": "per_gpu", "form": "form"}
    return [
        {title: row[key] for title, key in keys.items()}
        | {"a step, ms": f"{row['step_ms']:.1f}", "speed": f"{row['share']:.2f}"}
        for row in records("ddp")
    ]


def fast_start() -> Rows:
    """Seconds from the command to the first step: the last start of each network, by compiler's cache."""
    parts = {"s": "start_s", "images": "images_s", "first evaluation": "first_eval_s", "compiling": "compile_s"}
    last = {}
    for row in records("fast_start"):
        given = dict(each.split("=", 1) for each in row["overrides"].split())
        last[given["backbone"], given.get("compile", "auto"), row["compiler_cache"]] = row
    return [
        {"commit": row["commit"], "network": network, "compile": compile_, "compiler's cache": cache}
        | {title: row[key] for title, key in parts.items()}
        | {"importing and the rest": row["other_s"]}
        for (network, compile_, cache), row in last.items()
    ]


def compiled() -> Rows:
    """The check of compiled networks: the last row of each network and mode of batch norm."""
    rows = {(row["network"], row["batch_norm"]): row for row in records("compiled") if "draws" in row}
    return [
        {key: row[key] for key in ("commit", "network", "batch_norm", "weights")}
        | {"passed": f"{row['passed']} of {row['draws']}"}
        | {f"cosine, {each}": f"{row[each]:.3f}" for each in ("plain", "compiled")}
        for _, row in sorted(rows.items())
    ]


def allocator() -> Rows:
    """glibc's default, and freed memory kept."""
    return [
        {
            "commit": row["commit"],
            "images/s": row["direction"],
            "glibc's default": row["default_images_per_s"],
            "freed memory kept": row["kept_images_per_s"],
            "ratio": row["speed_up"],
        }
        for row in latest("allocator")
    ]


def loss() -> Rows:
    """The last record of benchmarks/loss.py: each form, relative to the bare product."""
    columns = {"launched, ms": "ms", "ratio": "time_ratio", "on the GPU, ms": "graph_ms", "ratio ": "graph_ratio"}
    columns |= {"memory": "memory_ratio"}
    return [
        {"commit": row["commit"], "classes": f"{row['classes']:,}", "loss": row["loss"]}
        | {title: None if row[key] is None else f"{row[key]:.2f}" for title, key in columns.items()}
        for row in latest("loss")
    ]


def search() -> Rows:
    """Recall@K of a whole gallery by every engine."""
    return [
        {
            "commit": row["commit"],
            "device": row["device"],
            "engine": row["engine"],
            "s": f"{row['seconds']:.2f}",
            "of the bare product": f"{row['ratio']:.2f}",
            "Recall@1, 10, 100, 1000": row["recall"],
        }
        for row in records("search")
        if "recall" in row
    ]


def reranking() -> Rows:
    """Metrics with and without re-ranking."""
    keys = {"Recall@1": "recall_at_1", "Recall@2": "recall_at_2", "MAP@R": "map_at_r", "R-precision": "r_precision"}
    expansion, reciprocal = read("rerank_query_expansion", "rerank_k_reciprocal", folder="cars_half_first_edition")
    rows = {"none": (reciprocal, ""), "query_expansion": (expansion, "query_expansion_")}
    rows["k_reciprocal"] = (reciprocal, "k_reciprocal_")
    return [
        {"`rerank=`": f"`{name}`"} | {title: 100 * numbers[prefix + key] for title, key in keys.items()}
        for name, (numbers, prefix) in rows.items()
    ]


def embedding_folders() -> Rows:
    """Embedding a folder of images, and the network alone."""
    return [
        {
            "commit": row["commit"],
            "device": row["device"],
            "precision": {"32": "float32"}.get(row["precision"], row["precision"]),
            "images/s": f"{row['folder images/s']:,.0f}",
            "the network alone": f"{row['ceiling images/s']:,.0f}",
            "share": f"{row['folder / ceiling %'] / 100:.2f}",
        }
        for row in records("retrieval")
        if row["kind"] == "embedding"
    ]


def gallery_sizes() -> Rows:
    """Search by size of the gallery, in milliseconds."""
    found = [
        {
            "commit": row["commit"],
            "device": row["device"],
            "gallery": f"{row['gallery']:,}",
            "search": row["search"],
            "one query": short(row["one query ms"]),
            "per query of 100": short(row["per query of 100 ms"]),
            "building, s": short(row["build s"]),
        }
        for row in records("retrieval")
        if row["kind"] == "search" and row["search"].startswith("exact")
    ]
    return sorted(found, key=lambda row: int(row["gallery"].replace(",", "")))


def loss_complexity() -> Rows:
    """Fitted exponents and the paper's."""
    points = records("complexity")
    columns = [("images", "time"), ("batch", "time"), ("batch", "memory"), ("classes", "time"), ("classes", "memory")]
    rows: dict[str, dict[str, Any]] = {}
    for axis, what in columns:
        for each in complexity.summarise(axis, [point for point in points if point["axis"] == axis]):
            row = rows.setdefault(each["loss"], {"loss": f"`{each['loss']}`", "paper": each["paper"]})
            paper = each["paper's exponent"]
            row[f"{axis}, {what}"] = each[what].replace("-0.00", "0.00") + (
                f" ({paper})" if what == "time" and paper != "-" else ""
            )
    return list(rows.values())


TABLES: dict[str, Callable[[], Rows]] = {
    each.__name__: each
    for each in (
        *(
            selection,
            early_stopping,
            half_cars,
            half_cub,
            float32_precision,
            losses_seconds,
            noise,
            worst_classes,
        ),
        *(
            alpha_delta,
            dimensions,
            batch_sizes,
            image_sizes,
            methods_seconds,
            best_recipes,
            throughput,
            devices,
            ddp,
            fast_start,
            compiled,
            allocator,
            loss,
        ),
        *(search, reranking, embedding_folders, gallery_sizes, loss_complexity),
    )
}
TABLES |= {f"{kind}_search": partial(searched, kind) for kind in NAMES}
TABLES |= {kind: partial(at_their_best, kind) for kind in NAMES}
TABLES |= {f"{each}_recipe_search": partial(recipe_search, f"{each}_recipe_search") for each in SETS.values()}
TABLES |= {
    "mirrored": partial(two_folds, "better_cosine80", "better_", "mirrored_"),
    "averaged": partial(two_folds, "averaged_start", "averaged_"),
}
COMPUTED = {
    "scale_training": partial(scale.table, scale.TRAINING),
    "scale_gallery": partial(scale.table, scale.GALLERY),
}


def table(name: str) -> str:
    """The Markdown of a table."""
    return COMPUTED[name]() if name in COMPUTED else markdown_table(TABLES[name]())


def current(text: str) -> str:
    """A document with current tables."""
    return re.sub(
        r"(<!-- table (\w+) -->\n).*?(<!-- end -->)",
        lambda found: f"{found[1]}\n{table(found[2])}\n\n{found[3]}",
        text,
        flags=re.S,
    )


def pictures() -> dict[str, Any]:
    """{name: figure} of docs/results.md."""
    grid = [run for [run] in by_name("cars_half_alpha_delta").values()]
    figures = {
        "alpha_delta": alpha_delta_map([Run(run["config"], run, "", "cars", "cars") for run in grid]),
        "losses_by_epoch": recall_curves(by_name("cars_half_losses")),
        "losses_by_seconds": recall_curves(by_name("cars_half_seconds"), against="seconds"),
    }
    for name, x, rows, columns in (
        ("by_dimension", "dimension", dimensions(), ["best @1"]),
        ("by_batch_size", "batch", batch_sizes(), ["40 epochs, best @1", "880 steps, best @1", "paper, 40 epochs"]),
    ):
        figures[name], axes = empty_figure()
        for column in columns:
            axes.plot([row[x] for row in rows], [float(row[column]) for row in rows], marker="o", label=column)
        axes.set(xlabel=x, ylabel="Recall@1 (%)", xscale="log" if x == "dimension" else "linear")
        axes.set_xticks([row[x] for row in rows], [str(row[x]) for row in rows])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    return figures


def main(documents: Sequence[Path] = DOCUMENTS) -> None:
    """Write every document whose tables are not current, and name it."""
    for file in documents:
        text = file.read_text(encoding="utf-8")
        if (new := current(text)) != text:
            file.write_text(new, encoding="utf-8")
            print(f"written: {file.relative_to(REPOSITORY)}")
    for name, figure in pictures().items():
        figure.savefig(REPOSITORY / "docs" / "pictures" / f"cars_half_{name}.png", dpi=120)


if __name__ == "__main__":
    main()
