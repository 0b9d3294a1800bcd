"""Networks as folders and repositories of the hub: written whole, read strictly, nothing executed."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import yaml
from commands import one_line
from huggingface_hub import HfApi
from safetensors.torch import load_file, save_file

from proxy_anchor import EmbeddingNet, Retriever
from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.errors import UsageError
from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.models import hub


@pytest.fixture
def net() -> EmbeddingNet:
    torch.manual_seed(0)
    net = EmbeddingNet("test_resnet", 8, image_size=32, pretrained=False, batch_norm="train")
    net.prepare, net.about = CentralCrop(32, 40), {"dataset": "mine"}
    return net


def test_a_saved_network_is_the_same_network(net: EmbeddingNet, tmp_path: Path) -> None:
    net.save_pretrained(tmp_path / "saved")
    assert {file.name for file in (tmp_path / "saved").iterdir()} == {"README.md", "config.json", "model.safetensors"}
    found = EmbeddingNet.from_pretrained(tmp_path / "saved")
    assert found.state_dict().keys() == net.state_dict().keys()
    assert all(torch.equal(value, net.state_dict()[name]) for name, value in found.state_dict().items())
    assert (found.config, found.prepare, found.about) == (net.config, net.prepare, net.about)
    assert found.fingerprint() == net.fingerprint()
    assert net.training
    assert not found.training
    assert found.batch_norm == "train"  # it may be trained on
    _, front, body = (tmp_path / "saved" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(front)["library_name"] == "proxy_anchor"
    assert "# test_resnet, 8-d" in body
    assert "resized to 40 pixels" in body


def test_a_network_is_saved_whole_over_another(net: EmbeddingNet, tmp_path: Path, monkeypatch) -> None:
    other = EmbeddingNet("test_resnet", 4, image_size=32, pretrained=False)
    other.card = "the card of another network"
    other.save_pretrained(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    with monkeypatch.context() as broken:
        broken.setattr(hub, "write_tensors", lambda file, module: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net.save_pretrained(tmp_path)
    assert EmbeddingNet.from_pretrained(tmp_path).fingerprint() == other.fingerprint()
    net.save_pretrained(tmp_path)
    found = EmbeddingNet.from_pretrained(tmp_path)
    assert found.fingerprint() == net.fingerprint()
    assert "# test_resnet, 8-d" in found.card
    names = {"README.md", "config.json", "model.safetensors", "notes.txt"}
    assert {file.name for file in tmp_path.iterdir()} == names


def test_preprocessing_follows_the_image_size() -> None:
    assert EmbeddingNet("test_resnet", 8, pretrained=False).prepare == CentralCrop(224, 256)  # as in the paper


def test_what_is_pushed_and_fetched_is_such_a_folder(net: EmbeddingNet, tmp_path: Path, monkeypatch) -> None:
    sent: dict[str, bytes] = {}

    def upload_folder(self: HfApi, *, repo_id: str, folder_path: Path, **_: object) -> str:
        sent.update({file.name: file.read_bytes() for file in folder_path.iterdir()})
        return f"commit of {repo_id}"

    monkeypatch.setattr(HfApi, "create_repo", lambda self, repo_id, **_: type("Url", (), {"repo_id": repo_id}))
    monkeypatch.setattr(HfApi, "upload_folder", upload_folder)
    net.card = "---\nlicense: mit\n---\nmy card"
    assert net.save_pretrained(tmp_path / "name", push_to_hub=True, private=True) == "commit of name"
    with monkeypatch.context() as offline:
        offline.setattr(HfApi, "create_repo", lambda self, **_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            net.save_pretrained(tmp_path / "kept", push_to_hub=True)
    assert EmbeddingNet.from_pretrained(tmp_path / "kept").fingerprint() == net.fingerprint()
    assert net.push_to_hub("user/name") == "commit of user/name"

    def snapshot_download(repo_id: str, *, allow_patterns: list[str], revision: str | None = None) -> str:
        assert (repo_id, sorted(allow_patterns), revision) == ("user/name", sorted(sent), "v1")
        for name, content in sent.items():
            (tmp_path / name).write_bytes(content)
        return str(tmp_path)

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    found = EmbeddingNet.from_pretrained("user/name", revision="v1")
    assert found.fingerprint() == net.fingerprint()
    assert found.card == "---\nlicense: mit\n---\nmy card"


def test_only_a_name_that_cannot_be_a_path_is_looked_up(tmp_path: Path, monkeypatch) -> None:
    asked = []

    def snapshot_download(repo_id: str, **_: object) -> str:
        asked.append(repo_id)
        raise ConnectionError("no network\nat all")

    monkeypatch.setattr(hub, "snapshot_download", snapshot_download)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "runs").mkdir()
    for name in ("runs/first", "nothing", "a/b/c", str(tmp_path / "x")):
        one_line(load_trained, name, match="no such file")
    assert asked == []
    with pytest.raises(UsageError, match=r"user/name is no folder here, and the hub .*\(no network at all\)"):
        Retriever.from_pretrained("user/name")
    assert asked == ["user/name"]


def change(folder: Path, **values: object) -> None:
    content = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(content | values))


def drop(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    del tensors[name]
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "config.json").write_text("{}"), "config.json is missing, damaged, or not written"),
        (lambda folder: (folder / "config.json").write_text("[]"), "config.json is missing, damaged, or not written"),
        (lambda folder: (folder / "config.json").write_text("{"), "config.json is missing, damaged, or not written"),
        (lambda folder: (folder / "config.json").unlink(), "config.json is missing, damaged, or not written"),
        (lambda folder: (folder / "model.safetensors").write_bytes(b"short"), "cannot be read"),
        (lambda folder: (folder / "model.safetensors").unlink(), "cannot be read"),
        (lambda folder: drop(folder, "head.bias"), "cannot be read"),
        (lambda folder: change(folder, format=2), "has format 2; this version reads format 1"),
        (lambda folder: change(folder, model={"backbone": "test_vit", "embedding_dim": 8}), "cannot be read"),
        (lambda folder: change(folder, model={"backbone": "test_resnet", "code": "x"}), "cannot be read"),
        (lambda folder: change(folder, model={"backbone": "test_resnet", "embedding_dim": 9}), "cannot be read"),
        (lambda folder: change(folder, model={"backbone": "test_resnet", "weights": "x"}), "cannot be read"),
        (lambda folder: change(folder, model={"backbone": "test_resnet", "mean": ["x"]}), "cannot be read"),
        (lambda folder: (folder / "README.md").write_bytes(b"\xff"), "cannot be read"),
    ],
)
def test_a_bad_folder_is_one_line(net: EmbeddingNet, tmp_path: Path, damage: Callable, reason: str) -> None:
    net.save_pretrained(tmp_path)
    damage(tmp_path)
    one_line(EmbeddingNet.from_pretrained, tmp_path, match=reason)


def test_a_network_in_training_is_searched_with_and_trains_on(net: EmbeddingNet, write_images: Callable) -> None:
    paths = [path for path, _ in write_images({"cat": 2, "dog": 2}, size=50)]
    retriever = Retriever(net, num_workers=0).index(paths, progress=False)
    assert [hits[0].name for hits in retriever.search(paths[:1], k=1)] == [str(paths[0])]
    assert net.training
    before = retriever.embed(paths)
    with torch.no_grad():
        net.head.weight.zero_()
    assert torch.equal(retriever.embed(paths), before)


def test_a_network_in_bfloat16_is_searched_with_and_saved(net: EmbeddingNet, write_images: Callable, tmp_path) -> None:
    paths = [path for path, _ in write_images({"cat": 2, "dog": 2}, size=50)]
    retriever = Retriever(net.bfloat16(), num_workers=0).index(paths, progress=False)
    retriever.save(tmp_path / "index")
    assert retriever.embeddings[1].dtype == torch.float32
    net.save_pretrained(tmp_path / "saved")
    found = EmbeddingNet.from_pretrained(tmp_path / "saved")
    assert torch.equal(found.head.weight, net.head.weight.float())
