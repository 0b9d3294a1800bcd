"""Compare losses on equal terms.

With the same seed all start from the same network and see the same images in the same order, where they share a
sampler. Each run is one of `train.py`, in runs/NAME/LOSS/seedN.
"""

from __future__ import annotations

import math
from copy import deepcopy
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, ListConfig

from proxy_anchor.cli import checks, config, messages
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError, check_number
from proxy_anchor.training.run_lock import held
from proxy_anchor.utils import read_result
from train import train

LISTS = {"losses": "[proxy_anchor,triplet]", "seeds": "[1,2]", "levels": "[60,70]"}


def compare(cfg: DictConfig, folder: Path) -> dict[str, list[dict[str, Any]]]:
    """Run what is missing, write table and figures into `folder`, return the results of each loss.

    A failed run is listed and the others run. Raises UsageError at the end where one failed.
    """
    from proxy_anchor.reports.tables import write_comparison

    configs = comparison_jobs(cfg)
    places = {(loss, seed): folder / loss / f"seed{seed}" for loss, seed in configs}
    if any(read_result(place) is None for place in places.values()):
        chosen = check_data({loss: job for (loss, _), job in configs.items()})
        for (loss, seed), job in configs.items():
            if not (places[loss, seed] / "config.yaml").is_file():  # a run that has begun keeps its own
                job.data.merge_with(chosen[loss])
    results: dict[str, list[dict[str, Any]]] = {loss: [] for loss, _ in configs}
    failed = []
    for number, ((loss, seed), job) in enumerate(configs.items(), start=1):
        place = places[loss, seed]
        print(f"\n[{number}/{len(configs)}] {loss}, seed {seed}: {place}", flush=True)
        try:
            results[loss].append(train(job, place))
        except Exception as error:  # the other runs are made
            failed.append(f"{loss}/seed{seed}")
            entry.mark_failed(place, error)
            print(f"failed: {loss}, seed {seed}: {messages.reason(error)}", flush=True)
        entry.forget_last_run()

    if any(results.values()):
        print("\n" + write_comparison(folder, {loss: runs for loss, runs in results.items() if runs}, cfg.levels))
    entry.report_failed("runs", failed, len(configs), cfg.run)
    return results


def comparison_jobs(cfg: DictConfig) -> dict[tuple[str, int], DictConfig]:
    """{(loss, seed): config} of a comparison, seed by seed, each checked as by train.py.

    Raises UsageError for an unknown loss, or a key that one of the losses lacks.
    """
    for key, example in LISTS.items():
        if not (isinstance(cfg[key], ListConfig) and cfg[key]) and (key != "levels" or cfg[key] is not None):
            raise UsageError(f"{key}={cfg[key]}: expected a list, for example {key}={example}.")
    for level in cfg.levels or ():
        check_number("levels", level, 0, maximum=100)
    given = checks.overrides_for_runs(cfg, "a comparison")
    for key, instead in {"loss": "losses=[...]", "seed": "seeds=[...]"}.items():
        if key in given.values():
            raise UsageError(f"{key}=...: a comparison takes {instead}.")
    shared = [each for each, key in given.items() if key not in LISTS]
    jobs = {}
    for seed in cfg.seeds:
        for loss in cfg.losses:
            name = f"{cfg.run}/{loss}/seed{seed}"
            jobs[loss, seed] = checks.compose_run(name, [*shared, f"loss={loss}", f"seed={seed}"])
    return jobs


def check_data(jobs: dict[str, DictConfig]) -> dict[str, dict[str, Any]]:
    """{loss: its batch_size and images_per_class}: where they are open one batch size for all losses, if one fits.

    Raises UsageError for images that cannot fill the batches, or the K of Recall, of one of the losses.
    """
    from proxy_anchor.data.datamodule import ImageDataModule
    from proxy_anchor.training.callbacks.recall import RecallCallback

    fitted = deepcopy(jobs)
    splits = config.load_splits(next(iter(jobs.values())), training=False)
    for loss, job in fitted.items():
        recall = RecallCallback(job.recall_k)
        try:
            config.fit_to_images(job, splits, recall)
            recall.check(splits)
            ImageDataModule(splits, seed=job.seed, **job.data, **job.dataset.images)
        except UsageError as error:
            raise UsageError(f"loss={loss}: {error}") from error
    ks = [job.data.images_per_class for job in fitted.values() if job.data.images_per_class]
    step = math.lcm(*ks)
    common = max(min(job.data.batch_size for job in fitted.values()) // step, 2 if ks else 1) * step
    if common <= min([len(splits.train), *(k * splits.train.num_classes for k in ks)]):
        for loss, job in fitted.items():
            job.data.batch_size = jobs[loss].data.batch_size or common
    return {loss: {key: job.data[key] for key in ("batch_size", "images_per_class")} for loss, job in fitted.items()}


def main(cfg: DictConfig) -> None:
    """Compare in Hydra's run folder."""
    folder = entry.output_folder()
    with held(folder):
        compare(cfg, folder)


if __name__ == "__main__":
    entry.run(main, "compare")
