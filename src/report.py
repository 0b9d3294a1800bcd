"""Write tables, figures and pages of finished runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf

from proxy_anchor.cli import config
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError, check_choice, check_int, check_number
from proxy_anchor.reports.tables import format_table

if TYPE_CHECKING:
    from torch import Tensor

    from proxy_anchor.data.table import Splits

EXPERIMENTS = Path(entry.CONF) / "experiment"


def main(cfg: DictConfig) -> None:
    """Print every report that the command names."""
    for name in ("queries", "k", "tile", "images"):
        check_int(name, cfg[name], 1)
    folder = {name: Path(str(cfg[name])) for name in ("runs", "retrieval", "against", "map") if cfg[name]}
    output = Path(str(cfg.output)) if cfg.output else None
    made = []
    if cfg.experiments:
        made.append(experiments())
    if cfg.runs:
        made.append(paper(folder["runs"], output or folder["runs"] / "report"))
    if cfg.retrieval:
        runs = [folder[each] for each in ("retrieval", "against") if each in folder]
        made.append(retrieval(runs, output or runs[0] / "report", cfg.choose, cfg.k, cfg.queries))
    if cfg.map:
        made.append(embedding_map(folder["map"], output or folder["map"] / "report", cfg.method, cfg.tile, cfg.images))
    if not made:
        raise UsageError("a report is needed: add one of runs=, retrieval=, map=, experiments= (see --help).")
    print("\n\n".join(made))


def experiments() -> str:
    """The files of conf/experiment with the paper's numbers."""
    from proxy_anchor.cli.experiments import experiment_rows, read_experiments

    table = format_table(experiment_rows(read_experiments(EXPERIMENTS)))
    return f"{table}\n\nrun one: python src/train.py experiment=NAME (conf/experiment/NAME.yaml holds its contract)"


def paper(runs: Path, output: Path) -> str:
    """Every finished run below a folder in the paper's tables and figures."""
    from proxy_anchor.reports.figures import write_figures
    from proxy_anchor.reports.paper import paper_tables, write_paper_tables
    from proxy_anchor.reports.runs import read_runs

    left_out: list[str] = []
    found = read_runs(runs, left_out)
    text = write_paper_tables(output, paper_tables(found, contracts({run.dataset for run in found})))
    figures = write_figures(output, found)
    notes = "".join(f"\nleft out: {line}" for line in left_out)
    return f"{text}{notes}\nall K: {output / 'tables.md'}, .tex; figures (.svg, .png): {', '.join(figures)}"


def contracts(datasets: set[str]) -> list[tuple[list[str], Any]]:
    """The contracts of conf/experiment for these data sets: labels in the paper, and the config."""
    from hydra import compose

    from proxy_anchor.cli.experiments import read_experiments

    found = []
    for each in read_experiments(EXPERIMENTS):
        for overrides in each.expect if each.labels and each.dataset in datasets else ():
            cfg = compose("train", [f"experiment={each.name}", *overrides])
            found.append((each.labels, OmegaConf.to_container(cfg, resolve=True)))
    return found


def retrieval(runs: Sequence[Path], output: Path, choose: Any, k: int, queries: int) -> str:
    """Queries of one or two finished runs with their neighbours, and recall by class."""
    from proxy_anchor.reports.gallery import class_recall, retrieval_gallery, select_queries, write_class_recall
    from proxy_anchor.reports.pages import write_retrieval_page

    splits, models = _embedded(runs)
    first = models[str(runs[0])]
    rows = select_queries(splits, first, choose, count=queries)
    output.mkdir(parents=True, exist_ok=True)
    retrieval_gallery(splits, first, rows, k=k).save(output / "retrieval.png")
    write_retrieval_page(output / "retrieval.html", splits, models, rows, k=k)
    recalls = {name: class_recall(splits, each) for name, each in models.items()}
    write_class_recall(output / "class_recall.csv", splits, recalls)
    recall = recalls[str(runs[0])]
    worst = sorted(recall, key=lambda name: (recall[name], name))[:5]
    listed = ", ".join(f"{name} {100 * recall[name]:.1f}" for name in worst)
    return f"worst classes, Recall@1: {listed}\nwritten to {output}: retrieval.html, retrieval.png, class_recall.csv"


def embedding_map(run: Path, output: Path, method: str, tile: int, images: int) -> str:
    """Searched images of a finished run in two dimensions, as thumbnails on a grid."""
    import numpy as np

    from proxy_anchor.reports.grid import MAX_IMAGES, grid_picture, snap_to_grid
    from proxy_anchor.retrieval.embedding_map import METHODS, embedding_map

    check_choice("method", method, METHODS)
    check_number("images", images, 1, maximum=MAX_IMAGES)
    splits, models = _embedded([run])
    table, embeddings = splits.gallery or splits.query, models[str(run)][-1]
    chosen = np.sort(np.random.default_rng(0).permutation(len(table))[:images])
    places = embedding_map(embeddings[chosen], method=method)
    paths = [table.paths[row] for row in chosen]
    output.mkdir(parents=True, exist_ok=True)
    grid_picture(paths, snap_to_grid(places), tile=tile).save(output / "map.png")
    return f"{len(chosen)} of {len(table)} images; written to {output}: map.png"


def _embedded(folders: Sequence[Path]) -> tuple[Splits, dict[str, list[Tensor]]]:
    """The first run's searched images, and each run's embeddings of them."""
    import torch

    from proxy_anchor.inference.checkpoint import load_trained
    from proxy_anchor.inference.embedder import Embedder
    from proxy_anchor.inference.gallery import warn_of_collapse

    if not (file := folders[0] / "config.yaml").is_file():
        raise UsageError(f"{folders[0]} holds no {file.name}: pass the folder of a finished run, runs/NAME.")
    cfg: Any = OmegaConf.load(file)
    splits = config.load_splits(cfg, training=False)
    tables = [splits.query] if splits.gallery is None else [splits.query, splits.gallery]
    models = {}
    for folder in folders:
        embedder = Embedder(load_trained(folder), num_workers=cfg.data.num_workers)
        done = [embedder.embed(table.paths) for table in tables]
        if skipped := [reason for each in done for _, reason in each.skipped]:
            raise UsageError(f"{len(skipped)} images cannot be read, the first: {skipped[0]}")
        models[str(folder)] = [each.embeddings for each in done]
        warn_of_collapse(torch.cat(models[str(folder)]), f"{folder}: ")
    return splits, models


if __name__ == "__main__":
    entry.run(main, "report")
