"""Ranks and jobs as commands: places, GPUs, what a crash leaves, and that nothing outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from unittest.mock import MagicMock

import pytest
from commands import REPOSITORY
from processes import await_end

from proxy_anchor.errors import STOPPED, UsageError
from proxy_anchor.sweeps import launcher as module
from proxy_anchor.utils import FAILURE_FILE, JOBS_AT_ONCE, available_cpus

ENVIRONMENT = {"PYTHONPATH": str(REPOSITORY / "src")}
linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")


def script(tmp_path: Path, text: str) -> list[str]:
    (tmp_path / "rank.py").write_text(f"import os, sys, time\nfrom pathlib import Path\n{text}")
    return [sys.executable, str(tmp_path / "rank.py")]


def test_ranks_see_their_place(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "EXTRA")
    text = f"Path({str(tmp_path)!r}, os.environ['RANK']).write_text(' '.join(os.environ[n] for n in {names}))"
    before = signal.getsignal(signal.SIGTERM), os.environ.copy()
    module.run_ranks(script(tmp_path, text), 2, {"EXTRA": "e"})
    assert (tmp_path / "0").read_text() == "0 0 2 2 e"
    assert (tmp_path / "1").read_text() == "1 1 2 2 e"
    assert (signal.getsignal(signal.SIGTERM), os.environ) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("end", "error", "message"),
    [
        ("sys.exit(3)", module.JobError, "process 1 of 2 ended with an error; its messages stand above"),
        ("os.kill(os.getpid(), 9)", module.JobError, "process 1 of 2 was killed by signal 9"),
        ("leave_error('image 7 is damaged'); sys.exit(2)", UsageError, "^image 7 is damaged$"),
        ("sys.exit(75)", SystemExit, "75"),
        ("os.kill(os.getppid(), 15)", SystemExit, "75"),
        ("os.kill(os.getppid(), 2)", KeyboardInterrupt, None),
    ],
)
def test_a_failed_rank_or_a_signal_ends_all(end, error, message, tmp_path, capfd):
    write = f"Path({str(tmp_path)!r}, os.environ['RANK']).write_text(str(os.getpid()))"
    text = f"from proxy_anchor.sweeps.launcher import leave_error\n{write}\nif os.environ['RANK'] == '1': {end}\n"
    start = time.monotonic()
    with pytest.raises(error, match=message):
        module.run_ranks(script(tmp_path, f"{text}time.sleep(60)"), 2, ENVIRONMENT)
    assert time.monotonic() - start < 30
    assert "death signal" not in capfd.readouterr().err  # torch's log
    for rank in tmp_path.glob("[01]"):
        await_end(int(rank.read_text()))


@linux
def test_a_process_whose_launcher_has_ended_before_ends():
    code = "from proxy_anchor.sweeps.launcher import end_with_parent; end_with_parent()"
    environment = {**os.environ, **ENVIRONMENT, module.LAUNCHER: "1"}
    assert subprocess.run([sys.executable, "-c", code], env=environment, check=False).returncode == -signal.SIGKILL


def read_when_written(file: Path, text: str = "") -> str:
    """The file's content as soon as it has any, with this text in it."""
    deadline = time.monotonic() + 60
    while not (file.is_file() and (content := file.read_text()) and text in content):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    return content


def test_gpus_are_divided_into_slots(monkeypatch):
    def gpus(*arguments: int | None) -> list[str | None]:
        return [slot.get("CUDA_VISIBLE_DEVICES") for slot in module.make_slots(*arguments)]

    monkeypatch.setattr("torch.cuda.device_count", lambda: 4)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert gpus(1, None) == ["0", "1", "2", "3"]
    assert gpus(3, None) == ["0,1,2"]
    assert gpus(1, 2) == ["0", "1"]
    assert gpus(2, 3) == ["0,1", "2,3", "0,1"]  # shared
    assert module.make_slots(0, 3) == [{JOBS_AT_ONCE: "3"}] * 3
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")  # the user's names
    assert gpus(1, None) == ["3", "5"]
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert gpus(1, None) == [None]
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv(JOBS_AT_ONCE, "4")
    assert available_cpus() == 2  # decoding processes of one of the four


def job(code: str, folder: Path) -> module.Job:
    return module.Job((sys.executable, "-c", f"import os, sys, time\n{code}"), folder.parent, folder)


def test_each_slot_runs_one_job_at_a_time(tmp_path):
    code = (
        "busy = f\"busy{os.environ['CUDA_VISIBLE_DEVICES']}\"\n"
        "os.mkdir(busy)\ntime.sleep(0.2)\nos.rmdir(busy)\n"  # mkdir fails when another one is there
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    jobs = [job(code, tmp_path / str(number)) for number in range(6)]
    ended = {}
    module.run_here(jobs, [{"CUDA_VISIBLE_DEVICES": each} for each in "abc"], ended.__setitem__)
    assert ended == dict.fromkeys(range(6))
    assert {each.output.read_text().strip() for each in jobs} == {"a", "b", "c"}


def test_a_crash_is_explained_and_the_others_finish(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")  # of the launcher's process, not of its jobs
    codes = {
        "killed by signal 9": "print('before'); sys.stdout.flush(); os.kill(os.getpid(), 9)",
        "stopped by a signal; the same command continues it": "sys.exit(75)",
        "ended with exit code 3": "sys.exit(3)",
        "KeyError: 1": "raise KeyError(1)",
        "lr is out of range": "print('error: lr is out of range'); print('bye'); sys.exit(2)",
        None: f"assert os.environ[{module.SWEEP_JOB!r}] and 'SLURM_PROCID' not in os.environ",
    }
    jobs = [job(code, tmp_path / str(number)) for number, code in enumerate(codes.values())]
    ended = {}
    for _ in range(2):  # what an earlier attempt printed is no reason
        module.run_here(jobs, [{}] * 2, ended.__setitem__)
        assert [ended[number] for number in range(6)] == list(codes)
    assert (tmp_path / "0" / FAILURE_FILE).read_text().splitlines()[0] == "before"
    assert not (tmp_path / "3").exists()  # a job leaves its trace itself


def test_a_ray_cluster_without_enough_gpus_is_one_line(monkeypatch):
    ray = MagicMock(cluster_resources=dict)
    monkeypatch.setitem(sys.modules, "ray", ray)
    with pytest.raises(UsageError, match=r"the cluster shows 0 GPUs; add trainer\.accelerator=cpu"):
        module.run_on_ray([], print, None, {"num_gpus": 1})
    assert ray.shutdown.called


def test_a_job_is_the_command_less_the_launchers_words(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["/x/train.py", "-m"])
    given = ["launcher=local", "+launcher.jobs_at_once=2", "loss.alpha=16", "run=${now:%Y}"]
    _, *command = module.job_command(given, "it's", Path("/runs/it's/0"))
    assert command == [
        *["/x/train.py", "loss.alpha=16", r"run='it\'s'", "hydra.mode=RUN", r"hydra.run.dir='/runs/it\'s/0'"]
    ]


SLOW = """
import signal, subprocess, sys
from pathlib import Path
from proxy_anchor.sweeps.launcher import Job, run_here
slow = 'import os, signal, sys, time; from pathlib import Path\\n'
slow += 'from proxy_anchor.sweeps.launcher import end_with_parent\\n'
slow += 'def stop(*_): Path("saved").touch(); sys.exit(75)\\n'
slow += 'for each in (signal.SIGTERM, signal.SIGUSR2): signal.signal(each, stop)\\n'
slow += 'end_with_parent(); print(os.getpid(), "ready", flush=True); time.sleep(60)'
job = Job((sys.executable, '-c', slow), Path.cwd(), Path('run').absolute())
"""


def start_slow(code: str, folder: Path) -> tuple[subprocess.Popen, int]:
    """(the launcher, the job's process) once the job has begun."""
    environment = {**os.environ, **ENVIRONMENT}
    launcher = subprocess.Popen(
        [sys.executable, "-c", SLOW + code], cwd=folder, env=environment, start_new_session=True
    )
    return launcher, int(read_when_written(folder / "run.log", "ready").split()[0])


@linux
@pytest.mark.slow
def test_a_killed_launcher_takes_its_jobs_with_it(tmp_path):
    launcher, pid = start_slow("job()", tmp_path)
    launcher.kill()
    launcher.wait()
    await_end(pid)


@pytest.mark.slow
def test_a_notice_to_all_processes_of_a_slurm_job_stops_the_command_gently(tmp_path):
    """As submitit does: its process queues the job again on SIGUSR2, then exits."""
    worker, _ = start_slow("signal.signal(signal.SIGUSR2, lambda *_: sys.exit(1))\njob()", tmp_path)
    os.killpg(worker.pid, signal.SIGUSR2)
    assert worker.wait(30) == 1
    assert (tmp_path / "saved").is_file()
    submitit = pytest.importorskip("submitit")
    again = job("", tmp_path / "x").checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function == job("", tmp_path / "x")


@pytest.mark.slow
def test_a_terminated_launcher_stops_its_jobs_gently(tmp_path):
    launcher, pid = start_slow("run_here([job, job], [{}], print)", tmp_path)
    launcher.terminate()
    assert launcher.wait(30) == STOPPED
    await_end(pid)
    assert (tmp_path / "saved").is_file()
    assert (tmp_path / "run.log").read_text().count("ready") == 1  # the second job was not begun
