"""What all entry points share: Hydra's start, --help, one-line errors, processes of a run.

Slow imports stand inside the functions that need them, so that --help and errors come at once.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from io import TextIOWrapper
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from proxy_anchor.cli.command import CONF
from proxy_anchor.cli.messages import NO_OVERRIDE, USER_ERRORS, causes, one_line, reason
from proxy_anchor.errors import STOPPED, USAGE_ERROR, AgreedError, FolderTaken, UsageError, reason_of
from proxy_anchor.sweeps import launcher
from proxy_anchor.training.run_lock import HELD_BY_PARENT
from proxy_anchor.utils import FAILURE_FILE, RESULT_FILE, keep_freed_memory, rank, read_result

STARTED_AT = "PROXY_ANCHOR_STARTED"  # passes STARTED to the ranks of a command, which share a monotonic clock
# Start of the command, after the interpreter and the imports above.
STARTED = float(os.environ.get(STARTED_AT, time.monotonic()))
JOB_FILE = "PROXY_ANCHOR_JOB_FILE"  # set by `run_as_ranks`


class TimmSource(ConfigSource):
    """Makes every timm name a choice of the group `backbone`, in addition to conf/backbone."""

    @staticmethod
    def scheme() -> str:
        """Prefix of this source in Hydra's search path."""
        return "timm"

    def load_config(self, config_path: str) -> ConfigResult:
        """conf/backbone/timm.yaml with the name; for a tagged name the file of the untagged one."""
        name = self._model_name(config_path)
        untagged = name.partition(".")[0]  # resnet50.tv_in1k is trained as resnet50 is
        base = untagged if (Path(CONF) / "backbone" / f"{untagged}.yaml").is_file() else "timm"
        config = OmegaConf.create({"defaults": [base], "name": name})
        return ConfigResult(config=config, path=f"{self.scheme()}://", provider=self.provider, header={"package": None})

    def available(self) -> bool:
        """Always: timm is a dependency."""
        return True

    def is_group(self, config_path: str) -> bool:
        """Only `backbone` exists here."""
        return config_path.strip("/") in ("", "backbone")

    def is_config(self, config_path: str) -> bool:
        """Whether this is `backbone/NAME` and timm has a model of that name."""
        if not config_path.startswith("backbone/"):
            return False
        import timm

        import proxy_anchor.models  # noqa: F401  (registers the networks that timm lacks)

        name = self._model_name(config_path)
        return name.startswith(("hf-hub:", "local-dir:")) or timm.is_model(name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing: over a thousand names would hide our own in errors."""
        return []

    @staticmethod
    def _model_name(config_path: str) -> str:
        return config_path.removeprefix("backbone/").removesuffix(".yaml")


class TimmSearchPath(SearchPathPlugin):
    """Adds TimmSource to Hydra's search path, after conf/."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add it."""
        search_path.append("timm", f"{TimmSource.scheme()}://")


def register_plugins() -> None:
    """Register timm names as choices of `backbone`."""
    Plugins.instance().register(TimmSource)
    Plugins.instance().register(TimmSearchPath)


def run_as_ranks(cfg: DictConfig, folder: Path, num_ranks: int) -> dict[str, Any]:
    """Run this command as several ranks in one folder, and return their result.

    The ranks read the config from a file, so theirs is exactly that of this job, also in a sweep.
    Raises UsageError or JobError where one of them fails.
    """
    with TemporaryDirectory() as place:
        file = Path(place) / "job.yaml"
        OmegaConf.save(cfg, file, resolve=True)
        handed_on = {JOB_FILE: str(file), HELD_BY_PARENT: str(folder.resolve()), STARTED_AT: str(STARTED)}
        launcher.run_ranks([sys.executable, *sys.argv], num_ranks, handed_on)
    return read_result(folder) or {}  # a debug mode writes none


def help_text(config_name: str) -> str:
    """What an entry does, from its docstring; examples, and its keys with their comments, from its file in conf/."""
    described = (sys.modules["__main__"].__doc__ or "").strip()
    text = (Path(CONF) / f"{config_name}.yaml").read_text(encoding="utf-8").partition("\nhydra:\n")[0]
    text = re.sub(r"^  - (_self_|override hydra/.*)\n", "", text + "\n", flags=re.M)
    text = re.sub(r"^defaults:\n(?! )", "", text, flags=re.M)
    return f"{described}\n\n{text.rstrip()}\n\n--cfg job shows the keys as a command resolves them."


def run(main: Callable[[DictConfig], Any], config_name: str) -> None:
    """Run `main(cfg)` under Hydra. A user's error is one line on stderr and exit code 2."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(help_text(config_name))
        return
    for flag in {"-m", "--multirun"} & {*sys.argv[1:]}:  # argparse takes flags only before or after all overrides
        sys.argv.remove(flag)
        sys.argv.insert(1, flag)
    for number, given in enumerate(sys.argv if config_name in ("train", "compare", "tune") else ()):
        if given.lstrip("+").startswith("data.decode="):
            print("data.decode is called data.crop_on now: it says where images are cropped.")
            sys.argv[number] = given.replace("decode", "crop_on", 1)
    is_rank = JOB_FILE in os.environ  # of `run_as_ranks`
    if launcher.LAUNCHER in os.environ:
        launcher.end_with_parent()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # Hydra would print errors itself
    register_plugins()
    quieten()
    keep_freed_memory()
    if rank() > 0:  # only the first rank prints
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        warnings.filterwarnings("ignore")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # File names need not be UTF-8. A log or a pipe gets each line as it is printed.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    failure: BaseException | None = None  # what a user can repair
    composed = is_rank
    again = ""  # what continues the run

    def job(cfg: DictConfig) -> Any:
        nonlocal composed, again, failure
        composed = True
        in_sweep = HydraConfig.get().mode != RunMode.RUN
        own_folder = output_folder() != Path.cwd()  # evaluate.py and others run in the working directory
        if own_folder:
            again = f": the same command with run={cfg.run} continues {output_folder()}"
        marked = own_folder and (in_sweep or launcher.SWEEP_JOB in os.environ)
        try:
            return main(cfg)
        except Exception as error:
            if marked:
                mark_failed(output_folder(), error)
            elif own_folder and isinstance(error, USER_ERRORS):
                with suppress(OSError):
                    output_folder().rmdir()  # only succeeds while nothing has been written
            if in_sweep:
                # The sweeper keeps the error, whose frames keep the network.
                traceback.clear_frames(error.__traceback__)
            if in_sweep or not isinstance(error, USER_ERRORS):
                raise  # the sweeper counts it as failed
            failure = error
        finally:
            if in_sweep:
                forget_last_run()

    job.__module__ = config_name  # Hydra's name of the program
    try:
        if is_rank:
            handed_on = OmegaConf.load(os.environ[JOB_FILE])
            assert isinstance(handed_on, DictConfig)
            main(handed_on)
        else:
            hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(job)()
    except USER_ERRORS as error:
        failure = error
    except Exception as error:
        if is_rank and launcher.left_by_others():
            sys.exit(1)
        if composed:
            raise
        failure = UsageError(f"{NO_OVERRIDE} ({reason_of(error)}).")
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns Ctrl-C into SystemExit.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            if type(stop).__name__ == "SIGTERMException":  # Lightning's, with exit code 0
                sys.exit(STOPPED)
            raise
        if not is_rank:  # a rank's launcher prints it
            print(f"interrupted{again}.", file=sys.stderr)
        sys.exit(130)
    if failure is not None:
        if is_rank:
            launcher.leave_error(one_line(failure))  # also AgreedError: the launcher ends the others after the first
        elif rank() == 0 or not any(isinstance(each, AgreedError) for each in causes(failure)):
            print(f"{f'process {rank()}: ' if rank() else ''}error: {one_line(failure)}", file=sys.stderr)
        sys.exit(1 if isinstance(failure, launcher.JobError) else USAGE_ERROR)


def mark_failed(folder: Path, error: Exception) -> None:
    """Write the traceback of a failed run into its folder, unless that holds another run."""
    if not (any(isinstance(each, FolderTaken) for each in causes(error)) or (folder / RESULT_FILE).exists()):
        launcher.write_failure(folder, "".join(traceback.format_exception(error)), reason(error))


def report_failed(kind: str, failed: list[str], number: int, run: str) -> None:
    """Raise UsageError where some of a number of runs, or trials, have failed."""
    if failed:
        raise UsageError(
            f"{len(failed)} of {number} {kind} failed ({', '.join(failed)}; see {FAILURE_FILE} in their folders, "
            f"unless another run holds them); the same command with run={run} repeats them."
        )


def forget_last_run() -> None:
    """Free the network of the last run and its compiled code, and restart the clock."""
    global STARTED
    torch: Any = sys.modules.get("torch")  # where it is imported
    if torch is not None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    STARTED = time.monotonic()


def quieten() -> None:
    """Silence Lightning's start-up lines and its warnings about how this package uses a run folder."""
    # The packages set the levels of their own root loggers when they are imported, later than this.
    for name in (
        "pytorch_lightning.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "lightning_fabric.utilities.distributed",
    ):
        logging.getLogger(name).setLevel(logging.WARNING)
    for text in (
        r"Experiment logs directory .* exists",
        r"Checkpoint directory .* exists",
        r".*treespec, LeafSpec",
        r"Found \d+ module\(s\) in eval mode",  # frozen batch norm, on purpose
        r"Loading `train_dataloader` to estimate",
        r"The number of training batches .* is smaller than the logging interval",
        r"The '\w+_dataloader' does not have many workers",
        r"IProgress not found",  # of tqdm.auto, in a notebook without ipywidgets
        r"It is recommended to use `self\.log\(.*sync_dist=True",  # what is logged is the same on every process
    ):
        warnings.filterwarnings("ignore", message=text)


def output_folder() -> Path:
    """The run folder that Hydra made."""
    return Path(os.environ.get(HELD_BY_PARENT) or HydraConfig.get().runtime.output_dir)
