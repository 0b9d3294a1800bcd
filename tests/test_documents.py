"""README.md and docs/: links and anchors lead somewhere, pictures are small, every command of theirs is one that runs.

Commands on the embedded data or a folder of pictures run here, in small; what docs/search.md and
docs/getting_started.md show runs in test_search_entries.py and reports/test_report.py; those on a benchmark are
composed and checked as far as they get without its images.
"""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
from commands import REPOSITORY, TINY_FOLDER, TINY_GLYPHS, composed, run_ok, trained_beside_pictures

from compare import comparison_jobs
from proxy_anchor.cli import checks
from tune import shared_arguments

DOCUMENTS = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").rglob("*.md"))]
LINK = re.compile(r"(!?)\[[^\]]*\]\(([^)\s]+)\)")


def anchors(document: Path) -> set[str]:
    """Of its headings, as a forge makes them."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.S)
    headings = re.findall(r"^#+ +(.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", each.strip().lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_every_link_and_anchor_leads_somewhere(document):
    for _, target in LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", document.read_text(), flags=re.S)):  # not in code
        if "://" not in target:
            path, _, anchor = target.partition("#")
            file = document.parent / path if path else document
            assert file.exists(), target
            assert REPOSITORY in (file.resolve(), *file.resolve().parents), f"{target} leads out of the repository"
            assert not anchor or anchor in anchors(file), target


def test_every_fault_names_tests_that_exist():
    text, file = (REPOSITORY / "docs" / "reliability.md").read_text(), ""
    named = re.findall(r"`([\w/]*test_\w+\.py)?((?:::\w+)*)`", text)
    assert len(named) > 50
    for place, names in named:
        file = place or file  # `::name` is of the file before
        source = (REPOSITORY / "tests" / file).read_text()
        for name in names.split("::")[1:]:
            assert re.search(rf"^ *(def|class) {name}\b", source, re.M), f"{file}::{name}"


@pytest.mark.slow
@pytest.mark.skipif(not find_spec("sphinx") or not find_spec("myst_nb"), reason="the docs extra is not installed")
def test_the_site_is_built(tmp_path):
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-q", "-b", "html", "-c", "docs", ".", tmp_path]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "index.html").read_text()
    for target in ("docs/losses.html", "notebooks/quickstart.html", "_images/retrieval.png"):
        assert target in page
        assert (tmp_path / target).is_file()


def commands(document: Path) -> list[str]:
    """The lines of its bash blocks that call a Python file."""
    blocks = re.findall(r"```bash\n(.*?)```", document.read_text().replace("\\\n", " "), re.S)
    lines = [line for block in blocks for line in block.splitlines()]
    return [line for line in lines if re.match(r"(python|torchrun|sbatch) ", line)]


COMMANDS = [pytest.param(line, id=f"{file.stem}: {line}") for file in DOCUMENTS for line in commands(file)]


def ends(overrides: list[str]) -> list[list[str]]:
    """The overrides of the first and of the last job of a sweep."""
    pairs = [each.split("=", 1) for each in overrides]
    values = {key: [value] if value[:1] in "[{" else value.split(",") for key, value in pairs}
    return [[f"{key}={each[end]}" for key, each in values.items()] for end in (0, -1)]


def check(script: str, overrides: list[str]) -> None:
    """What `python src/SCRIPT OVERRIDES` refuses before it reads anything; raises for it."""
    name = script.removesuffix(".py")
    with composed(name, *overrides) as cfg:
        if name == "compare":
            cfg.seeds = cfg.seeds[:1]  # each takes a second
            comparison_jobs(cfg)
        elif name == "tune":
            shared_arguments(cfg, list(cfg.search))
        elif name == "train":
            checks.check_config(cfg)
        elif name in ("evaluate", "search", "embed", "export", "app"):
            checks.check_use(cfg, name)
        else:
            assert name in ("prepare", "check", "report")


@pytest.mark.parametrize("line", COMMANDS)
def test_every_command_is_one_that_is_accepted(line):
    program, *words = shlex.split(line, comments=True)
    script, arguments = next((w, words[n + 1 :]) for n, w in enumerate(words) if w.endswith((".py", ".sh")))
    assert (REPOSITORY / script).is_file()
    if program == "sbatch":
        script = "src/train.py"
    folder, name = script.rsplit("/", 1)
    if folder != "src" or arguments == ["--help"]:
        return  # benchmarks take no config
    overrides = [each for each in arguments if each != "-m"]
    for job in ends(overrides) if "-m" in arguments else [overrides]:
        check(name, job)


# What a line of the README needs that is not here, or where it runs instead.
ELSEWHERE = {
    "DIR": "the images of a benchmark",
    "dataset=cub": "the images of a benchmark",
    "resnet18.pth": "a file of weights",
    "speed=fast": "a compiler and minutes: tests/training/test_compile.py",
    "trainer.devices=4": "processes: test_train_ddp.py",
    "launcher=local": "processes: test_sweep.py",
    "-m loss.alpha=16,32 loss.delta=0,0.1 ": "four runs: test_sweep.py",
    "validation=folds": "five runs: test_train.py",
    "src/tune.py": "several trials: test_tune.py",
    "src/app.py": "a server: test_search_entries.py",
    "format=onnx": "test_search_entries.py",
    "bf16-mixed": "minutes on a CPU",
    "logger=wandb": "the wandb extra",
}
HERE = [line for line in commands(REPOSITORY / "README.md") if not any(each in line for each in ELSEWHERE)]
SMALL = {"train.py": TINY_GLYPHS, "train.py folder": [*TINY_FOLDER[1:], "trainer.max_epochs=1"]}


@pytest.fixture(scope="module")
def user(tmp_path_factory) -> Path:
    """A user's folder: the run that the README names, pictures of 8 classes, the same as a list, and a query."""
    folder = tmp_path_factory.mktemp("user")
    trained_beside_pictures(folder, "NAME")
    pictures = sorted((folder / "my_pictures").rglob("*.png"))
    shutil.copy(pictures[0], folder / "query.jpg")
    rows = [f"{path.relative_to(folder)},{path.parent.name}" for path in pictures]
    (folder / "my_pictures.csv").write_text("\n".join(["path,label", *rows, ""]))
    return folder


@pytest.mark.parametrize("line", HERE)
def test_the_readme_runs(line: str, user: Path) -> None:
    _, script, *arguments = shlex.split(line, comments=True)
    name = script.rsplit("/", 1)[1]
    if arguments != ["--help"]:
        arguments += SMALL.get(f"{name} folder" if "dataset=folder" in arguments else name, [])
    if name == "train.py" and not any(each.startswith("run=") or each == "--help" for each in arguments):
        # By default a run is named by the second, and here several begin within one, which is refused.
        arguments.append(f"run=line{HERE.index(line)}")
    assert run_ok(f"../{script}", *arguments, cwd=user)


def test_the_readme_has_commands_that_run():
    assert {"train.py", "report.py", "evaluate.py", "search.py", "embed.py"} <= {
        shlex.split(line)[1].rsplit("/", 1)[1] for line in HERE
    }
    assert all(any(reason in line for line in commands(REPOSITORY / "README.md")) for reason in ELSEWHERE)
