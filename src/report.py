"""Tables of what can be run and of what was: `python src/report.py experiments`, `... comparison runs/NAME`.

`python src/report.py runs=DIR [output=DIR]` sets every finished run below a folder beside the paper's numbers.
`python src/report.py retrieval=RUN [against=RUN] [choose=random|worst|PATH,PATH] [k=4] [queries=20]` shows queries with their
neighbours and the recall of each class; `python src/report.py map=RUN [method=tsne|pca|umap] [tile=64] [images=10000]` where
the searched images lie.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy_anchor.cli.experiments import experiment_rows, read_experiments
from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.reports.tables import format_table

if TYPE_CHECKING:
    from torch import Tensor

    from proxy_anchor.data.table import Splits
    from proxy_anchor.reports.paper_tables import Contract

EXPERIMENTS = Path(__file__).resolve().parent.parent / "conf" / "experiment"


def experiments() -> str:
    """The files of conf/experiment, with what the paper reports for them."""
    table = format_table(experiment_rows(read_experiments(EXPERIMENTS)))
    return f"{table}\n\nrun one: python src/train.py experiment=NAME; its contract is at the top of its file in conf/experiment"


def comparison(*folders: Path) -> str:
    """The finished runs below a folder of compare.py (runs/NAME), with table and curves written anew."""
    from proxy_anchor.reports.comparison import read_comparison, write_comparison

    return "\n\n".join(write_comparison(folder, read_comparison(folder)) for folder in folders)


def noise(*folders: Path) -> str:
    """Recall@K of each loss by its share of wrong training labels, over several folders of compare.py."""
    from proxy_anchor.reports.comparison import noise_rows, read_comparison

    return format_table(noise_rows([read_comparison(folder) for folder in folders]))


def paper(runs: Path, output: Path | None = None) -> str:
    """Every finished run below a folder in the paper's tables and figures, written to DIR/report unless output says else."""
    from proxy_anchor.reports.figures import write_figures
    from proxy_anchor.reports.paper_tables import paper_tables, write_paper_tables
    from proxy_anchor.reports.runs import read_runs

    left_out: list[str] = []
    found = read_runs(runs, left_out)
    output = runs / "report" if output is None else output
    tables = paper_tables(found, contracts({run.dataset for run in found}))
    text = write_paper_tables(output, tables)
    figures = write_figures(output, found)
    notes = "".join(f"\nleft out: {line}" for line in left_out)
    return f"{text}{notes}\nall K: {output / 'tables.md'}, .tex, .csv; figures (.svg, .png): {', '.join(figures)}"


def contracts(datasets: set[str]) -> list[Contract]:
    """What conf/experiment says about the rows of these data sets: each job whose number the paper prints."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    from proxy_anchor.cli import main as entry
    from proxy_anchor.reports.paper_tables import Contract

    entry.register_plugins()
    found = []
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        for each in read_experiments(EXPERIMENTS):
            for expected in each.expect if each.labels and each.dataset in datasets else ():
                cfg = compose("train", [f"experiment={each.name}", *expected.overrides])
                config: Any = OmegaConf.to_container(cfg, resolve=True)
                found.append(Contract(each.name, tuple(each.labels), config))
    return found


REPORTS: dict[str, Callable[..., str]] = {"experiments": experiments, "comparison": comparison, "noise": noise}


def retrieval(
    run: Path,
    output: Path | None,
    against: Path | None = None,
    choose: str = "random",
    k: str = "4",
    queries: str = "20",
) -> str:
    """Queries of a finished run with their neighbours, beside another run's, and recall by class; below RUN/report."""
    from proxy_anchor.reports.curves import save_figure
    from proxy_anchor.reports.figures import class_recall_chart
    from proxy_anchor.reports.retrieval_page import (
        class_recall,
        select_queries,
        side_by_side,
        worst_of_classes,
        write_class_recall,
        write_retrieval_page,
    )

    neighbours, count = _whole("k", k), _whole("queries", queries)
    if against is not None and against.resolve() == run.resolve():
        raise UsageError(f"against={against} is the run itself: expected another run's folder.")
    output = output or run / "report"
    splits, models = _searched([run] if against is None else [run, against])
    embeddings = next(iter(models.values()))
    paths = [] if choose in ("random", "worst") else choose.split(",")
    rows = select_queries(splits, embeddings, "path" if paths else choose, count=count, paths=paths)
    side_by_side(splits, models, rows, k=neighbours).save(_made(output) / "retrieval.png")
    write_retrieval_page(output / "retrieval.html", splits, models, rows, k=neighbours)
    recalls = {name: class_recall(splits, each) for name, each in models.items()}
    write_class_recall(output / "class_recall.csv", splits, recalls)
    recall = next(iter(recalls.values()))
    worst = sorted(recall, key=lambda name: (recall[name], name))[:20]
    chart = class_recall_chart(recall, worst=20, queries=worst_of_classes(splits, embeddings, worst))
    save_figure(chart, output / "class_recall")
    listed = ", ".join(f"{name} {100 * recall[name]:.1f}" for name in worst[:5])
    return f"worst classes, Recall@1: {listed}\nwritten to {output}: retrieval.html, retrieval.png, class_recall.svg, .png, .csv"


def embedding_maps(
    run: Path, output: Path | None, method: str = "tsne", tile: str = "64", images: str = "10000"
) -> str:
    """Map of the searched images of a finished run: thumbnails on a square grid, and points by class; below RUN/report."""
    import numpy as np

    from proxy_anchor.reports.curves import save_figure
    from proxy_anchor.reports.grid import grid_picture, scatter, snap_to_grid
    from proxy_anchor.retrieval.embedding_map import METHODS, embedding_map

    check_choice("method", method, METHODS)
    side, count = _whole("tile", tile), _whole("images", images)
    output = output or run / "report"
    splits, models = _searched([run])
    [parts] = models.values()
    table, embeddings = splits.gallery or splits.query, parts[-1]
    chosen = np.sort(np.random.default_rng(0).permutation(len(table))[:count])
    places = embedding_map(embeddings[chosen], method=method)
    paths = [table.paths[row] for row in chosen]
    grid_picture(paths, snap_to_grid(places), tile=side).save(_made(output) / "map.png")
    save_figure(scatter(places, table.labels[chosen], table.classes), output / "map_classes")
    return f"{len(chosen)} of {len(table)} images; written to {output}: map.png, map_classes.svg, .png"


def _searched(folders: Sequence[Path]) -> tuple[Splits, dict[str, list[Tensor]]]:
    """The searched images of the first run, embedded by the network of each: [query] or [query, gallery]."""
    from omegaconf import OmegaConf

    from proxy_anchor.cli import config as settings
    from proxy_anchor.inference.checkpoint import load_trained
    from proxy_anchor.inference.embedder import Embedder
    from proxy_anchor.reports.runs import CONFIG_FILE
    from proxy_anchor.utils import keep_freed_memory

    for folder in folders:
        if not (folder / CONFIG_FILE).is_file():
            raise UsageError(f"{folder} is no run folder: expected {CONFIG_FILE} and best.ckpt in it.")
    keep_freed_memory()
    cfg: Any = OmegaConf.load(folders[0] / CONFIG_FILE)
    splits = settings.load_splits(cfg, training=False)
    tables = [splits.query] if splits.gallery is None else [splits.query, splits.gallery]
    models = {}
    for folder in folders:
        embedder = Embedder(load_trained(folder), num_workers=cfg.data.num_workers)
        done = [embedder.embed(table.paths) for table in tables]
        if skipped := [reason for each in done for _, reason in each.skipped]:
            raise UsageError(f"{len(skipped)} images cannot be read, the first: {skipped[0]}")
        models[str(folder)] = [each.embeddings for each in done]
    return splits, models


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _whole(name: str, value: str) -> int:
    if not value.isdecimal() or not int(value):
        raise UsageError(f"{name}={value}: expected a whole number of at least 1.")
    return int(value)


_FOLDERS = ("runs", "retrieval", "map", "output", "against")
_OPTIONS = {
    "runs": ("output",),
    "retrieval": ("output", "against", "choose", "k", "queries"),
    "map": ("output", "method", "tile", "images"),
}


def _from_pairs(arguments: Sequence[str]) -> str:
    """`runs=DIR`, `retrieval=RUN` or `map=RUN` and its options, as the other entries take their arguments."""
    given: dict[str, Any] = {}
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not given:
            check_choice("argument", key, _OPTIONS)
            report = key
        else:
            check_choice("argument", key, _OPTIONS[report])
        if not value:
            raise UsageError(f"{key}=: expected a value, for example {report}=runs.")
        given[key] = Path(value) if key in _FOLDERS else value
    folder, output = given.pop(report), given.pop("output", None)
    if report == "runs":
        return paper(folder, output)
    return retrieval(folder, output, **given) if report == "retrieval" else embedding_maps(folder, output, **given)


def main() -> None:
    """Print the report that the command line names."""
    if any("=" in argument and not argument.startswith("-") for argument in sys.argv[1:2]):
        try:
            print(_from_pairs(sys.argv[1:]))
        except (UsageError, OSError) as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)
        return
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument(
        "report", choices=REPORTS, help="; ".join(f"{name}: {f.__doc__}" for name, f in REPORTS.items())
    )
    parser.add_argument("folders", nargs="*", type=Path, help="of compare.py, where the report is about them")
    arguments = parser.parse_args()
    try:
        if bool(arguments.folders) == (arguments.report == "experiments"):
            raise UsageError(
                f"{arguments.report} takes {'no' if arguments.folders else 'at least one'} folder of compare.py."
            )
        print(REPORTS[arguments.report](*arguments.folders))
    except (UsageError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
