"""The runs behind docs/results.md: `python benchmarks/study.py cars_half dataset.root=DIR --jobs 4`.

Trains every run of a study that has no record yet in docs/results/STUDY/RUN.json, `--jobs` of them in parallel, each
by `src/train.py` with the overrides of RUN and those of the command line. A record is the run's result.json, without
the paths of the machine, with the number of parallel jobs; times of runs in parallel are not those of one alone.
`cub_half*` read the half of CUB-200-2011 as own data: DIR holds classes.txt and images/CLASS/*.jpg.
"""

from __future__ import annotations

import argparse
import csv
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from common import HERE

from proxy_anchor.utils import write_json

REPOSITORY = HERE.parent
Runs = dict[str, list[str]]  # record's name: overrides

LITE0 = ["backbone=efficientnet_lite0", "search_engine=torch", "logger=csv", "trainer.enable_progress_bar=false"]
CARS = ["dataset=cars", "dataset.allow_partial=true", *LITE0]
CUB = ["dataset=folder", "recipe=cub", *LITE0]
FAST = ["speed=fast", "compile=true"]


def by_seed(name: str, seeds: Iterable[int], *overrides: str) -> Runs:
    """One run per seed."""
    return {f"{name}seed{seed}": [*overrides, f"seed={seed}"] for seed in seeds}


STUDIES: dict[str, Runs] = {
    "cars_half": {
        **by_seed("fast_", range(1, 6), *CARS, *FAST),
        **by_seed("", range(1, 6), *CARS),
        **by_seed("validation_", range(1, 4), *CARS, *FAST, "validation=classes"),
    },
    "cars_half_fast": by_seed("epochs40_", range(1, 6), "experiment=cars_fast", *CARS),
    "cub_half": {
        **by_seed("fast_", range(1, 6), *CUB, *FAST),
        **by_seed("", range(1, 6), *CUB),
        **by_seed("validation_", range(1, 4), *CUB, *FAST, "validation=classes"),
    },
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


def without_paths(result: dict[str, object], *private: str) -> dict[str, object]:
    """The result with DIR for the folders of this machine."""
    text = json.dumps(result)
    for path in private:
        text = text.replace(json.dumps(path)[1:-1], "DIR")
    return json.loads(text)


def main() -> None:
    """Train what is missing; print one line per run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("study", choices=STUDIES)
    parser.add_argument("overrides", nargs="*", help="for every run; dataset.root=DIR among them")
    parser.add_argument("--jobs", type=int, default=1, help="runs in parallel")
    parser.add_argument("--only", default="", help="only runs whose name begins so")
    parser.add_argument("--output", type=Path, default=REPOSITORY / "docs" / "results", help="folder of the studies")
    given = parser.parse_intermixed_args()
    runs = {name: each for name, each in STUDIES[given.study].items() if name.startswith(given.only)}
    records = {name: given.output / given.study / f"{name}.json" for name in runs}
    root = next(Path(each.partition("=")[2]).resolve() for each in given.overrides if each.startswith("dataset.root="))

    with tempfile.TemporaryDirectory() as folder:
        table = Path(folder) / "images.csv"
        if given.study.startswith("cub_half"):
            write_csv(root, table)
            given.overrides.append(f"dataset.csv={table}")

        def run(name: str) -> str:
            own = [f"run={name}", f"hydra.run.dir={folder}/{name}"]
            command = [sys.executable, str(REPOSITORY / "src" / "train.py"), *runs[name], *given.overrides, *own]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode:
                return f"{name}: failed: {done.stderr.strip()[-500:]}"
            result = json.loads(Path(folder, name, "result.json").read_text(encoding="utf-8"))
            private = (str(root), folder, str(REPOSITORY), str(Path.home()))
            write_json(records[name], without_paths(result | {"parallel_jobs": given.jobs}, *private))
            recall = {epoch: 100 * result[epoch]["recall"]["1"] for epoch in ("untrained", "best", "last")}
            return f"{name}: " + ", ".join(f"{epoch} {value:.1f}" for epoch, value in recall.items())

        missing = [name for name in runs if not records[name].exists()]
        for record in records.values():
            record.parent.mkdir(parents=True, exist_ok=True)
        with ThreadPoolExecutor(given.jobs) as pool:
            for line in pool.map(run, missing):
                print(line, flush=True)


if __name__ == "__main__":
    main()
