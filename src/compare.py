"""Compare losses on equal terms: `python src/compare.py losses=[proxy_anchor,triplet] seeds=[1,2] dataset=cars`.

Per seed all start from the same network and see the same images in the same order, as far as they share a sampler. Each run
is one of `train.py`, in runs/NAME/LOSS/seedN.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from proxy_anchor.cli import config, jobs
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError
from proxy_anchor.sweeps import launcher
from proxy_anchor.training.run_lock import held
from proxy_anchor.utils import read_result
from train import train


def compare(cfg: DictConfig, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """All runs that are not there yet, then table and figures in `folder`; the results of each loss.

    A run that fails is listed, and the others go on. Raises UsageError at the end when one did.
    """
    from proxy_anchor.reports.tables import write_comparison

    configs = jobs.comparison_jobs(cfg)
    results: dict[str, list[dict[str, Any]]] = {loss: [] for loss, _ in configs}
    failures: dict[str, str] = {}
    for number, ((loss, seed), job) in enumerate(configs.items(), start=1):
        place = folder / loss / f"seed{seed}"
        print(f"\n[{number}/{len(configs)}] {loss}, seed {seed}: {place}", flush=True)
        try:
            with held(place):
                entry.clear_failure(job, place)
                results[loss].append(finished(job, place) or train(job, place))
        except Exception as error:  # whatever stopped this run, the others are still wanted
            failures[f"{loss}, seed {seed}"] = reason = entry.reason(error)
            entry.mark_failed(place, error, job)
            print(f"failed: {reason}", flush=True)
        entry.forget_last_run()

    if any(results.values()):
        print("\n" + write_comparison(folder, {loss: runs for loss, runs in results.items() if runs}, cfg.levels))
    for name, reason in failures.items():
        print(f"failed: {name}: {reason}")
    if failures:
        raise UsageError(
            f"{len(failures)} of {len(configs)} runs failed (see {launcher.FAILURE_FILE} in their folders); the same command with "
            f"run={cfg.run} repeats them."
        )
    return results


def finished(job: DictConfig, place: Path) -> dict[str, Any] | None:
    """The result of an earlier run with the same settings, if `place` holds one; an interrupted one is continued."""
    result = read_result(place)
    if result is not None:
        config.require_same(job, place)
        print("finished before, and kept")
    return result


def main(cfg: DictConfig) -> None:
    """Compare in the folder that Hydra made."""
    compare(cfg, entry.output_folder())


if __name__ == "__main__":
    entry.run(main, "compare")
