"""Hydra's launcher of sweeps: jobs in turn in this process, or as commands elsewhere.

Hydra loads launchers only from a package of this name; so this file sees the config, outside `proxy_anchor.cli`. The
key `launcher`, a file of conf/launcher, says where jobs run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus, run_job, setup_globals
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from proxy_anchor.errors import UsageError, check_int
from proxy_anchor.utils import FAILURE_FILE, read_result, selecting_recall


class JobLauncher(Launcher):
    """Composes all jobs, so that a misspelt one is refused first; then runs them."""

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Keep what Hydra gives, and hold the sweep's folder, before the sweeper writes multirun.yaml into it."""
        from proxy_anchor.training.run_lock import held  # here: Hydra imports this module for every program

        self.hydra_context, self.task_function, self.config = hydra_context, task_function, config
        self.lock = ExitStack()
        self.lock.enter_context(held(Path(config.hydra.sweep.dir)))

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        """Run the jobs, print a table, and return their outcomes in order."""
        setup_globals()
        jobs = [self._compose(each, initial_job_idx + number) for number, each in enumerate(job_overrides)]
        ended: dict[int, JobReturn] = {}
        try:
            if jobs[0].launcher.name == "basic":
                for number, each in enumerate(jobs):
                    folder = ("hydra.sweep.dir", "hydra.sweep.subdir")
                    ended[number] = run_job(self.task_function, each, *folder, hydra_context=self.hydra_context)
            else:
                self._launch_commands(jobs, job_overrides, ended)
        finally:
            _print_table(jobs, ended)
        return [ended[number] for number in range(len(jobs))]

    def _compose(self, overrides: Sequence[str], number: int) -> DictConfig:
        cfg = self.hydra_context.config_loader.load_sweep_config(self.config, list(overrides))
        with open_dict(cfg):
            cfg.hydra.job.id = cfg.hydra.job.num = number
            HydraConfig.instance().set_config(cfg)  # read by hydra.sweep.subdir
            OmegaConf.set_readonly(cfg.hydra, False)
            cfg.hydra.runtime.output_dir = str(Path(cfg.hydra.sweep.dir, str(cfg.hydra.sweep.subdir)).absolute())
        return cfg

    def _launch_commands(
        self, configs: Sequence[DictConfig], job_overrides: Sequence[Sequence[str]], ended: dict[int, JobReturn]
    ) -> None:
        from proxy_anchor.sweeps import launcher

        cfg, trainer = configs[0].launcher, configs[0].trainer
        check_int("trainer.devices", trainer.devices, 1)
        folders = [Path(each.hydra.runtime.output_dir) for each in configs]
        jobs = [
            launcher.Job(launcher.job_command(overrides, each.run, folder), Path.cwd(), folder)
            for each, overrides, folder in zip(configs, job_overrides, folders, strict=True)
        ]
        print(f"{len(jobs)} jobs by launcher={cfg.name}; each prints to {folders[0].parent}/JOB.log", flush=True)

        def on_end(number: int, reason: str | None) -> None:
            result = None if reason else read_result(folders[number])
            value = UsageError(reason) if reason else result and selecting_recall(result)
            ended[number] = JobReturn(status=JobStatus.FAILED if reason else JobStatus.COMPLETED, _return_value=value)
            print(f"[{len(ended)}/{len(jobs)}] {folders[number]}: {reason or 'finished'}", flush=True)

        gpus = trainer.devices if trainer.accelerator != "cpu" else 0
        if cfg.name == "local":
            launcher.run_here(jobs, launcher.make_slots(gpus, cfg.jobs_at_once), on_end)
        elif cfg.name == "slurm":
            parameters = {"gpus_per_node": gpus, **cfg.parameters}
            launcher.run_on_slurm(jobs, on_end, folders[0].parent / "slurm", cfg.cluster, parameters)
        else:
            launcher.run_on_ray(jobs, on_end, cfg.address, {"num_gpus": gpus, **cfg.remote})


def _print_table(jobs: Sequence[DictConfig], ended: Mapping[int, JobReturn]) -> None:
    """Print the jobs that have ended, also where an error or a signal ends the sweep."""
    from proxy_anchor.cli.messages import reason
    from proxy_anchor.sweeps.launcher import sweep_table

    rows = []
    for number, told in sorted(ended.items()):
        failed = reason(told._return_value) if told.status == JobStatus.FAILED else None
        own = jobs[number].hydra
        rows.append((own.job.num, own.overrides.task, Path(own.runtime.output_dir), failed))
    if rows:
        print("\n" + sweep_table(Path(jobs[0].hydra.sweep.dir).absolute(), rows), flush=True)
    if any(failed for *_, failed in rows):
        print(f"Traces: {FAILURE_FILE} in the folders of failed jobs. The same command with run=NAME repeats these.")
