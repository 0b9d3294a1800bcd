"""What the entry points share: Hydra start-up and one-line errors.

Only the entry points and this room see the Hydra config; the rooms below take named arguments. Imports that cost seconds
stand inside the functions that need them, so that --help and errors come at once.
"""

from __future__ import annotations

import errno
import gc
import logging
import os
import re
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from io import TextIOWrapper
from itertools import count
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import hydra
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.hydra_config import HydraConfig
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.errors import HydraException
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigLoadError, ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from proxy_anchor.cli.config import holds_another
from proxy_anchor.errors import STOPPED, USAGE_ERROR, AgreedError, FolderTaken, UsageError, did_you_mean
from proxy_anchor.sweeps.launcher import (
    LAUNCHER,
    SWEEP_JOB,
    JobError,
    end_with_parent,
    leave_error,
    left_by_others,
    run_ranks,
    write_failure,
)
from proxy_anchor.training.run_lock import HELD_BY_PARENT, held, take
from proxy_anchor.utils import FAILURE_FILE, RESULT_FILE, keep_freed_memory, one_of_several, rank, read_result

STARTED_AT = "PROXY_ANCHOR_STARTED"  # hands it on to the processes of one command, which share a monotonic clock
# When the command began, but for the interpreter and the imports above.
STARTED = float(os.environ.get(STARTED_AT, time.monotonic()))
USER_ERRORS = (UsageError, HydraException, OmegaConfBaseException, OSError)
JOB_FILE, JOB_FOLDER = "PROXY_ANCHOR_JOB_FILE", "PROXY_ANCHOR_JOB_FOLDER"  # what `run_as_ranks` hands on
_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel inside the package, in a checkout at its top.
CONF = str(next(each for each in (_PACKAGE / "conf", _PACKAGE.parents[1] / "conf") if each.is_dir()))


class TimmSource(ConfigSource):
    """Makes every timm name a choice of the group `backbone`, beside the files in conf/backbone."""

    @staticmethod
    def scheme() -> str:
        """The address prefix under which Hydra's search path names this source."""
        return "timm"

    def load_config(self, config_path: str) -> ConfigResult:
        """conf/backbone/timm.yaml (or, for a tagged name, the file of the untagged one) with the name filled in."""
        if not self.is_config(config_path):
            raise ConfigLoadError(f"{config_path} is not a timm model")
        name = self._model_name(config_path)
        untagged = name.partition(".")[0]  # resnet50.tv_in1k is trained as resnet50 is
        base = untagged if untagged in _choices("backbone") else "timm"
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

        from proxy_anchor.models import registered  # noqa: F401  (registers the networks that timm lacks)

        name = self._model_name(config_path)
        return name.startswith(("hf-hub:", "local-dir:")) or timm.is_model(name)

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        """Nothing: over a thousand names would bury our own in help texts and errors."""
        return []

    @staticmethod
    def _model_name(config_path: str) -> str:
        return config_path.removeprefix("backbone/").removesuffix(".yaml")


class TimmSearchPath(SearchPathPlugin):
    """Has Hydra ask TimmSource behind conf/; in a config file only the outermost one may say so."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        """Add it."""
        search_path.append("timm", f"{TimmSource.scheme()}://")


def register_plugins() -> None:
    """Make every timm name a choice of `backbone`, and `selecting_recall` a resolver, for what this process composes."""
    OmegaConf.register_new_resolver(
        "selecting_recall",
        lambda validation, k: f"{'test' if validation == 'test' else 'validation'}/recall_at_{min(k)}",
        replace=True,
    )
    Plugins.instance().register(TimmSource)
    Plugins.instance().register(TimmSearchPath)


class FolderRefused(BaseException):
    """Carries the error of `RunFolder` past Hydra, which makes a warning of every Exception of a callback."""

    def __init__(self, error: Exception) -> None:
        super().__init__(error)
        self.error = error


class RunFolder(Callback):
    """Takes the folder of a run or a sweep before Hydra makes it; a default name that is taken gets a number behind it."""

    def on_run_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The folder of a run; that of several processes is taken by the first of them (see `settings.take_up`)."""
        if not one_of_several():
            hydra_config: Any = HydraConfig.instance()
            before, hydra_config.cfg = hydra_config.cfg, config  # which hydra.run.dir may read
            try:
                self._take(config, "hydra.run.dir")
            finally:
                hydra_config.cfg = before

    def on_multirun_start(self, config: DictConfig, **kwargs: Any) -> None:
        """The folder of a sweep. Its jobs, which take their own, are told its name."""
        given = config.run
        self._take(config, "hydra.sweep.dir")
        if config.run != given:
            with read_write(config.hydra), open_dict(config.hydra):
                config.hydra.overrides.task.append(f"run={config.run}")

    def _take(self, config: DictConfig, key: str) -> None:
        try:
            folder, name = Path(OmegaConf.select(config, key)), str(config.run)
            named_by_time = OmegaConf.is_interpolation(config, "run") and folder.name == name
        except OmegaConfBaseException:
            return  # Hydra meets it next, and reports it
        try:
            if not named_by_time:
                take(folder)
                return
            for number in count(2):
                with suppress(FolderTaken, FileExistsError):
                    folder.mkdir(parents=True)  # of two commands one succeeds, whenever they look at the lock
                    take(folder, wait_s=0)
                    return
                config.run = f"{name}_{number}"
                folder = folder.with_name(config.run)
        except (UsageError, OSError) as error:
            raise FolderRefused(error) from error


def run_as_ranks(cfg: DictConfig, folder: Path, num_ranks: int) -> dict[str, Any]:
    """This command with this configuration as several processes that train together, in one folder; their result.

    The processes take the configuration from a file instead of composing it: theirs is this job's, also in a sweep, and
    has the same time in the name of its run. Raises UsageError or JobError when one of them fails.
    """
    with TemporaryDirectory() as place:
        file = Path(place) / "job.yaml"
        OmegaConf.save(cfg, file, resolve=True)
        handed_on = {JOB_FILE: str(file), JOB_FOLDER: str(folder), STARTED_AT: str(STARTED)}
        handed_on[HELD_BY_PARENT] = str(folder.resolve())
        run_ranks([sys.executable, sys.argv[0]], num_ranks, handed_on)
    result = read_result(folder)
    assert result is not None
    return result


def help_text(config_name: str) -> str:
    """What an entry does, from its docstring; examples, and its keys with their comments, from its file in conf/."""
    described = (sys.modules["__main__"].__doc__ or "").strip()
    text = (Path(CONF) / f"{config_name}.yaml").read_text(encoding="utf-8").partition("\nhydra:\n")[0]
    text = re.sub(r"^  - (_self_|override hydra/.*)\n", "", text + "\n", flags=re.M)
    text = re.sub(r"^defaults:\n(?! )", "", text, flags=re.M)
    return f"{described}\n\n{text.rstrip()}\n\n--cfg job shows the keys as a command resolves them."


def run(main: Callable[[DictConfig], Any], config_name: str) -> None:
    """Run `main(cfg)` under Hydra; an error that a user can repair is one line on stderr and exit code 2."""
    if {"-h", "--help"} & {*sys.argv[1:]}:
        print(help_text(config_name))
        return
    is_rank = JOB_FILE in os.environ  # of `run_as_ranks`
    if LAUNCHER in os.environ:
        end_with_parent()
    os.environ.setdefault("HYDRA_FULL_ERROR", "1")  # errors reach us instead of Hydra's own printer
    register_plugins()
    _quieten()
    keep_freed_memory()
    if rank() > 0:  # the first process speaks for all
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  (until the process ends)
        warnings.filterwarnings("ignore")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):
            # A file's name need not be UTF-8; and who reads a log or a pipe sees each line as it is printed.
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
    failures: list[BaseException] = []
    composed = is_rank

    def job(cfg: DictConfig) -> Any:
        nonlocal composed
        composed = True
        in_sweep = HydraConfig.get().mode != RunMode.RUN
        own_folder = output_folder() != Path.cwd()  # evaluate.py and others run where the user stands
        marked = own_folder and (in_sweep or SWEEP_JOB in os.environ)
        try:
            # The folder of a single run is held until the process ends: a checkpoint may still be written in the background.
            with held(output_folder()) if own_folder and in_sweep else nullcontext():
                if marked:
                    clear_failure(cfg, output_folder())
                return main(cfg)
        except Exception as error:
            if marked:
                mark_failed(output_folder(), error, cfg)
            elif own_folder and isinstance(error, USER_ERRORS):
                with suppress(OSError):
                    output_folder().rmdir()  # only succeeds while nothing has been written
            if in_sweep:
                traceback.clear_frames(error.__traceback__)  # they hold the network, and the sweeper holds the error
            if in_sweep or not isinstance(error, USER_ERRORS):
                raise  # the sweeper has to know
            failures.append(error)
        finally:
            if in_sweep:
                forget_last_run()

    job.__module__ = config_name  # from which Hydra takes the program's name for --help
    try:
        if is_rank:
            handed_on = OmegaConf.load(os.environ[JOB_FILE])
            assert isinstance(handed_on, DictConfig)
            main(handed_on)
        else:
            hydra.main(version_base="1.3", config_path=CONF, config_name=config_name)(job)()
    except JobError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except USER_ERRORS as error:
        failures.append(error)
    except FolderRefused as refused:
        failures.append(refused.error)
    except Exception as error:
        if is_rank and left_by_others():
            sys.exit(1)
        if composed:
            raise
        failures.append(composing_error(error))
    except (KeyboardInterrupt, SystemExit) as stop:
        # Lightning turns Ctrl-C into an exit of its own.
        if isinstance(stop, SystemExit) and not isinstance(stop.__context__, KeyboardInterrupt):
            if type(stop).__name__ == "SIGTERMException":  # Lightning's, without a code, as if the run were finished
                sys.exit(STOPPED)
            raise
        if not is_rank:  # otherwise the process that started this one says so
            print("interrupted; what had been written is kept.", file=sys.stderr)
        sys.exit(130)
    if failures:
        if is_rank:
            leave_error(one_line(failures[0]))  # also AgreedError: the first to end has the others ended
        elif rank() == 0 or not any(isinstance(each, AgreedError) for each in _causes(failures[0])):
            print(f"{f'process {rank()}: ' if rank() else ''}error: {one_line(failures[0])}", file=sys.stderr)
        sys.exit(USAGE_ERROR)


def clear_failure(cfg: DictConfig, folder: Path) -> None:
    """Remove what an earlier attempt at this run left by `mark_failed`; not where the folder holds another run."""
    if not holds_another(cfg, folder):
        (folder / FAILURE_FILE).unlink(missing_ok=True)


def mark_failed(folder: Path, error: Exception, cfg: DictConfig | None = None) -> None:
    """Leave the trace of the run that this error ended in its folder; not where that holds another run, or a finished one.

    cfg: of the run; None where the folder is known to hold no other.
    """
    taken = any(isinstance(each, FolderTaken) for each in _causes(error)) or (folder / RESULT_FILE).exists()
    if not (taken or (cfg is not None and holds_another(cfg, folder))):
        write_failure(folder, "".join(traceback.format_exception(error)), reason(error))


def forget_last_run() -> None:
    """Let go of a run's network and of what was compiled for it, so that the next one starts, and is timed, as the first."""
    global STARTED
    torch: Any = sys.modules.get("torch")  # not imported for this
    if torch is not None:
        if "torch._dynamo" in sys.modules:
            torch.compiler.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    STARTED = time.monotonic()


def composing_error(error: Exception) -> UsageError:
    """What Hydra raises, beside errors of its own, for overrides of which it makes no sense."""
    if "Config group override" in str(error) or isinstance(error, TypeError):
        return UsageError("a config group cannot be null, a number or a list: name one of its files, or leave it out.")
    return UsageError("an override cannot be understood: write key=value, or group=NAME for one of a group's files.")


def _is_wanted(record: logging.LogRecord) -> bool:
    return record.levelno > logging.INFO or "Profiler Report" in record.getMessage()  # of trainer.profiler


def _quieten() -> None:
    """Leave Lightning's warnings, but not its start-up lines nor those about our own way of using a run folder."""
    # The packages set the levels of their own root loggers when they are imported, later than this.
    for name in (
        "pytorch_lightning.utilities.rank_zero",
        "lightning_fabric.utilities.rank_zero",
        "lightning_fabric.utilities.distributed",
    ):
        logging.getLogger(name).addFilter(_is_wanted)
    for text in (
        r"Experiment logs directory .* exists",
        r"Checkpoint directory .* exists",
        r".*treespec, LeafSpec",
        r"Found \d+ module\(s\) in eval mode",  # frozen batch norm, on purpose
        r"Loading `train_dataloader` to estimate",
        r"The number of training batches .* is smaller than the logging interval",
        r"The '\w+_dataloader' does not have many workers",
        r"It is recommended to use `self\.log\(.*sync_dist=True",  # what is logged is the same on every process
    ):
        warnings.filterwarnings("ignore", message=text)


def reason(error: BaseException) -> str:
    """As `one_line`, with the kind of an error that is not a user's."""
    return one_line(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The error as one line: the innermost UsageError's text, or Hydra's message with the repair."""
    chain = list(_causes(error))
    for link in chain:
        if isinstance(link, UsageError):
            lines = str(link).strip().splitlines()
            if "Original Traceback (most recent call last):" in lines:  # a data worker's: the message is its last line
                return lines[-1].removeprefix(f"{type(link).__module__}.{type(link).__name__}: ")
            return " ".join(lines)  # a name may hold line breaks
    text = str(error).strip()
    if match := re.match(r"Could not override '(?P<key>[^']+)'", text):
        return _unknown_key(match["key"].lstrip("+~"), chain)
    if match := re.match(r"(?:In '[^']*': )?Could not find '(?P<group>\w+)/(?P<name>[^']+)'", text):
        return _unknown_choice(match["group"], match["name"])
    if isinstance(error, OSError) and error.errno in _REPAIRS:
        return f"{error.filename or 'a file'}: {error.strerror}: {_REPAIRS[error.errno]}."
    if text.startswith("Error in call to target"):  # the cause says it in its own words
        key = re.search(r"full_key: (\S+)", text)
        return f"{key[1] + ': ' if key else ''}{str(chain[-1]).strip().splitlines()[0]}"
    if match := re.match(r"You must specify '(?P<group>\w+)'", text):
        return f"{match['group']} is needed: add {match['group']}=NAME, one of: {', '.join(_choices(match['group']))}."
    if text.startswith("mismatched input '='"):
        return "a value that holds = stands in two kinds of quotes: 'key=\"value\"'."
    if match := re.match(r"Missing mandatory value: (\S+)", text):
        return f"{match[1]} is needed: add {match[1]}=... to the command."
    return " ".join(line.strip() for line in text.splitlines()[:2]) or type(error).__name__


_NO_ROOM = "make room, and give the same command again"
_NO_RIGHT = "it may not be used in this way: change its permissions, or start in another folder"
_REPAIRS = {errno.ENOSPC: _NO_ROOM, errno.EDQUOT: _NO_ROOM, errno.EFBIG: _NO_ROOM}
_REPAIRS |= {errno.EACCES: _NO_RIGHT, errno.EPERM: _NO_RIGHT, errno.EROFS: _NO_RIGHT}


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _unknown_key(key: str, chain: list[BaseException]) -> str:
    parent, _, name = key.rpartition(".")
    node = next((node for link in chain if (node := getattr(link, "parent_node", None)) is not None), None)
    known = [str(each) for each in node] if isinstance(node, DictConfig) else []
    place = f" in {parent}" if parent else ""
    listed = f" Known{place}: {', '.join(sorted(known))}." if known else ""
    return f"unknown key {key!r}.{did_you_mean(name, known)}{listed}"


def _choices(group: str) -> list[str]:
    return sorted(path.stem for path in (Path(CONF) / group).glob("*.yaml"))


def _unknown_choice(group: str, name: str) -> str:
    known = _choices(group)
    if group == "backbone":
        import timm

        hint = did_you_mean(name, [*known, *timm.list_models()])
        return f"backbone {name!r} is neither in conf/backbone ({', '.join(known)}) nor a timm model.{hint}"
    return f"{group}={name} is not known; choose one of: {', '.join(known)}.{did_you_mean(name, known)}"


def output_folder() -> Path:
    """The folder that Hydra made for this run."""
    if JOB_FOLDER in os.environ:
        return Path(os.environ[JOB_FOLDER])
    return Path(HydraConfig.get().runtime.output_dir)
