"""Jobs as commands: slots, cards, what a crash leaves, and that nothing outlives its launcher."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from commands import REPOSITORY
from processes import await_end

from proxy_anchor.errors import STOPPED, UsageError
from proxy_anchor.sweeps.launcher import (
    SWEEP_JOB,
    Job,
    explain_failure,
    make_slots,
    read_failure,
    run_here,
    visible_gpus,
    write_failure,
)
from proxy_anchor.utils import FAILURE_FILE, JOBS_AT_ONCE, own_cores


def job(code: str, folder: Path) -> Job:
    return Job((sys.executable, "-c", f"import os, sys, time\n{code}"), folder.parent, folder)


def wait_until_ready(output: Path) -> None:
    deadline = time.monotonic() + 60
    while not (output.is_file() and "ready" in output.read_text()):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_card_for_each_job_before_a_second_job_on_one():
    def cards(*arguments: object) -> list[str]:
        return [slot["CUDA_VISIBLE_DEVICES"] for slot in make_slots(*arguments)]

    assert cards(["0", "1", "2", "3"], 1) == ["0", "1", "2", "3"]
    assert cards(["0", "1"], 1, 2) == ["0", "1", "0", "1"]
    assert cards(["4", "5", "6", "7"], 2) == ["4,5", "6,7"]
    assert cards(["0", "1", "2"], 2) == ["0,1"]
    assert cards(["0", "1", "2", "3"], 1, 1, 2) == ["0", "1"]
    with pytest.raises(UsageError, match="this host shows 2 GPUs"):
        make_slots(["0", "1"], 4)


def test_without_cards_the_cores_are_divided(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    slots = make_slots([], 1)
    assert slots == [{JOBS_AT_ONCE: "4"}] * 4
    assert make_slots([], 1, 1, 3) == [{JOBS_AT_ONCE: "3"}] * 3
    monkeypatch.delenv("OMP_NUM_THREADS")
    assert len(make_slots([], 1)) == 1  # torch takes all cores for one
    monkeypatch.setenv(JOBS_AT_ONCE, "4")
    assert own_cores() == 2  # decoding processes of one of the four


def test_a_host_without_cards_shows_none(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    assert visible_gpus() == []
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_cards_keep_the_names_that_the_user_gave(monkeypatch):
    monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert visible_gpus() == ["0", "1"]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3, 5")
    assert visible_gpus() == ["3", "5"]


def test_each_slot_runs_one_job_at_a_time(tmp_path):
    code = (
        "busy = f\"busy{os.environ['CUDA_VISIBLE_DEVICES']}\"\n"
        "os.mkdir(busy)\ntime.sleep(0.2)\nos.rmdir(busy)\n"  # mkdir fails when another one is there
        "print(os.environ['CUDA_VISIBLE_DEVICES'])"
    )
    jobs = [job(code, tmp_path / str(number)) for number in range(6)]
    ended = {}
    start = time.monotonic()
    run_here(jobs, make_slots(["a", "b", "c"], 1), lambda number, code: ended.update({number: code}))
    assert ended == dict.fromkeys(range(6), 0)
    assert time.monotonic() - start >= 0.4  # two rounds
    assert {each.output.read_text().strip() for each in jobs} == {"a", "b", "c"}


def test_a_crash_is_explained_and_the_others_finish(tmp_path):
    jobs = [
        job("print('before'); sys.stdout.flush(); os.kill(os.getpid(), 9)", tmp_path / "killed"),
        job("sys.exit(75)", tmp_path / "stopped"),
        job("sys.exit(3)", tmp_path / "other"),
        job("", tmp_path / "fine"),
    ]
    ended = {}
    run_here(jobs, make_slots([], 1, 1, 2), lambda number, code: ended.update({number: code}))
    assert ended == {0: -9, 1: 75, 2: 3, 3: 0}
    reasons = [explain_failure(each, ended[number]) for number, each in enumerate(jobs[:3])]
    assert reasons == [
        "killed by signal 9",
        "stopped by a signal; the same command continues it",
        "ended with exit code 3",
    ]
    assert (tmp_path / "killed" / FAILURE_FILE).read_text().splitlines()[0] == "before"
    assert read_failure(tmp_path / "fine") is None


def test_what_the_job_said_itself_is_kept(tmp_path):
    write_failure(tmp_path / "x", "Traceback ...\nKeyError: 1", "KeyError: 1")
    assert explain_failure(job("", tmp_path / "x"), 1) == "KeyError: 1"


def test_what_an_earlier_attempt_said_is_no_reason_of_a_job_that_could_say_nothing(tmp_path):
    killed = job("os.kill(os.getpid(), 9)", tmp_path / "x")
    write_failure(tmp_path / "x", "", "KeyError: 1")
    assert explain_failure(killed, killed()) == "killed by signal 9"
    refused = job("print('error: lr is out of range'); sys.exit(2)", tmp_path / "y")
    write_failure(tmp_path / "y", "", "KeyError: 1")
    assert explain_failure(refused, refused()) == "lr is out of range"


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_killed_launcher_takes_its_jobs_with_it(tmp_path):
    code = "import os,sys,time; print(os.getpid(), flush=True); time.sleep(60)"
    launcher = (
        "import sys\nfrom pathlib import Path\nfrom proxy_anchor.sweeps.launcher import Job\n"
        f"Job((sys.executable, '-c', {code!r}), Path({str(tmp_path)!r}), Path({str(tmp_path / 'x')!r}))()"
    )
    process = subprocess.Popen([sys.executable, "-c", launcher])
    output, deadline = tmp_path / "x.log", time.monotonic() + 60
    while not (output.is_file() and output.read_text().endswith("\n")) and time.monotonic() < deadline:
        time.sleep(0.05)
    process.kill()
    process.wait()
    await_end(int(output.read_text()))


def test_a_job_is_its_command_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "4")
    here = job(
        "print([n for n in os.environ if n.startswith('SLURM_')], os.environ['" + SWEEP_JOB + "'])", tmp_path / "x"
    )
    assert here() == 0
    assert here.output.read_text().split() == ["[]", "1"]


def test_a_notice_to_all_processes_of_a_slurm_job_stops_the_command_gently(tmp_path):
    """As submitit does: its process queues the job again on SIGUSR2, then exits."""
    code = (
        "import signal, sys\nfrom pathlib import Path\nfrom proxy_anchor.sweeps.launcher import Job\n"
        "signal.signal(signal.SIGUSR2, lambda *_: sys.exit(1))\n"
        "slow = 'import signal, sys, time; from pathlib import Path\\n'\n"
        "slow += 'def stop(*_): Path(\"saved\").touch(); sys.exit(75)\\n'\n"
        "slow += 'signal.signal(signal.SIGTERM, stop); print(\"ready\", flush=True); time.sleep(60)'\n"
        "Job((sys.executable, '-c', slow), Path.cwd(), Path('run').absolute())()"
    )
    environment = {**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    worker = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path, env=environment, start_new_session=True)
    wait_until_ready(tmp_path / "run.log")
    os.killpg(worker.pid, signal.SIGUSR2)
    assert worker.wait(30) == 1
    assert (tmp_path / "saved").is_file()


def test_a_job_that_slurm_takes_back_is_queued_again(tmp_path):
    submitit = pytest.importorskip("submitit")
    again = job("", tmp_path / "x").checkpoint()
    assert isinstance(again, submitit.helpers.DelayedSubmission)
    assert again.function == job("", tmp_path / "x")


def test_a_terminated_launcher_stops_its_jobs_gently(tmp_path):
    code = (
        "import os, sys\nfrom pathlib import Path\nfrom proxy_anchor.sweeps.launcher import Job, run_here\n"
        "slow = 'import signal, sys, time; from pathlib import Path\\n'\n"
        "slow += 'def stop(*_): Path(\"saved\").touch(); sys.exit(75)\\n'\n"
        "slow += 'signal.signal(signal.SIGTERM, stop); print(\"ready\", flush=True); time.sleep(60)'\n"
        "job = Job((sys.executable, '-c', slow), Path.cwd(), Path('run').absolute())\n"
        "run_here([job, job], [{}], print)"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY / "src")}
    )
    output = tmp_path / "run.log"
    wait_until_ready(output)
    launcher.send_signal(signal.SIGTERM)
    assert launcher.wait(30) == STOPPED
    assert (tmp_path / "saved").is_file()
    assert output.read_text().count("ready") == 1  # the second job was not begun
