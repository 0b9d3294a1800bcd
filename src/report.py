"""Tables of what can be run and of what was: `python src/report.py experiments`, `... comparison runs/NAME`.

`python src/report.py runs=DIR [output=DIR]` sets every finished run below a folder beside the paper's numbers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from proxy_anchor.errors import UsageError, check_choice
from proxy_anchor.reports.experiments import experiment_rows, read_experiments
from proxy_anchor.reports.tables import format_table

if TYPE_CHECKING:
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

    found = read_runs(runs)
    output = runs / "report" if output is None else output
    tables = paper_tables(found, contracts({run.dataset for run in found}))
    text = write_paper_tables(output, tables)
    figures = write_figures(output, found)
    return f"{text}\nall K: {output / 'tables.md'}, .tex, .csv; figures (.svg, .png): {', '.join(figures)}"


def contracts(datasets: set[str]) -> list[Contract]:
    """What conf/experiment says about the rows of these data sets: each job whose number the paper prints."""
    from hydra import compose, initialize_config_dir
    from omegaconf import OmegaConf

    import entry
    from proxy_anchor.reports.paper_tables import Contract

    entry.register_plugins()
    found = []
    with initialize_config_dir(entry.CONF, version_base="1.3"):
        for each in read_experiments(EXPERIMENTS):
            for expected in each.expect if each.dataset in datasets else ():
                cfg = compose("train", [f"experiment={each.name}", *expected.overrides])
                config: Any = OmegaConf.to_container(cfg, resolve=True)
                found.append(Contract(each.name, tuple(each.labels), config))
    return found


REPORTS: dict[str, Callable[..., str]] = {"experiments": experiments, "comparison": comparison, "noise": noise}


def _paper_from(arguments: list[str]) -> str:
    """`runs=DIR [output=DIR]`, as the other entries take their arguments."""
    given: dict[str, Path] = {}
    for argument in arguments:
        key, separator, value = argument.partition("=")
        check_choice("argument", key, ["runs", "output"])
        if not value:
            raise UsageError(f"{key}{separator}: expected a folder, for example {key}=runs.")
        given[key] = Path(value)
    if "runs" not in given:
        raise UsageError("expected runs=DIR, a folder of run folders.")
    return paper(**given)


def main() -> None:
    """Print the report that the command line names."""
    if any("=" in argument and not argument.startswith("-") for argument in sys.argv[1:2]):
        try:
            print(_paper_from(sys.argv[1:]))
        except UsageError as error:
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
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
