"""Shared by the benchmarks: interleaved timing, peak memory, tables, records."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from PIL import Image

from proxy_anchor.reports.run import commit, device_name, versions
from proxy_anchor.reports.tables import format_table

HERE = Path(__file__).resolve().parent


def make_parser(description: str | None, *, repeats: int) -> argparse.ArgumentParser:
    """A parser with --device, --repeats, --quick and --output."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    default = "cuda" if torch.cuda.is_available() else "cpu"
    parser.add_argument("--device", type=torch.device, default=default, help=f"cuda or cpu (default here: {default})")
    parser.add_argument("--repeats", type=int, default=repeats, help=f"timed rounds (default {repeats})")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, a few seconds: shows that it runs")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the .jsonl record")
    return parser


def split_output(arguments: Sequence[str], description: str | None) -> tuple[list[str], Path]:
    """Overrides of train.py, and the record's folder, which `+output=DIR` among them names.

    Ends the program after printing `description` where help is asked for: there are no other options.
    """
    if {"-h", "--help"} & {*arguments}:
        print(description)
        raise SystemExit(0)
    folders = [each.removeprefix("+output=") for each in arguments if each.startswith("+output=")]
    overrides = [each for each in arguments if not each.startswith("+output=")]
    return overrides, Path(folders[-1]) if folders else HERE / "results"


def synchronize(device: torch.device) -> None:
    """Wait until the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def seconds_per_call(function: Callable[[], object], device: torch.device, calls: int) -> float:
    """Seconds of one call, from `calls` calls in a row between two synchronisations.

    In a row, as in training: the host queues the next call while the device still works on this one.
    """
    synchronize(device)
    if device.type == "cuda":
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(calls):
            function()
        end.record()
        synchronize(device)
        return start.elapsed_time(end) / 1000 / calls
    began = time.perf_counter()
    for _ in range(calls):
        function()
    return (time.perf_counter() - began) / calls


def interleaved_seconds(
    functions: Mapping[str, Callable[[], object]],
    device: torch.device,
    *,
    repeats: int,
    calls: int | None = None,
    warmup: int = 3,
) -> dict[str, list[float]]:
    """Seconds per call of each function, one number per round; every round runs all of them once, in turn.

    A drift of the machine (heat, neighbours) then meets all alike, and a ratio within a round is fair. Warm-up calls
    are not counted. calls: per measurement; None = 10 on a GPU, 1 on a CPU.
    """
    calls = calls or (10 if device.type == "cuda" else 1)
    for function in functions.values():
        seconds_per_call(function, device, warmup)
    found: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats):
        for name, function in functions.items():
            found[name].append(seconds_per_call(function, device, calls))
    return found


def median_ratio(seconds: Sequence[float], reference: Sequence[float]) -> float:
    """Median over rounds of seconds / reference seconds of the same round."""
    return median(a / b for a, b in zip(seconds, reference, strict=True))


def graphed(function: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same work as a CUDA graph; only for functions that never synchronise."""
    side = torch.cuda.Stream(device)
    side.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(side):
        for _ in range(3):  # creates workspaces and kernels before the capture
            function()
    torch.cuda.current_stream(device).wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kept = function()

    def replay() -> object:
        graph.replay()
        return kept

    return replay


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """Peak memory of a call beyond what was allocated before it; None on a CPU."""
    if device.type != "cuda":
        return None
    function()  # allocates workspaces of the matrix library, which are not counted
    synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    function()
    synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def where_it_ran(device: torch.device, *packages: str) -> dict[str, Any]:
    """Date, commit, device and versions (of `packages` too, where installed), for each row of a record."""
    found = versions()
    for package in packages:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    if device.type == "cuda":
        found["cuda"] = str(torch.version.cuda)
    date = datetime.now(UTC).isoformat(timespec="seconds")
    return {"date": date, "commit": commit(), "device": device_name(device), "versions": found}


def append_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Append one JSON line per row to a file; creates its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(dict(row)) + "\n")


def report(title: str, rows: Sequence[Mapping[str, Any]], path: Path, where: Mapping[str, Any]) -> None:
    """Print the rows as a table, and append them with commit, device and versions to the record."""
    print(f"{title}; {where['device']}, torch {where['versions']['torch']}, commit {where['commit']}\n")
    print(format_table(rows, decimals=2))
    append_rows(path, [{**row, **where} for row in rows])
    print(f"\nadded to {path}")


def make_photographs(folder: Path, number: int, width: int = 500, height: int = 375) -> None:
    """Write JPEG files with much detail: about 120 kB at 500 x 375 pixels."""
    rng = np.random.default_rng(0)
    coarse = np.asarray(Image.effect_noise((1000, 750), 90).resize((1400, 1100), Image.Resampling.BICUBIC))
    for index in range(number):
        top, left = rng.integers(0, 1100 - height), rng.integers(0, 1400 - width)
        window = coarse[top : top + height, left : left + width, None].astype(np.float32)
        Image.fromarray((window * rng.uniform(0.4, 1, 3)).astype(np.uint8)).save(
            folder / f"{index:06d}.jpg", quality=88
        )
