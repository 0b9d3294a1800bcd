"""Hydra's way to the jobs of a sweep: one after another in this process, or each as a command of its own elsewhere.

Hydra takes a launcher only from a package of this name, so this is the one file outside the entry points and `proxy_anchor.cli` that sees the config. Where jobs run is `launcher=`, a file of conf/launcher.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from proxy_anchor.errors import USAGE_ERROR, UsageError, check_choice, check_int
from proxy_anchor.sweeps import launcher
from proxy_anchor.utils import read_result, selecting_recall


class JobLauncher(BasicLauncher):
    """Composes all jobs before the first is run, so that a misspelt one costs nothing; then runs them by cfg.launcher."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The outcome of each job, in their order; a failed one is told to the sweeper when all have ended."""
        setup_globals()
        assert self.config is not None
        composed = [self._compose(list(each), initial_job_idx + number) for number, each in enumerate(job_overrides)]
        place = self.config.launcher.name
        check_choice("launcher.name", place, ["basic", "local", "slurm", "ray"])
        for key in (
            "launcher",
            *(("trainer.devices", "trainer.num_nodes", "trainer.accelerator") * (place != "basic")),
        ):
            if len({str(OmegaConf.select(cfg, key)) for cfg in composed}) > 1:
                raise UsageError(
                    f"{key} differs between the jobs of one sweep: give it one value, and start a sweep for each."
                )
        if place == "basic":
            return super().launch(job_overrides, initial_job_idx)
        commands = [self._job(cfg, list(each)) for cfg, each in zip(composed, job_overrides, strict=True)]
        returned: dict[int, JobReturn] = {}
        start = time.monotonic()

        def on_end(number: int, code: int) -> None:
            returned[number] = self._outcome(composed[number], code, commands[number])
            told = returned[number]
            shown = "finished" if told.status == JobStatus.COMPLETED else f"failed: {told._return_value}"
            print(f"[{len(returned)}/{len(commands)}] job {composed[number].hydra.job.num} {shown}", end=" ")
            print(f"({time.monotonic() - start:.0f} s after the start)", flush=True)

        self._run(commands, on_end)
        return [returned[number] for number in range(len(commands))]

    def _compose(self, overrides: list[str], number: int) -> DictConfig:
        assert self.hydra_context is not None
        assert self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, overrides)
        hydra_config: Any = HydraConfig.instance()
        before = hydra_config.cfg
        with read_write(cfg), open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
            hydra_config.cfg = cfg  # which hydra.sweep.subdir reads
            cfg.hydra.runtime.output_dir = str(Path(cfg.hydra.sweep.dir, str(cfg.hydra.sweep.subdir)).absolute())
        hydra_config.cfg = before
        return cfg

    def _job(self, cfg: DictConfig, overrides: list[str]) -> launcher.Job:
        """The command that runs this job alone, in the folder of this sweep."""
        from proxy_anchor.cli import jobs  # here: Hydra imports this module for every program of this environment

        folder = cfg.hydra.runtime.output_dir
        return launcher.Job(jobs.alone_command(cfg, overrides, folder), Path.cwd(), Path(folder))

    def _run(self, commands: list[launcher.Job], on_end: launcher.OnEnd) -> None:
        assert self.config is not None
        cfg, trainer = self.config.launcher, self.config.trainer
        devices = trainer.devices
        if isinstance(devices, bool) or not isinstance(devices, int) or devices < 1 or trainer.num_nodes != 1:
            raise UsageError(
                f"trainer.devices={devices} trainer.num_nodes={trainer.num_nodes}: launcher={cfg.name} gives each job whole "
                "cards of one host; name their number, as in trainer.devices=2."
            )
        for key in ("jobs_per_gpu", "jobs_at_once", "cpus_per_job", "timeout_min"):
            if cfg.get(key) is not None:
                check_int(f"launcher.{key}", cfg[key], 1)
        gpus = devices if trainer.accelerator != "cpu" else 0
        if cfg.name == "ray" and gpus > 1 and cfg.jobs_per_gpu > 1:
            raise UsageError(
                f"launcher.jobs_per_gpu={cfg.jobs_per_gpu}: Ray divides a card only for jobs of one; leave it out, or set "
                "trainer.devices=1."
            )
        print(
            f"{len(commands)} jobs by launcher={cfg.name}; each prints to {commands[0].output.parent}/JOB.log",
            flush=True,
        )
        if cfg.name == "local":
            from proxy_anchor.cli import jobs

            launcher.run_here(commands, jobs.job_slots(self.config), on_end)
        elif cfg.name == "slurm":
            sbatch: Any = OmegaConf.to_container(cfg.sbatch)
            launcher.run_on_slurm(
                commands,
                on_end,
                folder=Path(self.config.hydra.sweep.dir) / "slurm",
                gpus_per_job=gpus,
                cpus_per_job=cfg.cpus_per_job,
                timeout_min=cfg.timeout_min,
                at_once=cfg.jobs_at_once,
                partition=cfg.partition,
                sbatch=sbatch,
                cluster=cfg.cluster,
            )
        else:
            launcher.run_on_ray(
                commands,
                on_end,
                gpus_per_job=gpus / cfg.jobs_per_gpu,
                cpus_per_job=cfg.cpus_per_job,
                need_gpus=trainer.accelerator != "auto",
                address=cfg.address,
            )

    def _outcome(self, cfg: DictConfig, code: int, job: launcher.Job) -> JobReturn:
        assert self.hydra_context is not None
        told = JobReturn(overrides=list(cfg.hydra.overrides.task), cfg=cfg, hydra_cfg=cfg, working_dir=str(Path.cwd()))
        if code == 0:
            result = read_result(job.folder)
            told.status, told._return_value = JobStatus.COMPLETED, result and selecting_recall(result)
        else:
            reason = launcher.explain_failure(job, code)
            error = UsageError if code == USAGE_ERROR else launcher.JobError
            told.status, told._return_value = JobStatus.FAILED, error(reason)
        self.hydra_context.callbacks.on_job_end(config=cfg, job_return=told)
        return told
