"""One line for every error that a user can repair."""

from __future__ import annotations

import errno
import re
import shlex
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverrideParseException
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from omegaconf import DictConfig
from omegaconf.errors import ConfigAttributeError, ConfigKeyError, MissingMandatoryValue, OmegaConfBaseException

from proxy_anchor.cli.command import CONF
from proxy_anchor.errors import UsageError, did_you_mean, reason_of

USER_ERRORS = (UsageError, HydraException, OmegaConfBaseException, OSError)


def reason(error: BaseException) -> str:
    """As `one_line`, with the type of an error that is not a user's."""
    return one_line(error) if isinstance(error, USER_ERRORS) else f"{type(error).__name__}: {one_line(error)}"


def one_line(error: BaseException) -> str:
    """The error as one line with the repair."""
    chain = list(causes(error))
    for link in chain:
        if isinstance(link, UsageError):
            lines = str(link).strip().splitlines()
            if "Original Traceback (most recent call last):" in lines:  # a data worker's: the message is its last line
                return lines[-1].removeprefix(f"{type(link).__module__}.{type(link).__name__}: ")
            return " ".join(lines)  # a name may hold line breaks
        if isinstance(link, (ConfigAttributeError, ConfigKeyError)) and isinstance(link.parent_node, DictConfig):
            return _unknown_key(str(link.full_key), link.parent_node)
        if isinstance(link, MissingConfigException) and "/" in str(link.missing_cfg_file):
            return _unknown_choice(*str(link.missing_cfg_file).split("/", 1))
        if isinstance(link, MissingMandatoryValue):
            return f"{link.full_key or str(link).split(': ')[-1]} is needed: add it to the command as KEY=VALUE."
        if isinstance(link, OverrideParseException):
            return f"{link.override} cannot be understood: write {quoted(link.override)}."
        if isinstance(link, InstantiationException):  # its cause has the message
            return reason_of(next((each for each in chain if isinstance(each, UsageError)), chain[-1]))
        if isinstance(link, OSError) and link.errno in _REPAIRS:
            return f"{link.filename or 'a file'}: {link.strerror}: {_REPAIRS[link.errno]}."
    text = str(error).strip()
    if match := re.match(r"You must specify '(?P<group>\w+)'", text):  # Hydra's error has no attributes
        group = match["group"]
        return f"{group} is needed: add {group}=NAME, one of: {', '.join(_choices(group))}."
    if match := re.match(r"Ambiguous value for argument '(?P<given>.*)'", text):
        given = match["given"]
        return (
            f"{given} has several values: give one, add -m to a command for a sweep (from Python: a call for each), or "
            f"write {quoted(given)} for one with a comma."
        )
    return " ".join(line.strip() for line in str(error).strip().splitlines()[:2]) or type(error).__name__


NO_OVERRIDE = "an override cannot be understood: write key=value, or group=NAME for one of a group's files"
_NO_ROOM = "make room, and give the same command again"
_NO_RIGHT = "it may not be used in this way: change its permissions, or start in another folder"
_REPAIRS = {errno.ENOSPC: _NO_ROOM, errno.EDQUOT: _NO_ROOM, errno.EFBIG: _NO_ROOM}
_REPAIRS |= {errno.EACCES: _NO_RIGHT, errno.EPERM: _NO_RIGHT, errno.EROFS: _NO_RIGHT}


def quoted(override: str) -> str:
    """The override as a shell has to pass it: Hydra's grammar takes many characters only in double quotes."""
    key, equals, value = override.partition("=")
    if not equals:
        return "key=value"
    escaped = re.sub(r'(\\*)"', r'\1\1\\"', value)
    return shlex.quote(f'{key}="{escaped}"')


def causes(error: BaseException | None) -> Iterator[BaseException]:
    """The error and its causes, outermost first."""
    while error is not None:
        yield error
        error = error.__cause__


def _unknown_key(key: str, parent: DictConfig) -> str:
    place, _, name = key.rpartition(".")
    known = sorted(map(str, parent))
    groups = {group: parent._get_node(group) for group in known}
    inside = [f"{group}.{name}" for group, node in groups.items() if isinstance(node, DictConfig) and name in node]
    hint = f" Did you mean {' or '.join(map(repr, inside))}?" if inside else did_you_mean(name, known)
    if (Path(CONF) / place / f"{name}.yaml").is_file():
        hint = f" Choose it first: {place}={name}."
    return f"unknown key {key!r}.{hint} Known{f' in {place}' if place else ''}: {', '.join(known) or 'none'}."


def _choices(group: str) -> list[str]:
    return sorted(file.stem for file in (Path(CONF) / group).glob("*.yaml"))


def _unknown_choice(group: str, name: str) -> str:
    known = _choices(group)
    if group == "backbone":
        import timm

        hint = did_you_mean(name, [*known, *timm.list_models()])
        return f"backbone {name!r} is neither in conf/backbone ({', '.join(known)}) nor a timm model.{hint}"
    return f"{group}={name} is not known; choose one of: {', '.join(known)}.{did_you_mean(name, known)}"


_KNOWN = {  # pattern in the message of torch or Lightning: what is said instead
    "^Early stopping conditioned on metric.*": r"callbacks.early_stopping: \g<0>",
    "(.*) does not have a deterministic implementation": r"deterministic=true: \1 has no repeatable form on this "
    "device; set trainer.deterministic=warn to go on where there is none, or choose another backbone or loss.",
    "Expected more than 1 value per channel when training": "batch norm cannot train on one value per channel: set "
    "data.batch_size to 2 or more per device, a larger dataset.images.crop, or batch_norm=frozen_statistics.",
    r"No working C\+\+ compiler found": "compile=true needs a C++ compiler on a CPU, and none was found: install g++, "
    "or set compile=false.",
    r"DataLoader worker \(pid": "a worker process that reads images was killed, often because memory (or /dev/shm) was "
    "full: set a smaller data.num_workers; the same command with run=NAME continues the run.",
}


@contextmanager
def explained(cfg: DictConfig) -> Iterator[None]:
    """Raise UsageError, naming keys, for out of memory, a nondeterministic operation, a refusing callback."""
    import torch
    from pytorch_lightning.utilities.exceptions import MisconfigurationException

    try:
        yield
    except torch.OutOfMemoryError as error:
        # The frames hold the step's tensors, which the next job of a sweep would find missing.
        traceback.clear_frames(error.__traceback__)
        figures = ""
        if torch.cuda.is_initialized():
            peak, capacity = torch.cuda.max_memory_allocated() / 2**30, torch.cuda.mem_get_info()[1] / 2**30
            figures = f" (peak {peak:.1f} GiB of the GPU's {capacity:.1f} GiB)"
            torch.cuda.empty_cache()
        raise UsageError(
            f"out of memory with data.batch_size={cfg.data.batch_size}{figures}: set a smaller one "
            "(data.eval_batch_size if an evaluation had begun), trainer.precision=bf16-mixed, or data.cache=ram."
        ) from None
    except MisconfigurationException as error:
        raise UsageError(" ".join(str(error).split())) from error
    except (RuntimeError, ValueError) as error:
        before = error.__context__
        while before is not None:
            if isinstance(before, KeyboardInterrupt):  # Ctrl-C ended the workers too
                raise before from None
            before = before.__context__
        for pattern, meaning in _KNOWN.items():
            if match := re.search(pattern, str(error)):
                raise UsageError(match.expand(meaning)) from error
        raise
