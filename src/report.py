"""Tables of what can be run and of what was: `python src/report.py experiments`, `... comparison runs/NAME`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from proxy_anchor.errors import UsageError
from proxy_anchor.reports.experiments import experiment_rows, read_experiments
from proxy_anchor.reports.tables import format_table

EXPERIMENTS = Path(__file__).resolve().parent.parent / "conf" / "experiment"


def experiments() -> str:
    """The files of conf/experiment, with what the paper reports for them."""
    table = format_table(experiment_rows(read_experiments(EXPERIMENTS)))
    return f"{table}\n\nrun one: python src/train.py experiment=NAME; its contract is at the top of its file in conf/experiment"


def comparison(folder: Path) -> str:
    """The finished runs below a folder of compare.py, with table and curves written anew."""
    from proxy_anchor.reports.comparison import read_comparison, write_comparison

    return write_comparison(folder, read_comparison(folder))


REPORTS = {"experiments": experiments, "comparison": comparison}


def main() -> None:
    """Print the report that the command line names."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument(
        "report", choices=REPORTS, help="; ".join(f"{name}: {f.__doc__}" for name, f in REPORTS.items())
    )
    parser.add_argument("folder", nargs="?", type=Path, help="for a comparison: runs/NAME")
    arguments = parser.parse_args()
    try:
        if arguments.report == "comparison" and arguments.folder is None:
            raise UsageError("comparison needs a folder: python src/report.py comparison runs/NAME")
        print(comparison(arguments.folder) if arguments.report == "comparison" else experiments())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
