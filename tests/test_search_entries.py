"""What a user does with a trained model: every command of docs/search.md, and every way to get them wrong."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import REPOSITORY, compose_entry, one_line, refused, run_ok, trained_beside_pictures

import embed
from proxy_anchor import Retriever

DOCUMENT = (REPOSITORY / "docs" / "search.md").read_text()
COMMANDS = [
    line for block in re.findall(r"```bash\n(.*?)```", DOCUMENT, re.S) for line in block.splitlines() if line.strip()
]

PYTHON = re.findall(r"```python\n(.*?)```", DOCUMENT, re.S)


@pytest.fixture(scope="module")
def here(tmp_path_factory) -> Path:
    """A user's folder: a run named first, 8 classes of pictures, and new ones."""
    folder = tmp_path_factory.mktemp("user")
    glyphs = trained_beside_pictures(
        folder, "first", "backbone.search_with=features+flip", "dataset.images.resize=null"
    )
    shutil.copytree(sorted((glyphs / "train").iterdir())[0], folder / "new_pictures")
    shutil.copyfile(next((folder / "new_pictures").iterdir()), folder / "query.jpg")
    return folder


@pytest.fixture
def run(here: Path) -> Callable[[str], str]:
    """run(command) is a command of the document as it stands there, in this process: starting one takes seconds."""

    def run_command(command: str) -> str:
        program, script, *arguments = shlex.split(command)
        assert program == "python"
        return run_ok(f"../{script}", *arguments, cwd=here)

    return run_command


def of(script: str) -> Iterator[str]:
    return (command for command in COMMANDS if command.startswith(f"python src/{script}"))


def test_search_commands(here: Path, run: Callable) -> None:
    first, second = of("search.py")
    broken = here / "my_pictures" / sorted(os.listdir(here / "my_pictures"))[0] / "broken.png"
    broken.write_text("no image")
    printed = run(first)
    broken.unlink()
    assert "left out, as they cannot be read: 1 image" in printed
    assert "broken.png" in printed
    [answer] = json.loads((here / "runs/first/search.json").read_text())["queries"]
    assert len(answer["hits"]) == 5
    assert answer["class"] in os.listdir(here / "my_pictures")
    page = (here / "runs/first/search.html").read_text()
    assert page.count("<img") == page.count('src="data:image/') == 6  # the query and its hits
    first_hit = Path(answer["hits"][0]["name"])
    assert str(first_hit.parent.parent) == str(here / "my_pictures")
    for text in (printed, page):  # below the gallery; in the JSON file whole
        assert first_hit.relative_to(here / "my_pictures").as_posix() in text
        assert str(first_hit) not in text
    printed = run(second)
    assert "64 images added or changed" in printed
    assert "match threshold" in printed
    assert sorted(os.listdir(here / "my_index")) == ["embeddings.npy", "index.json"]
    assert f"written: {here}/runs/first/search.json" in printed
    assert not (here / "search.json").exists()
    shutil.copyfile(here / "runs/first/best.ckpt", here / "alone.ckpt")
    run("python src/search.py checkpoint=alone.ckpt index=my_index query=query.jpg")
    assert (here / "search.json").is_file()
    again = run("python src/search.py checkpoint=runs/first index=my_index query=query.jpg k=64 rerank=k_reciprocal")
    assert "match threshold" in again
    run(
        "python src/search.py checkpoint=runs/first gallery=my_pictures query=query.jpg \"kind='IVF4,Flat'\" output=ivf"
    )
    assert json.loads((here / "ivf.json").read_text())["queries"][0]["hits"][0]["name"] == answer["hits"][0]["name"]


def test_python_example(here: Path, monkeypatch, capsys) -> None:
    code = "".join(PYTHON[:2])
    monkeypatch.chdir(here)
    exec(code.replace('"my_index"', '"python_index"'), {})
    assert "match threshold" in capsys.readouterr().out
    assert (here / "my_net" / "model.safetensors").is_file()


def test_page_command(here: Path) -> None:
    pytest.importorskip("starlette")
    [command] = of("app.py")
    _, script, *arguments = shlex.split(command)
    arguments += ["index=page_index", "port=0", "compare=runs/first/best.ckpt", "compare_index=other_index"]
    server = subprocess.Popen(
        [sys.executable, str(REPOSITORY / script), *arguments], cwd=here, stdout=subprocess.PIPE, text=True
    )
    try:
        assert server.stdout is not None
        address = next(match[0] for line in server.stdout if (match := re.search(r"http://127\.0\.0\.1:\d+", line)))
        with urllib.request.urlopen(f"{address}/api/about") as answer:
            models = json.load(answer)["models"]
        assert [(each["name"], each["images"]) for each in models] == [("runs/first", 64), ("runs/first/best.ckpt", 64)]
        assert (here / "other_index" / "index.json").is_file()
    finally:
        server.send_signal(signal.SIGINT)
        assert server.wait(30) in (0, 130)


def test_embeddings_go_into_other_stores(here: Path, run: Callable, monkeypatch, capsys) -> None:
    """Qdrant and usearch as in the document, DuckDB and LanceDB: all find what Retriever finds."""
    for package in ("pyarrow", "qdrant_client", "usearch", "duckdb", "lancedb"):
        pytest.importorskip(package)
    import duckdb
    import lancedb
    from pyarrow import parquet

    monkeypatch.chdir(here)
    for command in of("embed.py"):
        assert "64 embeddings of D=96" in run(command)
    with np.load("embeddings.npz", allow_pickle=False) as made:
        assert made["vector"].shape == (64, 96)
        assert np.allclose(np.linalg.norm(made["vector"], axis=1), 1, atol=1e-6)
        table = parquet.read_table("embeddings.parquet")
        for name in ("id", "path", "label"):
            assert table[name].to_pylist() == made[name].tolist()
        assert np.array_equal(np.stack(table["vector"].to_numpy()), made["vector"])
    assert all((here / "my_pictures" / path).is_file() for path in table["path"].to_pylist())
    assert not list(here.glob(".*"))

    recipes = [block for block in PYTHON if "qdrant" in block or "usearch" in block]
    found: dict = {}
    printed = []
    for recipe in recipes:
        exec(recipe, found)
        printed.append(capsys.readouterr().out.splitlines()[-5:])
    hits = Retriever.from_pretrained("runs/first").index("my_pictures").search("query.jpg", k=5)[0]
    expected = [(hit.label, Path(hit.name).relative_to("my_pictures").as_posix()) for hit in hits]
    found["client"].close()
    for lines in printed:
        assert [tuple(line.split()[1:]) for line in lines] == expected
        assert [float(line.split()[0]) for line in lines] == pytest.approx([hit.similarity for hit in hits], abs=2e-3)
    store = lancedb.connect("lance").create_table("pictures", table)
    nearest = store.search(found["query"]).limit(5).to_list()
    assert [(row["label"], row["path"]) for row in nearest] == expected
    order = "list_cosine_similarity(vector, $query) desc"
    rows = duckdb.execute(
        f"select label, path from 'embeddings.parquet' order by {order} limit 5", {"query": found["query"].tolist()}
    ).fetchall()
    assert rows == expected


def test_unknown_labels_are_strings_in_parquet(tmp_path: Path) -> None:
    """As a column of nulls, other stores take them for numbers, or refuse them."""
    parquet = pytest.importorskip("pyarrow.parquet")
    embed.write_embeddings(tmp_path / "e.parquet", ["a.png"], [None], torch.ones(1, 2))
    table = parquet.read_table(tmp_path / "e.parquet")
    assert str(table.schema.field("label").type) == "string"
    assert table.to_pylist() == [{"id": 0, "path": "a.png", "label": None, "vector": [1.0, 1.0]}]


def test_parquet_without_pyarrow_is_one_line_before_an_image_is_read(monkeypatch) -> None:
    monkeypatch.setattr(embed, "find_spec", lambda name: None)
    cfg = compose_entry("embed", "checkpoint=nothing", "images=nothing", "output=e.parquet")
    one_line(embed.embed, cfg, match=r"needs pyarrow: pip install -e '.\[export\]'")


def test_export_commands(here: Path, run: Callable) -> None:
    pytest.importorskip("onnxruntime")
    for command in of("export.py"):
        if re.search("format=(onnx|safetensors)", command):  # the others: tests/inference/test_export.py
            assert "largest difference from the checkpoint" in run(command)
    [example] = [command for command in COMMANDS if "onnx_search" in command]
    assert len(run(example).splitlines()) == 5
    card = r"pooled features, .*whole image is.*\n- batch norm.*searched with features\+flip\n- .*## Results"
    assert re.search(card, (here / "to_share" / "README.md").read_text(), re.S)
    run("python src/search.py checkpoint=to_share index=other_index gallery=my_pictures query=query.jpg")


def test_remaining_commands(here: Path, run: Callable) -> None:
    [evaluate] = of("evaluate.py")
    assert "k_reciprocal_map_at_r" in run(evaluate)
    ways = ["nmi=false", "search_with=features+flip", "search_with=flip"]  # the first: as trained
    trained, same, other = (run_ok("evaluate.py", "checkpoint=runs/first", each, cwd=here) for each in ways)
    assert trained == same != other
    [benchmark] = [command for command in COMMANDS if "benchmarks/" in command]
    assert "folder / ceiling %" in run(benchmark)
    rows = [json.loads(line) for line in (here / "speed" / "retrieval.jsonl").read_text().splitlines()]
    assert {row["search"].split()[0] for row in rows if row["kind"] == "search"} == {"exact", "HNSW32"}
    tested = r"python (src/(search|app|embed|export|evaluate)\.py|benchmarks/|examples/)"
    assert all(re.match(tested, command) for command in COMMANDS)


FIRST = "checkpoint=runs/first gallery=my_pictures"


@pytest.mark.parametrize(
    ("script", "arguments", "reason"),
    [
        ("search.py", "", "checkpoint is needed"),
        ("search.py", "checkpoint=runs/first", "query is needed"),
        ("search.py", "checkpoint=runs/first query=query.jpg", "gallery is needed"),
        ("search.py", "checkpoint=runs/first gallery=nothing query=query.jpg", "no such folder of images"),
        ("search.py", f"{FIRST} query=none.jpg", "none.jpg is missing"),
        ("search.py", f"{FIRST} query=query.jpg k=0", "k=0"),
        ("search.py", f"{FIRST} query=query.jpg output=no/where", "its folder does not exist"),
        ("search.py", f"{FIRST} query=7", "query=7: expected a path"),
        ("search.py", f"{FIRST} query=query.jpg dataset.root=x", "unknown key 'dataset'"),
        ("search.py", f"{FIRST} query=query.jpg rerank=best", "rerank=best is not known"),
        ("embed.py", "checkpoint=runs/first images=my_pictures output=e.csv", "ends in .npz or .parquet"),
        ("embed.py", "checkpoint=runs/first images=runs", "none of the 1 images"),
        ("app.py", f"{FIRST} port=-1", "port=-1"),
        ("app.py", f"{FIRST} max_upload_mb=0", "max_upload_mb=0"),
        ("app.py", f"{FIRST} compare_index=other", "add compare=CHECKPOINT"),
        ("app.py", f"{FIRST} compare=nothing", "no such file"),
        ("search.py", f"{FIRST} query=query.jpg false_accept_rate=0", "false_accept_rate=0: expected a finite number"),
        ("evaluate.py", "checkpoint=runs/first output=my_pictures", "expected a file"),
        ("evaluate.py", "checkpoint=runs/first search_with=mirror", "search_with=mirror is not known; choose one of"),
        ("evaluate.py", "checkpoint=runs/first data.num_workers=-1", "data.num_workers=-1: expected a whole number"),
    ],
)
def test_every_mistake_is_one_line(here: Path, script: str, arguments: str, reason: str) -> None:
    (here / "runs" / "first" / "gallery.png").write_text("no image")
    assert reason in refused(script, *arguments.split(), cwd=here)
