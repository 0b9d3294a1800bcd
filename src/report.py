"""Tables of what can be run: `python src/report.py experiments`."""

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


REPORTS = {"experiments": experiments}


def main() -> None:
    """Print the report that the command line names."""
    parser = argparse.ArgumentParser(prog="report.py", description=__doc__)
    parser.add_argument(
        "report", choices=REPORTS, help="; ".join(f"{name}: {f.__doc__}" for name, f in REPORTS.items())
    )
    arguments = parser.parse_args()
    try:
        print(REPORTS[arguments.report]())
    except UsageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
