"""`proxy-anchor NAME key=value ...`, the installed form of `python src/NAME.py key=value ...`."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

from proxy_anchor.errors import USAGE_ERROR, did_you_mean

_PACKAGE = Path(__file__).resolve().parents[1]
# In a wheel inside the package, in a checkout next to it or at the top.
CONF = str(next(each for each in (_PACKAGE / "conf", _PACKAGE.parents[1] / "conf") if each.is_dir()))
COMMANDS = next(each for each in (_PACKAGE / "commands", _PACKAGE.parent) if (each / "train.py").is_file())


def entries() -> dict[str, Path]:
    """{name: file} of the commands."""
    return {file.stem: file for file in sorted(COMMANDS.glob("*.py"))}


def main() -> None:
    """Run the entry that the first argument names; without one, list them."""
    known = entries()
    name = sys.argv[1] if len(sys.argv) > 1 else "--help"
    if name in ("-h", "--help"):
        print("proxy-anchor NAME key=value ...   (proxy-anchor NAME --help lists its keys)\n")
        for each, file in known.items():
            summary = file.read_text(encoding="utf-8").splitlines()[0].strip('"')
            print(f"  {each:<10}{summary}")
    elif name not in known:
        print(f"error: {unknown(name)}", file=sys.stderr)
        sys.exit(USAGE_ERROR)
    else:
        sys.argv = [str(known[name]), *sys.argv[2:]]
        sys.path.insert(0, str(COMMANDS))  # entries import each other
        runpy.run_path(str(known[name]), run_name="__main__")


def unknown(name: str) -> str:
    """The error for a name that is no command."""
    known = entries()
    return f"{name} is no command; choose one of: {', '.join(known)}.{did_you_mean(name, known)}"
