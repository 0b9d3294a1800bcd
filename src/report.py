"""Tables of what can be run and of what was: `python src/report.py experiments`, `... comparison runs/NAME`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.experiments import experiment_rows, read_experiments
from proxy_anchor.reports.tables import format_table

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


REPORTS: dict[str, Callable[..., str]] = {"experiments": experiments, "comparison": comparison, "noise": noise}


def main() -> None:
    """Print the report that the command line names."""
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
