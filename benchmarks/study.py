"""The runs behind docs/results.md: `python benchmarks/study.py cars_half dataset.root=DIR --jobs 2`.

Trains every run of a study that has no record yet in docs/results/STUDY/RUN.json: with the code of `src/train.py`, the
overrides of RUN and those of the command line, in `--jobs` parallel processes, each one run after another. A record is
the run's result.json, without the paths of the machine, with the number of parallel jobs; times of runs in parallel are
not those of one alone. `python benchmarks/study.py --list` names the studies and what is missing.

`cub_half*` read the half of CUB-200-2011 as own data: DIR holds classes.txt and images/CLASS/*.jpg. `*_losses` and
`*_methods` train every loss, or what is added to Proxy-Anchor, with its best settings of `*_search`, which tries the
same number of settings for each (eight of a loss, two of a method) on held-out training classes, evaluated every fifth
epoch, as the runs of `*_methods` are; the choice looks at no test class. `*_recipe_search` tries changes of recipes on
half of the training classes. `*_seconds` and `*_best*` are for one run at a time: `--jobs 1`, and nothing else on the
GPU.

The file is long because it holds the settings of every study.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from common import HERE
from hydra import compose, initialize_config_dir

sys.path.insert(0, str(HERE.parent / "src"))

from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.run import commit
from proxy_anchor.retrieval.metrics import metrics_at_r
from proxy_anchor.training.callbacks.recall import RecallCallback
from proxy_anchor.training.finite import NotFinite
from proxy_anchor.utils import write_json
from train import train

RESULTS = HERE.parent / "docs" / "results"
Runs = dict[str, list[str]]  # record's name: overrides

LITE0 = ["backbone=efficientnet_lite0", "search_engine=torch", "logger=csv", "trainer.enable_progress_bar=false"]
SETS = {
    "cars_half": ["dataset=cars", "dataset.allow_partial=true", *LITE0],
    "cub_half": ["dataset=folder", "recipe=cub", *LITE0],
}
FAST = ["speed=fast", "compile=true"]
EVERY_FIFTH = "trainer.check_val_every_n_epoch=5"
CARS = SETS["cars_half"]
# Settings that are tried: eight for each loss, its own default among them.
PROXY_RATES = {"optimizer.lr": ["1e-4", "3e-4"], "optimizer.proxy_lr_mult": ["10", "100"]}
PAIR_RATES = {"optimizer.lr": ["3e-5", "1e-4", "2e-4", "4e-4"]}
SEARCHED: dict[str, dict[str, list[str]]] = {
    "proxy_anchor": {**PROXY_RATES, "loss.alpha": ["16", "32"]},
    "proxy_nca": {**PROXY_RATES, "loss.scale": ["16", "32"]},
    "soft_triple": {**PROXY_RATES, "loss.scale": ["10", "20"]},
    "normalized_softmax": {**PROXY_RATES, "loss.temperature": ["0.05", "0.1"]},
    "multi_similarity": {**PAIR_RATES, "loss.beta": ["40", "50"]},
    "triplet": {**PAIR_RATES, "loss.margin": ["0.1", "0.2"]},
    "n_pair": {**PAIR_RATES, "loss.scale": ["20", "40"]},
}

# What is added to Proxy-Anchor with its paper's settings, or replaces it: two settings of its own for each, its default
# (conf/regulariser, conf/loss) among them.
METHODS: dict[str, dict[str, list[str]]] = {
    "proxy_synthesis": {"regulariser.proxy_synthesis.mu": ["0.5", "1.0"]},
    "metrix": {"regulariser.metrix.weight": ["0.2", "0.4"]},
    "nested": {"regulariser.nested.weight": ["0.3", "1.0"]},
    "tcm": {"regulariser.tcm.weight": ["0.3", "1.0"]},
    "anti_collapse": {"regulariser.anti_collapse.weight": ["0.01", "0.1"]},
    "potential_field": {"loss.num_proxies": ["2", "15"]},
}


def colors(value: float) -> list[str]:
    """Brightness, contrast and saturation."""
    return [f"dataset.images.{each}={value}" for each in ("brightness", "contrast", "saturation")]


# Recipes beyond the paper: the starts, changes of them, what the starts are then changed to, and changes of that.
LARGER = ["dataset.images.eval_crop=288", "dataset.images.resize=329"]
STARTS = {
    "cars_half": [
        "experiment=cars_fast",
        *CARS,
        *LARGER,
        "backbone.pooling=gem",
        "backbone.drop_path=0.2",
        "dataset.images.hue=0.3",
        "dataset.images.grayscale=0.2",
    ],
    "cub_half": [*SETS["cub_half"], *FAST, *LARGER, "backbone.drop_path=0.4", *colors(0.25)],
}
SMALL_BORDER = ["dataset.images.resize=288", "dataset.images.crop=256"]
COSINE = ["scheduler=cosine", "trainer.max_epochs=80"]
BETTER = {
    "cars_half": [*SMALL_BORDER, "embedding_dim=1024"],
    "cub_half": [*SMALL_BORDER, "backbone=tf_efficientnet_lite2"],
}
LONG = [*BETTER["cub_half"], *COSINE]
MIRRORED = [*LONG, "backbone.search_with=features+flip"]
# Averages over about as many steps as a run on half of the classes has.
AVERAGED = [*MIRRORED, "callbacks=ema", "callbacks.ema.multi_avg_fn.decay=0.998", "backbone.drop_path=0.6"]
CHANGES = {
    "start": [],
    "seed2": ["seed=2"],
    "fold1": ["validation.fold=1"],
    "eval256": ["dataset.images.eval_crop=256", "dataset.images.resize=292"],
    "resize304": ["dataset.images.resize=304"],
    "squash": ["dataset.images.resize=null"],
    "crop256": ["dataset.images.crop=256"],
    "crop288": ["dataset.images.crop=288"],
    "dim1024": ["embedding_dim=1024"],
    "ema": ["callbacks=ema"],
    **{
        f"ema{decay}": ["callbacks=ema", f"callbacks.ema.multi_avg_fn.decay={decay}"] for decay in (0.995, 0.998, 0.999)
    },
    **{each: [f"backbone.search_with={each}"] for each in ("features", "flip")},
    "alpha16": ["loss.alpha=16"],
    "metrix_features": ["regulariser=metrix_features"],
    "frozen": ["batch_norm=frozen"],
    "epochs40": ["trainer.max_epochs=40"],
    "layer_decay0.8": ["optimizer.layer_decay=0.8"],
    "lite2": ["backbone=tf_efficientnet_lite2"],
    "proxy_synthesis": ["regulariser=proxy_synthesis"],
    "metrix": ["regulariser=metrix"],
    "cosine80": COSINE,
    **{f"drop_path{rate}": [f"backbone.drop_path={rate}"] for rate in (0.3, 0.6, 0.8)},
    "colors": [*colors(0.4), "dataset.images.hue=0.1", "dataset.images.grayscale=0.2"],
    "gem": ["backbone.pooling=gem"],
    "lr2e-4": ["optimizer.lr=2e-4"],
    "warmup5": ["optimizer.warmup_epochs=5"],
    "batch90": ["data.batch_size=90"],
    "multi_similarity": ["loss=multi_similarity", "data.images_per_class=5", "data.batch_size=120"],  # of 25 classes
}
FIRST = "start seed2 eval256 resize304 crop256 crop288 dim1024 ema layer_decay0.8 lite2 proxy_synthesis metrix"
IN_TWO_FOLDS = {  # changes of MIRRORED and of AVERAGED
    "mirrored": "start ema0.995 ema0.998 alpha16 metrix_features frozen epochs40 drop_path0.6",
    "averaged": "start drop_path0.8 lr2e-4 layer_decay0.8 warmup5 batch90+ema0.999 multi_similarity frozen",
}
# Which changes were tried of the start, of BETTER and of LONG, and in two folds; several together are joined by "+".
TRIED = {
    "cars_half": {
        "": FIRST,
        "better_": "start seed2 metrix drop_path0.3 cosine80 cosine80+drop_path0.3 cosine80+drop_path0.3+squash",
    },
    "cub_half": {
        "": FIRST,
        "better_": "start resize304 drop_path0.6 cosine80 cosine80+fold1",
        "long_": "crop288 dim1024 layer_decay0.8 drop_path0.6 colors gem metrix lr2e-4 metrix+dim1024 "
        "metrix+dim1024+drop_path0.6 features flip",
        **{
            f"{name}_": " ".join(f"{each} {each}+fold1" for each in changes.split())
            for name, changes in IN_TWO_FOLDS.items()
        },
    },
}
CUB_BEST = ["experiment=cub_best", "dataset=folder", "recipe=cub", *LITE0[1:]]  # its own network
CURRENT = ["callbacks=none", "backbone.drop_path=0.4"]  # the weights after the last step, no average


def by_seed(name: str, seeds: Iterable[int], *overrides: str) -> Runs:
    """One run per seed."""
    return {f"{name}seed{seed}": [*overrides, f"seed={seed}"] for seed in seeds}


def paths_of_training(images: list[str]) -> Runs:
    """The paper's recipe in float32 and on the fast path, and selection by held-out classes."""
    return {
        **by_seed("fast_", range(1, 6), *images, *FAST),
        **by_seed("", range(1, 6), *images),
        **by_seed("validation_", range(1, 4), *images, *FAST, "validation=classes"),
    }


def chosen(name: str, images: list[str]) -> list[str]:
    """The overrides that choose a loss, with batches that the classes of the set can fill, or a regulariser.

    Losses of pairs take five images of a class (Wang et al. 2019), N-pair two: 40 of CUB's 50 training classes and 78
    of Cars' 98 stay when classes are held out, and all its runs have the same batch.
    """
    if name == "n_pair":
        return ["loss=n_pair", f"data.batch_size={156 if images == CARS else 80}"]
    if name in ("multi_similarity", "triplet"):
        return [f"loss={name}", "data.images_per_class=5"]
    return [f"loss={name}" if name in SEARCHED or name == "potential_field" else f"regulariser={name}"]


def search(grids: dict[str, dict[str, list[str]]], images: list[str]) -> Runs:
    """All settings of every loss or method, on held-out training classes."""
    runs = {}
    for name, grid in grids.items():
        for number, values in enumerate(itertools.product(*grid.values())):
            own = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
            runs[f"{name}_{number}"] = [*images, *FAST, *chosen(name, images), *own, "validation=classes", EVERY_FIFTH]
    return runs


def best_settings(study: str, name: str, grid: dict[str, list[str]]) -> list[str]:
    """Overrides of the run with the highest Recall@1 on held-out classes.

    Raises UsageError where a run is missing or has other settings.
    """
    found = []
    for number, values in enumerate(itertools.product(*grid.values())):
        file = RESULTS / study / f"{name}_{number}.json"
        if not file.exists():
            raise UsageError(f"{study} lacks {file.name}: run `python benchmarks/study.py {study} ...` first.")
        result = json.loads(file.read_text(encoding="utf-8"))
        own = [f"{key}={value}" for key, value in zip(grid, values, strict=True)]
        if not {*own} <= {*result["command"].split()}:
            raise UsageError(f"{study}/{file.name} is of other settings than study.py's: remove it and run it again.")
        recall = -1.0 if "diverged" in result else result["selected"]["validation"]["1"]
        found.append((recall, -number, own))
    return max(found)[2]


def at_their_best(
    study: str, grids: dict[str, dict[str, list[str]]], images: list[str], *own: str, seeds: Iterable[int] = range(1, 6)
) -> Runs:
    """Every loss or method with its best settings, and `own` overrides."""
    runs: Runs = {}
    for name, grid in grids.items():
        best = best_settings(f"{study}_search", name, grid)
        runs |= by_seed(f"{name}_", seeds, *images, *FAST, *chosen(name, images), *best, *own)
    return runs


def seconds_of_methods() -> Runs:
    """A few epochs of Proxy-Anchor alone, and of every method with its own defaults."""
    few = [*CARS, *FAST, "trainer.max_epochs=6", "seed=1"]
    return {f"{name}_seed1": [*few, *chosen(name, CARS)] for name in ("proxy_anchor", *METHODS)}


def dimensions() -> Runs:
    """The paper's recipe by embedding dimension; 512 is `fast_seed1` of `cars_half`."""
    return {f"dim{dim}": [*CARS, *FAST, f"embedding_dim={dim}"] for dim in (32, 64, 128, 256, 1024)}


def alpha_delta() -> Runs:
    """The paper's grid of alpha and delta."""
    grid = itertools.product((4, 8, 16, 32, 64), (0, 0.1, 0.2, 0.3, 0.4))
    fast = [*CARS, *FAST, EVERY_FIFTH, "seed=1"]
    return {
        f"alpha{alpha}_delta{delta}": [*fast, f"loss.alpha={alpha}", f"loss.delta={delta}"] for alpha, delta in grid
    }


def batch_sizes() -> Runs:
    """The paper's recipe by batch size, with its 40 epochs and with as many steps as a batch of 180 takes in them.

    180 is `fast_seed1` of `cars_half`.
    """
    runs = {}
    for batch in (30, 60, 90, 120, 150):
        own = [*CARS, *FAST, f"data.batch_size={batch}"]
        epochs = round(40 * (4052 // 180) / (4052 // batch))
        steps = [f"trainer.max_epochs={epochs}", f"scheduler.step_size={epochs // 2}"]
        runs |= {f"batch{batch}": own, f"steps_batch{batch}": [*own, *steps]}
    return runs


def image_sizes() -> Runs:
    """`cars_fast` by network and image size; test images are resized to 8/7 of the crop.

    EfficientNet-Lite0 at 224 px is `epochs40_seed1` of `cars_half_fast`.
    """
    runs = {}
    for network, sizes in {"tf_efficientnet_lite0": (256, 288, 320), "tf_efficientnet_lite2": (224, 260)}.items():
        for size in sizes:
            side = [f"dataset.images.crop={size}", f"dataset.images.resize={round(size * 8 / 7)}"]
            fast = ["experiment=cars_fast", "dataset.allow_partial=true", *LITE0[1:]]
            runs[f"{network}_{size}"] = [*fast, f"backbone={network}", *side]
    return runs


def label_noise() -> Runs:
    """Two proxy losses and two of pairs at their best settings, with wrong labels; without: `cars_half_losses`."""
    losses = {name: SEARCHED[name] for name in ("proxy_anchor", "proxy_nca", "multi_similarity", "triplet")}
    best = at_their_best("cars_half_losses", losses, CARS)
    return {
        f"noise{share}_{name}": [*overrides, f"dataset.label_noise={share}"]
        for share, (name, overrides) in itertools.product((0.2, 0.4), best.items())
    }


def recipe_search(images: str) -> Runs:
    """Changes of a recipe, trained on half of the training classes and searched in the other half."""
    held_out = ["validation=folds", "validation.num_folds=2", "validation.fold=0", "trainer.check_val_every_n_epoch=10"]
    starts = {"": [], "better_": BETTER[images], "long_": LONG, "mirrored_": MIRRORED, "averaged_": AVERAGED}
    return {
        f"{prefix}{name}": [
            *STARTS[images],
            *held_out,
            *starts[prefix],
            *(own for each in name.split("+") for own in CHANGES[each]),
        ]
        for prefix, names in TRIED[images].items()
        for name in names.split()
    }


STUDIES = {
    **{name: lambda name=name: paths_of_training(SETS[name]) for name in SETS},
    "cars_half_fast": lambda: by_seed("epochs40_", range(1, 6), "experiment=cars_fast", *CARS),
    **{
        f"{name}_{kind}_search": partial(search, grids, images)
        for name, images in SETS.items()
        for kind, grids in (("losses", SEARCHED), ("methods", METHODS))
    },
    **{f"{name}_losses": partial(at_their_best, f"{name}_losses", SEARCHED, images) for name, images in SETS.items()},
    **{
        f"{name}_methods": partial(at_their_best, f"{name}_methods", METHODS, images, EVERY_FIFTH)
        for name, images in SETS.items()
    },
    "cars_half_methods_seconds": seconds_of_methods,
    **{f"{name}_recipe_search": partial(recipe_search, name) for name in SETS},
    "cars_half_best": lambda: by_seed("", range(1, 4), "experiment=cars_best", *CARS),
    "cars_half_best_central": lambda: by_seed("", range(1, 4), "experiment=cars_best", *CARS, SMALL_BORDER[0]),
    "cub_half_best": lambda: by_seed("", range(1, 4), *CUB_BEST),
    "cub_half_best_current": lambda: by_seed("", range(1, 4), *CUB_BEST, *CURRENT),
    "cub_half_best_head": lambda: by_seed("", range(1, 4), *CUB_BEST, *CURRENT, "backbone.search_with=null"),
    "cars_half_seconds": lambda: at_their_best("cars_half_losses", SEARCHED, CARS, seeds=[1]),
    "cars_half_alpha_delta": alpha_delta,
    "cars_half_dimension": dimensions,
    "cars_half_batch_size": batch_sizes,
    "cars_half_image_size": image_sizes,
    "cars_half_noise": label_noise,
}


def write_csv(root: Path, file: Path) -> None:
    """The half of CUB-200-2011 as a list: the first half of classes.txt trains, the other is searched."""
    names = [line.split(", ", 1)[1] for line in (root / "classes.txt").read_text(encoding="utf-8").splitlines() if line]
    with file.open("w", newline="", encoding="utf-8") as stream:
        table = csv.writer(stream)
        table.writerow(["path", "label", "split"])
        for index, name in enumerate(names):
            split = "train" if index < len(names) // 2 else "test"
            for image in sorted((root / "images" / name).glob("*.jpg")):
                table.writerow([image.relative_to(root), name, split])


def without_paths(result: dict[str, Any], *private: str) -> dict[str, Any]:
    """The result with DIR for the folders of this machine."""
    text = json.dumps(result)
    for path in private:
        text = text.replace(json.dumps(path)[1:-1], "DIR")
    return json.loads(text)


class LastMapAtR(pl.Callback):
    """MAP@R of the searched images after the last epoch, which depends on all positives of a query, not on one."""

    value: float

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        """The embeddings are those of RecallCallback."""
        recall = next(each for each in trainer.callbacks if isinstance(each, RecallCallback))
        splits = trainer.datamodule.splits
        embeddings = recall.metrics[splits.searched].gathered_embeddings()[0].to(pl_module.device)
        self.value = metrics_at_r(embeddings, splits.query.labels)["map_at_r"]


def train_all(runs: Runs, records: Path, private: Sequence[str], jobs: int) -> int:
    """Train one run after another in this process, write records, print a line each; returns how many failed."""
    entry.register_plugins()
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        for name, overrides in runs.items():
            with initialize_config_dir(entry.CONF, version_base="1.3"):
                cfg = compose("train", [*overrides, f"run={name}"])
            measured = LastMapAtR()
            try:
                result = train(cfg, Path(folder) / name, callbacks=[measured])
                result["last"]["map_at_r"] = measured.value
            except NotFinite as error:  # an outcome of these settings
                result = {"diverged": str(error), "commit": commit()}
            except Exception as error:  # the others go on
                print(f"{name}: failed: {type(error).__name__}: {str(error)[-500:]}", flush=True)
                failed += 1
                continue
            finally:
                entry.forget_last_run()
            result["command"] = " ".join(["train.py", *overrides])
            result = without_paths(
                result | {"parallel_jobs": jobs}, *private, folder, str(HERE.parent), str(Path.home())
            )
            write_json(records / f"{name}.json", result)
            epochs = [epoch for epoch in ("untrained", "best", "last") if epoch in result]
            recall = ", ".join(f"{epoch} {100 * result[epoch]['recall']['1']:.1f}" for epoch in epochs)
            print(f"{name}: {recall or result['diverged']}", flush=True)
    return failed


def main() -> None:
    """Train what is missing, in processes of this command that take every jobs-th run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", nargs="?", choices=STUDIES)
    parser.add_argument("overrides", nargs="*", help="for every run; dataset.root=DIR among them")
    parser.add_argument("--list", action="store_true", help="the studies, and how many of their runs have a record")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel, spread over the GPUs")
    parser.add_argument("--part", type=int, help="train every jobs-th run from this one on, in this process")
    parser.add_argument("--only", default="", help="only runs whose name begins so")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder of the studies")
    given = parser.parse_intermixed_args()
    if given.list or given.study is None:
        for name, make in STUDIES.items():
            try:
                runs = make()
            except UsageError as error:
                print(f"{name}: {error}")
                continue
            done = sum((given.output / name / f"{run}.json").exists() for run in runs)
            print(f"{name}: {done} of {len(runs)} runs have a record")
        return
    if given.part is None and given.jobs > 1:
        command = [sys.executable, __file__, *sys.argv[1:]]
        gpus = os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(map(str, range(torch.cuda.device_count())))).split(",")
        parts = [
            subprocess.Popen([*command, "--part", str(part)], env=os.environ | {"CUDA_VISIBLE_DEVICES": gpu})
            for part, gpu in zip(range(given.jobs), itertools.cycle(gpus), strict=False)
        ]
        raise SystemExit(max(abs(part.wait()) for part in parts))  # negative: ended by a signal

    records = given.output / given.study
    records.mkdir(parents=True, exist_ok=True)
    roots = [each.partition("=")[2] for each in given.overrides if each.startswith("dataset.root=")]
    if not roots:
        parser.error("dataset.root=DIR is needed: the folder of the images")
    root = Path(roots[-1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        if given.study.startswith("cub_half"):
            write_csv(root, Path(folder) / "images.csv")
            given.overrides.append(f"dataset.csv={folder}/images.csv")
        runs = STUDIES[given.study]()
        wanted = [name for name in runs if name.startswith(given.only)][given.part or 0 :: given.jobs]
        missing = {name: [*runs[name], *given.overrides] for name in wanted if not (records / f"{name}.json").exists()}
        failed = train_all(missing, records, [roots[-1], str(root), folder], given.jobs)
    if failed:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
