"""The examples of docs/extending.md are those of examples/, and they run."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pandas
import pytest
from commands import REPOSITORY, run_entry

DOCUMENT = (REPOSITORY / "docs" / "extending.md").read_text()
PARTS = (REPOSITORY / "examples" / "my_parts.py").read_text()


def test_the_document_quotes_the_examples() -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)
    assert len(blocks) == 5
    for block in blocks:
        assert block in PARTS


def test_the_command_trains_with_every_part(
    tmp_path: Path, write_images: Callable, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "flat").mkdir()
    for number, (path, name) in enumerate(write_images(dict.fromkeys("abcdnopq", 4))):
        path.rename(tmp_path / "flat" / f"{name}_{number}.png")
    [command] = re.findall(r"```bash\npython (examples/.*?)```", DOCUMENT, re.S)
    script, *arguments = shlex.split(command.replace("\\\n", " ").replace("DIR", str(tmp_path / "flat")))
    arguments[arguments.index("examples/conf")] = str(REPOSITORY / "examples" / "conf")
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    monkeypatch.delitem(sys.modules, "my_parts", raising=False)
    few = ["run=x", "trainer.max_epochs=1", "data.num_workers=0", "trainer.accelerator=cpu", "logger=csv"]
    done = run_entry(f"../{script}", *arguments, *few, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    metrics = pandas.read_csv(tmp_path / "runs" / "x" / "metrics.csv")
    assert metrics["proxy_norm"].max() > 0
    assert 0 < metrics["test/mean_similarity_of_first"].max() <= 1 + 1e-6
