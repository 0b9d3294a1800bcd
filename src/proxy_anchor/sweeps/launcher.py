"""The jobs of a sweep, each a command in processes of its own: on this host's GPUs, through SLURM, or through Ray.

A job is told nothing but its command, so it is the run that the command alone would be; a crash takes no other job with it.
"""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from proxy_anchor.errors import STOPPED, USAGE_ERROR, UsageError
from proxy_anchor.sweeps.processes import end_processes, end_with_parent, terminated_as
from proxy_anchor.utils import FAILURE_FILE, JOBS_AT_ONCE, usable_cores, write_text

SWEEP_JOB = "PROXY_ANCHOR_SWEEP_JOB"  # set where a job's command was started by a launcher
OnEnd = Callable[[int, int], None]  # is told a job's number and exit code as soon as it has ended


class JobError(RuntimeError):
    """A job ended by something that is no user's error; its trace is in FAILURE_FILE."""


@dataclass(frozen=True)
class Job:
    """A command, where it is run, and the folder of its run. Calling it runs it and returns its exit code."""

    command: tuple[str, ...]
    place: Path
    folder: Path

    @property
    def output(self) -> Path:
        """The file that takes what it prints; beside the folder, which is then as if the command were run alone."""
        return self.folder.with_name(f"{self.folder.name}.log")

    def start(self, environment: Mapping[str, str] | None = None) -> subprocess.Popen:
        """The running command. SLURM's variables are left out: they describe a launcher's process, not this command's."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
        self.output.parent.mkdir(parents=True, exist_ok=True)
        with self.output.open("ab") as output:
            return subprocess.Popen(
                self.command,
                cwd=self.place,
                env={**inherited, SWEEP_JOB: "1", **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                preexec_fn=_before_the_command if hasattr(signal, "SIGUSR2") else None,
            )

    def __call__(self) -> int:
        """Run it to its end, where the caller is."""
        process = self.start()
        try:
            return process.wait()
        finally:
            end_processes([process], signal.SIGTERM)

    def checkpoint(self) -> Any:
        """What submitit is to do with a job that SLURM takes back: queue it again; its command continues its run."""
        from submitit.helpers import DelayedSubmission

        return DelayedSubmission(self)


def _before_the_command() -> None:
    """SLURM sends its notice to all processes of a job; the launcher's answers it, and stops the command by SIGTERM.

    A launcher that is killed takes its jobs with it.
    """
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)
    end_with_parent()


def write_failure(folder: Path, trace: str, reason: str) -> None:
    """Leave the trace of a failed run in its folder, the reason as the last line."""
    folder.mkdir(parents=True, exist_ok=True)
    write_text(folder / FAILURE_FILE, f"{trace.rstrip()}\n{reason}\n")


def read_failure(folder: Path) -> str | None:
    """The reason why the run in this folder failed; None if it did not."""
    file = folder / FAILURE_FILE
    return file.read_text(encoding="utf-8").strip().splitlines()[-1] if file.is_file() else None


def explain_failure(job: Job, code: int, trace: str = "") -> str:
    """The reason of a job that ended with this exit code; written to its folder where the job could not do that itself.

    Where it did not want to, because its folder holds another run, that stays as it is.
    """
    if code == USAGE_ERROR and (refusal := _last_error(job.output)) is not None:
        return refusal
    could_write = code >= 0 and code != STOPPED  # otherwise what is there is of an earlier attempt
    if could_write and (reason := read_failure(job.folder)) is not None:
        return reason
    reason = f"killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    if code == STOPPED:
        reason = "stopped by a signal; the same command continues it"
    if not trace and job.output.is_file():
        trace = "\n".join(job.output.read_text(encoding="utf-8", errors="replace").splitlines()[-50:])
    write_failure(job.folder, trace, f"{reason} (it printed to {job.output})")
    return reason


def _last_error(output: Path) -> str | None:
    """The last one-line error among what was printed to this file."""
    lines = output.read_text(encoding="utf-8", errors="replace").splitlines() if output.is_file() else []
    return next((line.removeprefix("error: ") for line in reversed(lines) if line.startswith("error: ")), None)


def visible_gpus() -> list[str]:
    """The cards that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    import torch

    count = torch.cuda.device_count()  # asks the driver's list; takes no memory of a card
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(number) for number in range(count)] if named is None else named.replace(" ", "").split(",")[:count]


def make_slots(gpus: Sequence[str], gpus_per_job: int, jobs_per_gpu: int = 1, at_once: int | None = None) -> list[dict]:
    """The environment of each place for a job on this host: its cards, one job on every card before a second one.

    gpus: the cards' names; none of them: places without a card, at_once of them, or (None) the cores / OMP_NUM_THREADS.
    Raises UsageError when a job wants more cards than there are.
    """
    if gpus and len(gpus) < gpus_per_job:
        raise UsageError(f"trainer.devices={gpus_per_job}: this host shows {len(gpus)} GPUs; choose at most that many.")
    if gpus:
        starts = range(0, len(gpus) - gpus_per_job + 1, gpus_per_job)
        slots = [{"CUDA_VISIBLE_DEVICES": ",".join(gpus[first : first + gpus_per_job])} for first in starts]
        slots = (slots * jobs_per_gpu)[:at_once]
    else:
        cores = usable_cores()
        slots = [{} for _ in range(at_once or max(1, cores // int(os.environ.get("OMP_NUM_THREADS", cores))))]
    return [{**slot, JOBS_AT_ONCE: str(len(slots))} for slot in slots]


def run_here(jobs: Sequence[Job], slots: Sequence[Mapping[str, str]], on_end: OnEnd) -> None:
    """Run all jobs on this host, as many at once as there are slots. No process is left when this returns or raises."""
    waiting, free = list(enumerate(jobs)), list(range(len(slots)))
    running: dict[int, tuple[int, subprocess.Popen]] = {}
    with terminated_as(SystemExit(STOPPED)):
        try:
            while waiting or running:
                while waiting and free:
                    number, job = waiting.pop(0)
                    slot = free.pop(0)
                    running[slot] = number, job.start(slots[slot])
                for slot, (number, process) in list(running.items()):
                    if (code := process.poll()) is not None:
                        del running[slot]
                        free.append(slot)
                        on_end(number, code)
                time.sleep(0.05)
        finally:
            left = [process for _, process in running.values()]
            end_processes(left, signal.SIGTERM)  # on which they write what they have
            end_processes(left, signal.SIGKILL)


def run_on_slurm(
    jobs: Sequence[Job],
    on_end: OnEnd,
    *,
    folder: Path,
    gpus_per_job: int,
    cpus_per_job: int,
    timeout_min: int,
    at_once: int | None = None,
    partition: str | None = None,
    sbatch: Mapping[str, Any] | None = None,
    cluster: str = "slurm",
) -> None:
    """Queue all jobs as one SLURM array and wait for them; what is still queued when this raises is cancelled.

    folder: for submitit's files. at_once: jobs of the array that may run together; None: no limit. sbatch: further options
    of sbatch by name, for example {"account": "vision"}. cluster: "local" runs the same on this host, to try it.
    Raises UsageError without submitit or SLURM.
    """
    try:
        import submitit
    except ImportError as error:
        raise UsageError("launcher=slurm needs submitit: pip install submitit.") from error
    if cluster == "slurm" and shutil.which("sbatch") is None:
        raise UsageError(
            "launcher=slurm: sbatch is not found, so this is no host of a SLURM cluster; use launcher=local."
        )
    executor = submitit.AutoExecutor(folder, cluster=cluster)
    executor.update_parameters(
        name="proxy_anchor",
        nodes=1,
        tasks_per_node=1,
        gpus_per_node=gpus_per_job,
        cpus_per_task=cpus_per_job,
        timeout_min=timeout_min,
        slurm_array_parallelism=at_once or len(jobs),
        slurm_additional_parameters=dict(sbatch or {}),
        **({} if partition is None else {"slurm_partition": partition}),
    )
    # The workers find this package where it is found here, whichever is installed.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    handles = dict(enumerate(executor.submit_array(list(jobs))))
    with terminated_as(SystemExit(STOPPED)):
        try:
            while handles:
                for number, handle in list(handles.items()):
                    if handle.done():
                        del handles[number]
                        on_end(number, _slurm_exit_code(jobs[number], handle))
                time.sleep(0.5)
        finally:
            for handle in handles.values():
                handle.cancel()


def _slurm_exit_code(job: Job, handle: Any) -> int:
    from submitit.core.utils import FailedJobError, UncompletedJobError

    try:
        return handle.result()
    except (FailedJobError, UncompletedJobError) as error:
        explain_failure(job, 1, str(error))
        return 1


def run_on_ray(
    jobs: Sequence[Job],
    on_end: OnEnd,
    *,
    gpus_per_job: float,
    cpus_per_job: int,
    need_gpus: bool = False,
    address: str | None = None,
) -> None:
    """Run all jobs on a Ray cluster, which gives each its GPUs and repeats a job whose node is lost.

    gpus_per_job: below 1 shares a card; 0 on a cluster that shows no GPU, unless need_gpus waits for one. address: of a
    running cluster; None: RAY_ADDRESS, or one made of this host.
    Raises UsageError without ray.
    """
    try:
        import ray
    except ImportError as error:
        raise UsageError("launcher=ray needs ray: pip install ray.") from error

    def call(job: Job) -> int:
        return job()

    ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR, include_dashboard=False)
    try:
        if not need_gpus and not ray.cluster_resources().get("GPU"):
            gpus_per_job = 0
        remote = ray.remote(num_gpus=gpus_per_job, num_cpus=cpus_per_job)(call)
        running = {remote.remote(job): number for number, job in enumerate(jobs)}
        with terminated_as(SystemExit(STOPPED)):  # after ray.init, which has an answer of its own to SIGTERM
            while running:
                time.sleep(0.5)  # not in ray.wait, which makes an exit code of 1 of every signal
                for reference in ray.wait(list(running), num_returns=len(running), timeout=0)[0]:
                    number = running.pop(reference)
                    try:
                        code = ray.get(reference)
                    except ray.exceptions.RayError as error:
                        code = 1
                        explain_failure(jobs[number], code, str(error))
                    on_end(number, code)
    finally:
        ray.shutdown()
