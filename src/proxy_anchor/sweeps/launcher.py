"""Starts the ranks of a run, and the jobs of a sweep on this host, SLURM or Ray.

A job is a command of its own, so it gives the same run as that command alone, and a crash ends no other job.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

from proxy_anchor.errors import STOPPED, UsageError, check_int
from proxy_anchor.reports.tables import format_table, write_table
from proxy_anchor.utils import FAILURE_FILE, JOBS_AT_ONCE, STOP_SIGNALS, read_result, write_text

SWEEP_JOB = "PROXY_ANCHOR_SWEEP_JOB"  # set for the commands that a launcher starts
ERROR_FILE = "TORCHELASTIC_ERROR_FILE"  # torch's variable: where a rank writes its error
LAUNCHER = "PROXY_ANCHOR_LAUNCHER"  # process id of the parent of a rank or job
GRACE_S = 30.0  # seconds from SIGTERM to SIGKILL, as torch's launcher has it
OnEnd = Callable[[int, str | None], None]  # called with a job's number and its error, or None
PRCTL = ctypes.PyDLL(None).prctl if sys.platform == "linux" else None


class JobError(UsageError):
    """A process failed by no user's error; its traceback is on stderr."""


def end_with_parent() -> None:
    """Have the system kill this process when its parent ends (Linux).

    An orphan would write into a folder in which the same command, started again, writes too.
    """
    if PRCTL is not None:
        PRCTL(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG, of linux/prctl.h
        if os.environ[LAUNCHER] != str(os.getppid()):  # it had ended before
            os.kill(os.getpid(), signal.SIGKILL)


# Ranks


def run_ranks(command: Sequence[str], num_ranks: int, environment: dict[str, str]) -> None:
    """Run the command as num_ranks ranks under torch's elastic launcher, with `environment` added.

    Passes SIGTERM, SIGUSR1 and Ctrl-C to all ranks. No rank is left when this returns or raises.
    Raises UsageError with the message of `leave_error`, SystemExit(STOPPED) or KeyboardInterrupt after a signal, and
    JobError, which names the first rank that failed.
    """
    from unittest.mock import patch  # slow to import

    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    passed_on = [*STOP_SIGNALS, signal.SIGINT]
    handlers = {number: signal.getsignal(number) for number in passed_on}  # torch does not restore them
    with TemporaryDirectory() as folder, patch.dict(os.environ, environment | {LAUNCHER: str(os.getpid())}):
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(folder),
            signals_to_handle=",".join(signal.Signals(number).name for number in passed_on),
        )
        logging.disable()  # this function reports signals and failures
        try:
            elastic_launch(config, command[0])(*command[1:])
        except SignalException as stop:
            raise KeyboardInterrupt if stop.sigval == signal.SIGINT else SystemExit(STOPPED) from None
        except ChildFailedError as error:
            rank, first = error.get_first_failure()
            if first.error_file_data["message"] == first.message:
                raise UsageError(first.message) from None
            if first.exitcode == STOPPED:
                raise SystemExit(STOPPED) from None
            how = f"was killed by signal {-first.exitcode}" if first.exitcode < 0 else "ended with an error"
            raise JobError(
                f"process {rank} of {num_ranks} {how}; its messages stand above, and all were ended."
            ) from None
        finally:
            logging.disable(logging.NOTSET)
            for number, handler in handlers.items():
                signal.signal(number, handler)


def leave_error(text: str) -> None:
    """Write a user's error for `run_ranks`, the parent, which reports it once."""
    Path(os.environ[ERROR_FILE]).write_text(json.dumps({"message": text, "timestamp": 0}), encoding="utf-8")


def left_by_others() -> bool:
    """Whether another rank has written such an error, of which this rank's is a consequence."""
    return ERROR_FILE in os.environ and any(Path(os.environ[ERROR_FILE]).parents[1].glob("*/error.json"))


# Jobs


@dataclass(frozen=True)
class Job:
    """A command, its working directory and run folder. Calling it returns the exit code."""

    command: tuple[str, ...]
    place: Path
    folder: Path

    @property
    def output(self) -> Path:
        """File with its output, next to the run folder."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """Start the command, without SLURM's variables, which describe the launcher's process."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.place,
                env={**inherited, SWEEP_JOB: "1", LAUNCHER: str(os.getpid()), **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )

    def __call__(self) -> int:
        """Run it to its end."""
        process = self.start()
        try:
            return process.wait()
        finally:
            _end([process])

    def checkpoint(self) -> Any:
        """Submitit's hook for a preempted job: queue it again; its command resumes the run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)

    def why_failed(self, code: int) -> str | None:
        """One line on this exit code; None for success. Written to the folder of a killed job."""
        if code == 0:
            return None
        if code == STOPPED:
            return "stopped by a signal; the same command continues it"
        printed = self.output.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        if code < 0:
            reason = f"killed by signal {-code}"
            write_failure(self.folder, "\n".join(printed[-50:]), f"{reason} (it printed to {self.output})")
            return reason
        said = [line.removeprefix("error: ") for line in printed if line.startswith("error: ")]
        return (said or printed or [f"ended with exit code {code}"])[-1]


def job_command(overrides: Sequence[str], run: str, folder: Path) -> tuple[str, ...]:
    """This program with these arguments, without those of the launcher, in this run folder."""
    own = [each for each in overrides if not each.lstrip("+~").startswith(("launcher=", "launcher.", "run="))]
    quoted = ["'{}'".format(str(each).replace("\\", "\\\\").replace("'", "\\'")) for each in (run, folder)]
    fixed = [f"run={quoted[0]}", "hydra.mode=RUN", f"hydra.run.dir={quoted[1]}"]
    return (sys.executable, os.path.abspath(sys.argv[0]), *own, *fixed)


def write_failure(folder: Path, trace: str, reason: str) -> None:
    """Write the traceback of a failed run into its folder, the reason as the last line."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FAILURE_FILE, f"{trace.rstrip()}\n{reason}\n")


def make_slots(devices: int | None, at_once: int | None) -> list[dict[str, str]]:
    """The environment of each of the jobs that run in parallel on this host.

    devices: GPUs per job; None or 0: jobs on the CPU. at_once: number of jobs, which share GPUs if there are too few;
    None: as many as there are GPUs for, at least one.
    """
    import torch

    check_int("launcher.jobs_at_once", at_once, 1, optional=True)
    count = torch.cuda.device_count() if devices else 0
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = [str(each) for each in range(count)] if named is None else named.replace(" ", "").split(",")[:count]
    parts = [gpus[first : first + (devices or 1)] for first in range(0, count - (devices or 1) + 1, devices or 1)]
    visible: list[dict[str, str]] = [{"CUDA_VISIBLE_DEVICES": ",".join(part)} for part in parts] or [{}]
    at_once = at_once or len(visible)
    return [{**visible[each % len(visible)], JOBS_AT_ONCE: str(at_once)} for each in range(at_once)]


def run_here(jobs: Sequence[Job], slots: Sequence[Mapping[str, str]], on_end: OnEnd) -> None:
    """Run all jobs on this host, one per slot at a time. No process is left when this returns or raises."""
    started: list[subprocess.Popen] = []

    def start(job: Job, slot: Mapping[str, str]) -> SimpleNamespace:
        started.append(process := job.start(slot))
        return SimpleNamespace(done=lambda: process.poll() is not None, result=process.wait)

    try:
        _run_all(jobs, start, slots, on_end)
    finally:
        _end(started)


def run_on_slurm(jobs: Sequence[Job], on_end: OnEnd, folder: Path, cluster: str, parameters: Mapping[str, Any]) -> None:
    """Run all jobs as one SLURM array. Cancels unfinished jobs when it raises.

    folder: for submitit's files. cluster: None for SLURM; "local" for this host. parameters: see submitit's
    `AutoExecutor.update_parameters`. Raises UsageError without submitit or SLURM.
    """
    try:
        import submitit

        executor = submitit.AutoExecutor(folder, cluster=cluster)
    except ImportError as error:
        raise UsageError("launcher=slurm needs submitit: pip install submitit.") from error
    except RuntimeError as error:
        raise UsageError(f"launcher=slurm: {error} Use launcher=local on this host.") from error
    executor.update_parameters(**parameters)
    handles = executor.submit_array(list(jobs))
    queue = iter(handles)
    try:
        _run_all(jobs, lambda job, slot: next(queue), [{}] * len(jobs), on_end)
    finally:
        for handle in handles:
            if not handle.done():
                handle.cancel()


def run_on_ray(jobs: Sequence[Job], on_end: OnEnd, address: str | None, options: Mapping[str, Any]) -> None:
    """Run all jobs on a Ray cluster, which assigns GPUs and repeats a job whose node is lost.

    address: of a running cluster; None: RAY_ADDRESS, or a new one on this host. options: see `ray.remote`.
    Raises UsageError without ray, or without enough GPUs for a job.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("launcher=ray needs ray: pip install ray.") from error
    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        if (gpus := ray.cluster_resources().get("GPU", 0)) < options["num_gpus"]:
            raise UsageError(f"launcher=ray: the cluster shows {gpus:g} GPUs; add trainer.accelerator=cpu to use none.")
        run: Any = ray.remote(**options)(lambda job: job())
        _run_all(jobs, lambda job, slot: run.remote(job).future(), [{}] * len(jobs), on_end)
    finally:
        ray.shutdown()


def _run_all(
    jobs: Sequence[Job], start: Callable[[Job, Any], Any], slots: Sequence[Mapping[str, str]], on_end: OnEnd
) -> None:
    """Start the jobs, one per slot at a time, and wait for them.

    start(job, slot) returns a handle: `done()`, and `result()`, the exit code, which raises where the job was lost.
    SIGTERM raises SystemExit(STOPPED), so that the caller ends its jobs.
    """
    waiting, free = list(enumerate(jobs)), list(slots)
    running: list[tuple[int, Job, Any, Mapping[str, str]]] = []
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit(STOPPED))  # after ray.init, which sets its own handler
    try:
        while waiting or running:
            while waiting and free:
                number, job = waiting.pop(0)
                slot = free.pop(0)
                running.append((number, job, start(job, slot), slot))
            for each in [each for each in running if each[2].done()]:
                running.remove(each)
                number, job, handle, slot = each
                free.append(slot)
                try:
                    reason = job.why_failed(handle.result())
                except Exception as error:  # of the cluster: a lost node, a time limit
                    reason = " ".join(str(error).split())
                    write_failure(job.folder, str(error), reason)
                on_end(number, reason)
            time.sleep(0.1)
    finally:
        signal.signal(signal.SIGTERM, before)


def _end(processes: Sequence[subprocess.Popen]) -> None:
    """End running processes by SIGTERM, and after GRACE_S seconds by SIGKILL."""
    for process in processes:
        process.terminate()  # no-op for one that has ended
    deadline = time.monotonic() + GRACE_S
    for process in processes:
        try:
            process.wait(max(0.1, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()


def sweep_table(folder: Path, jobs: Sequence[tuple[int, Sequence[str], Path, str | None]]) -> str:
    """A row per job (number, overrides, folder, error), without overrides that all jobs share, for a terminal.

    Where a job has finished, `folder` gets the table, a figure and a page, see `write_table`.
    """
    from proxy_anchor.reports.figures import recall_by_settings

    shared = set.intersection(*(set(overrides) for _, overrides, _, _ in jobs))
    rows: list[dict[str, Any]] = []
    settings: dict[str, None] = {}
    for number, overrides, place, reason in jobs:
        row = {"job": str(number)}
        row |= dict(each.lstrip("+").split("=", 1) for each in overrides if each not in shared and "=" in each)
        settings |= dict.fromkeys(row)
        result = None if reason else read_result(place)
        if result is not None:
            best, last, selected = (result[each] for each in ("best", "last", "selected"))
            [first, *_] = best["recall"]
            row |= {f"best R@{k}": 100 * value for k, value in best["recall"].items()}
            row |= {f"last R@{first}": 100 * last["recall"][first], "best epoch": best["epoch"]}
            if selected.get("validation"):
                row[f"validation R@{first}"] = 100 * selected["validation"][first]
                row[f"selected R@{first}"] = 100 * selected["recall"][first]
        rows.append(row | ({"failed": reason} if reason else {}))
    columns = [key for row in rows for key in row if key.startswith(("best R@", "validation R@"))]
    if not columns:
        return format_table(rows)
    column = max(columns, key=lambda each: each.startswith("validation"))
    figure = recall_by_settings(rows, list(settings)[1:] or ["job"], column)
    return f"{format_table(rows)}\n{write_table(folder, 'sweep', rows, {'recall_by_settings': figure})}"
