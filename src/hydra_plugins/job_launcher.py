"""Hydra's way to the jobs of a sweep: one after another in this process, or each as a command of its own elsewhere.

Hydra takes a launcher only from a package of this name, so this is the one file outside the entry points and
`proxy_anchor.cli` that sees the config. Where jobs run is `launcher=`, a file of conf/launcher.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra._internal.core_plugins.basic_launcher import BasicLauncher
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, setup_globals
from omegaconf import DictConfig, OmegaConf, open_dict

from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.utils import FAILURE_FILE, read_result, selecting_recall


class JobLauncher(BasicLauncher):
    """Composes all jobs before the first is run, so that a misspelt one costs nothing; then runs them by cfg.launcher."""

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """The outcome of each job, in their order, and a table of them; the sweeper raises the first failure."""
        from proxy_anchor.cli.main import (
            reason,
        )  # here: Hydra imports this module for every program of this environment
        from proxy_anchor.sweeps.launcher import sweep_table

        setup_globals()
        composed = [self._compose(each, initial_job_idx + number) for number, each in enumerate(job_overrides)]
        folders = [Path(cfg.hydra.runtime.output_dir) for cfg in composed]
        if any(cfg.launcher != composed[0].launcher for cfg in composed):
            raise UsageError("launcher differs between the jobs of one sweep: give it one value.")
        ended: dict[int, JobReturn] = {}
        try:
            if composed[0].launcher.name == "basic":
                for number, each in enumerate(job_overrides):
                    [ended[number]] = super().launch([each], initial_job_idx + number)
            else:
                self._launch_commands(composed, folders, job_overrides, ended)
        finally:
            failed = {
                number: reason(told._return_value) for number, told in ended.items() if told.status == JobStatus.FAILED
            }
            rows = [
                (cfg.hydra.job.num, cfg.hydra.overrides.task, folders[number], failed.get(number))
                for number, cfg in enumerate(composed)
                if number in ended
            ]
            if rows:
                print("\n" + sweep_table(rows), flush=True)
            if failed:
                files = {folders[number] / FAILURE_FILE: why for number, why in failed.items()}
                traces = [file for file, why in files.items() if file.is_file() and why in file.read_text()]
                listed = "".join(f"\n  {each}" for each in traces)
                print(f"{len(failed)} of {len(rows)} jobs failed; their traces:{listed}", file=sys.stderr)
                print("The same command with its run=NAME repeats these and keeps the others.", file=sys.stderr)
        return [ended[number] for number in range(len(composed))]

    def _compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        assert self.hydra_context is not None
        assert self.config is not None
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
            HydraConfig.instance().set_config(cfg)  # which hydra.sweep.subdir reads
            OmegaConf.set_readonly(cfg.hydra, False)
            cfg.hydra.runtime.output_dir = str(Path(cfg.hydra.sweep.dir, str(cfg.hydra.sweep.subdir)).absolute())
        return cfg

    def _launch_commands(
        self,
        composed: Sequence[DictConfig],
        folders: Sequence[Path],
        job_overrides: Sequence[Sequence[str]],
        ended: dict[int, JobReturn],
    ) -> None:
        from proxy_anchor.sweeps import launcher

        cfg, trainer = composed[0].launcher, composed[0].trainer
        check_int("trainer.devices", trainer.devices, 1)
        jobs = [
            launcher.Job(launcher.job_command(overrides, each.run, folder), Path.cwd(), folder)
            for each, overrides, folder in zip(composed, job_overrides, folders, strict=True)
        ]
        print(f"{len(jobs)} jobs by launcher={cfg.name}; each prints to {folders[0].parent}/JOB.log", flush=True)

        def on_end(number: int, reason: str | None) -> None:
            told = ended[number] = JobReturn(cfg=composed[number], status=JobStatus.FAILED)
            if reason is None:
                result = read_result(folders[number])
                told.status, told._return_value = JobStatus.COMPLETED, result and selecting_recall(result)
            else:
                told._return_value = UsageError(reason)
            print(f"[{len(ended)}/{len(jobs)}] job {composed[number].hydra.job.num}", end=" ")
            print(f"failed: {reason}" if reason else "finished", flush=True)

        gpus = trainer.devices if trainer.accelerator != "cpu" else 0
        if cfg.name == "local":
            if cfg.jobs_at_once is not None:
                check_int("launcher.jobs_at_once", cfg.jobs_at_once, 1)
            launcher.run_here(jobs, launcher.make_slots(gpus, cfg.jobs_at_once), on_end)
        elif cfg.name == "slurm":
            parameters: Any = {"gpus_per_node": gpus, **OmegaConf.to_container(cfg.parameters)}
            launcher.run_on_slurm(jobs, on_end, folders[0].parent / "slurm", cfg.cluster, parameters)
        else:
            launcher.run_on_ray(jobs, on_end, cfg.address, {"num_gpus": gpus, **cfg.remote})
