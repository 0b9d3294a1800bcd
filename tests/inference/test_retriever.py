"""The retriever: index, search, change, keep, resume, refuse."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from commands import one_line
from PIL import Image

from proxy_anchor import Retriever
from proxy_anchor.data.images import read_rgb
from proxy_anchor.errors import UsageError
from proxy_anchor.inference import embedder as embedder_module
from proxy_anchor.inference.app import pictures
from proxy_anchor.inference.checkpoint import load_trained
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.inference.gallery import open_index, warn_of_collapse
from proxy_anchor.inference.hits import Hit, vote


@pytest.fixture
def gallery(write_images: Callable, tmp_path: Path) -> Path:
    """A folder of three classes of 5 images each."""
    write_images({"cat": 5, "dog": 5, "eel": 5})
    return tmp_path / "images"


@pytest.fixture
def retriever(make_checkpoint: Callable, gallery: Path) -> Retriever:
    return Retriever.from_pretrained(make_checkpoint(), num_workers=0).index(gallery, progress=False)


def names(hits: list[Hit]) -> list[str]:
    return [Path(hit.name).parent.name + "/" + Path(hit.name).name for hit in hits]


def test_a_query_of_every_kind_finds_itself_first(retriever: Retriever, gallery: Path) -> None:
    path = gallery / "dog" / "3.png"
    pixels = np.asarray(read_rgb(path))
    answers = [retriever.search(each, k=4)[0] for each in (path, str(path), path.read_bytes(), pixels, read_rgb(path))]
    answers.append(retriever.search_embeddings(retriever.embed(path).numpy(), k=4)[0])
    for hits in answers:
        assert names(hits)[0] == "dog/3.png"
        assert hits == answers[0]
    assert answers[0][0].similarity == pytest.approx(1, abs=1e-6)
    assert answers[0][0].label == "dog"
    assert len(answers[0]) == 4


def test_objects_of_a_list_are_searched(make_checkpoint: Callable, tmp_path: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 120, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "photo.png")
    lines = ["path,label,x,y,w,h", *(f"photo.png,{name},{x},0,40,40" for name, x in {"a": 0, "b": 40, "c": 80}.items())]
    (tmp_path / "list.csv").write_text("\n".join(lines))
    retriever = Retriever.from_pretrained(make_checkpoint(), num_workers=0).index(tmp_path / "list.csv", progress=False)
    names = [str(tmp_path / f"photo.png#xywh={x},0,40,40") for x in (0, 40, 80)]
    assert [item.name for item in retriever.items.values()] == names
    for query in (pixels[:, 40:80], names[1]):
        hit = retriever.search(query, k=3)[0][0]
        assert (hit.name, hit.label, hit.similarity) == (names[1], "b", pytest.approx(1, abs=1e-6))
    assert pictures.ratio(names[0].replace("40,40", "40,20")) == 2
    assert pictures.original(names[0])[0] == (tmp_path / "photo.png").read_bytes()
    (tmp_path / "list.csv").write_text("\n".join(lines[:3]))
    assert retriever.update(tmp_path / "list.csv", progress=False) == (0, 1)


def test_queries_that_are_all_in_the_gallery_are_said(retriever: Retriever, gallery: Path) -> None:
    with pytest.warns(UserWarning, match="nearly all queries are also rows of the gallery"):
        retriever.search([gallery / "dog" / "3.png", gallery / "cat" / "1.png"], k=2)


def test_embeddings_are_those_of_the_evaluation(make_checkpoint: Callable, gallery: Path, monkeypatch) -> None:
    """The network and crop of the checkpoint, image by image; batches and workers change nothing."""
    monkeypatch.setattr(embedder_module, "_FEW_IMAGES", 1)
    net, paths = load_trained(make_checkpoint()), sorted(gallery.rglob("*.png"))
    with torch.no_grad():
        expected = torch.cat([net(net.prepare(read_rgb(path))[None]) for path in paths])
    for given, options in ((torch.compile(net), {"num_workers": 0}), (net, {"num_workers": 2, "batch_size": 4})):
        assert torch.allclose(Embedder(given, **options).embed(paths, progress=False).embeddings, expected, atol=1e-6)


def test_searching_on_from_an_image_leaves_it_out(retriever: Retriever) -> None:
    hits = retriever.search_item(4, k=14)
    assert sorted(hit.id for hit in hits) == [i for i in range(15) if i != 4]
    one_line(retriever.search_item, 4, k=15, match="besides the query itself")
    one_line(retriever.search_item, 99, match="id 99 is not in the gallery")


@pytest.mark.parametrize("reranking", ["query_expansion", "k_reciprocal"])
def test_reranking_reorders_the_same_images(retriever: Retriever, gallery: Path, reranking: str) -> None:
    hits = retriever.search(gallery / "cat" / "0.png", k=15, reranking=reranking)[0]
    plain = {hit.id: hit.similarity for hit in retriever.search(gallery / "cat" / "0.png", k=15)[0]}
    assert {hit.id for hit in hits} == set(plain)
    assert all(hit.similarity == pytest.approx(plain[hit.id], abs=1e-6) for hit in hits)


def test_adding_and_removing(retriever: Retriever, gallery: Path, write_images: Callable) -> None:
    [(new, _)] = write_images({"fox": 1})
    assert retriever.add([new], ["fox"], progress=False) == [15]
    assert names(retriever.search(new, k=1)[0]) == ["fox/0.png"]
    assert retriever.remove([new, gallery / "cat" / "0.png"]) == 2
    assert len(retriever) == 14
    assert all(hit.id not in (0, 15) for hit in retriever.search(new, k=14)[0])
    assert retriever.add([new], progress=False) == [16]  # ids are never used again
    assert retriever.add([new], ["again"], progress=False) == [17]  # the same name is replaced
    assert len(retriever) == 15
    one_line(retriever.remove, "nothing.png", match="is not in the gallery")


def test_arrays_and_bytes_have_names(make_checkpoint: Callable, gallery: Path) -> None:
    images = [np.asarray(read_rgb(gallery / "cat" / "0.png")), (gallery / "cat" / "1.png").read_bytes()]
    retriever = Retriever.from_pretrained(make_checkpoint()).index(images)
    assert [item.name for item in retriever.items.values()] == ["image 0", "image 1"]
    retriever.add([images[0], b"broken", images[1]], ["x", "-", "y"], progress=False)
    assert [(item.name, item.label) for item in retriever.items.values()][2:] == [("image 2", "x"), ("image 4", "y")]
    assert retriever.add(images, progress=False) == [5, 6]
    assert len(retriever) == 6


def test_saved_index_is_the_same_index(retriever: Retriever, gallery: Path, make_checkpoint, tmp_path: Path) -> None:
    retriever.calibrate(0.05)
    retriever.remove(gallery / "cat" / "3.png")
    retriever.save(tmp_path / "index")
    again = Retriever.from_pretrained(make_checkpoint()).load(tmp_path / "index")
    query = gallery / "eel" / "2.png"
    assert again.search(query, k=14) == retriever.search(query, k=14)
    assert again.threshold == retriever.threshold
    assert again.add([query.read_bytes()], progress=False) == [15]
    (tmp_path / "index" / ".DS_Store").touch()
    again.save(tmp_path / "index")  # over itself, mapped files and all
    assert len(Retriever.from_pretrained(make_checkpoint()).load(tmp_path / "index")) == 15
    left = {path.name for path in tmp_path.iterdir()}
    assert left == {"images", "index", "best.ckpt"}  # nothing aside remains


def test_index_of_another_model_is_refused(retriever: Retriever, make_checkpoint: Callable, tmp_path: Path) -> None:
    retriever.save(tmp_path / "index")
    with pytest.raises(UsageError, match="was made by another model"):
        Retriever.from_pretrained(make_checkpoint("other.ckpt", resize=40)).load(tmp_path / "index")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda folder: (folder / "index.json").unlink(), "holds no index"),
        (lambda folder: (folder / "index.json").write_text("{"), "index.json is damaged"),
        (lambda folder: change(folder, format=2, images=[[0, "a", None, "", 9]]), "another version .* format 2; .* 3"),
        (lambda folder: change(folder, images=[[1, 2]]), "index.json is damaged"),
        (lambda folder: (folder / "index.json").write_text("[" * 10**5), "index.json is damaged"),
        (lambda folder: change(folder, threshold={"a": 1}), "index.json is damaged"),
    ],
)
def test_damaged_index_is_one_line(retriever: Retriever, tmp_path: Path, damage: Callable, reason: str) -> None:
    retriever.save(tmp_path / "index")
    damage(tmp_path / "index")
    one_line(retriever.load, tmp_path / "index", match=reason)


def change(folder: Path, **values: object) -> None:
    content = json.loads((folder / "index.json").read_text())
    (folder / "index.json").write_text(json.dumps(content | values))


class CountingEmbedder:
    """Counts the images that the network sees, and can fail after some."""

    def __init__(self, monkeypatch, fail_after: int | None = None) -> None:
        self.seen, self.fail_after, plain = 0, fail_after, Embedder.forward

        def forward(embedder: Embedder, pixels: torch.Tensor) -> torch.Tensor:
            if self.fail_after is not None and self.seen >= self.fail_after:
                raise KeyboardInterrupt
            self.seen += len(pixels)
            return plain(embedder, pixels)

        monkeypatch.setattr(Embedder, "forward", forward)


def test_interrupted_indexing_goes_on_where_it_stopped(make_checkpoint, gallery: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(embedder_module, "SHARD_IMAGES", 4)
    counter = CountingEmbedder(monkeypatch, fail_after=8)
    make = lambda: Retriever.from_pretrained(make_checkpoint(), batch_size=2, num_workers=0)  # noqa: E731
    with pytest.raises(KeyboardInterrupt):
        make().index(gallery, shards=tmp_path / "parts", progress=False)
    assert counter.seen == 8
    counter.seen, counter.fail_after = 0, None
    resumed = make().index(gallery, shards=tmp_path / "parts", progress=False)
    assert counter.seen <= 15 - 8 + 2  # one batch was on its way
    whole = make().index(gallery, progress=False)
    assert torch.allclose(resumed.embeddings[1], whole.embeddings[1], atol=1e-6)
    assert [item.name for item in resumed.items.values()] == [item.name for item in whole.items.values()]

    counter.seen = 0
    Image.new("RGB", (40, 40), "red").save(gallery / "cat" / "1.png")  # changed
    (gallery / "cat" / "2.png").unlink()
    make().index(gallery, shards=tmp_path / "parts", progress=False)
    assert counter.seen == 1
    counter.seen = 0
    Retriever.from_pretrained(make_checkpoint("b.ckpt", seed=1)).index(
        gallery, shards=tmp_path / "parts", progress=False
    )
    assert counter.seen == 14  # another model's parts are not taken


def test_a_damaged_part_is_embedded_again(make_checkpoint, gallery: Path, tmp_path, monkeypatch) -> None:
    retriever = Retriever.from_pretrained(make_checkpoint())
    retriever.index(gallery, shards=tmp_path / "parts", progress=False)
    [part] = (tmp_path / "parts").rglob("*.npz")
    part.write_bytes(part.read_bytes()[:500])
    counter = CountingEmbedder(monkeypatch)
    retriever.index(gallery, shards=tmp_path / "parts", progress=False)
    assert counter.seen == 15


def test_open_index_follows_its_folder(make_checkpoint, gallery: Path, tmp_path, monkeypatch, capsys) -> None:
    checkpoint, folder = make_checkpoint(), tmp_path / "index"
    counter = CountingEmbedder(monkeypatch)
    assert len(open_index(checkpoint, gallery, folder)) == 15
    assert counter.seen == 15
    open_index(checkpoint, gallery, folder)
    assert counter.seen == 15
    (gallery / "dog" / "0.png").unlink()
    Image.new("RGB", (40, 40), "red").save(gallery / "cat" / "new.png")
    (gallery / "cat" / "bad.png").write_text("bad")
    (gallery / "eel" / "empty.png").touch()
    retriever = open_index(checkpoint, gallery, folder)
    assert counter.seen == 16
    assert len(retriever) == 15
    printed = capsys.readouterr().out
    for text in (
        "cannot be read: 2 images",
        "bad.png",
        "no image of a known format",
        "1 images added or changed, 1 removed",
    ):
        assert text in printed
    assert printed.endswith("gallery: 15 images\n")
    (gallery / "eel" / "0.png").unlink()  # nothing else is new
    open_index(checkpoint, gallery, folder)
    assert len(open_index(checkpoint, None, folder)) == 14
    one_line(open_index, checkpoint, None, folder, kind="HNSW32", match="is of kind=exact: remove it, or leave kind=")
    for label in ("cat", "tom"):  # a class that changes in the list alone is kept as well
        (gallery / "list.csv").write_text(f"path,label\ncat/0.png,{label}\n")
        open_index(checkpoint, gallery / "list.csv", tmp_path / "other")
    assert [item.label for item in open_index(checkpoint, None, tmp_path / "other").items.values()] == ["tom"]


@pytest.mark.parametrize(("angle", "said"), [(0, True), (11, True), (12, False)])
def test_collapsed_embeddings_are_said(capsys, angle: float, said: bool) -> None:
    """Two vectors so many degrees apart: cos 11 = 0.9816, cos 12 = 0.9781, and 0.98 is the limit."""
    turn = np.radians(angle)
    warn_of_collapse(torch.tensor([[1.0, 0.0], [np.cos(turn), np.sin(turn)]]), "runs/a: ")
    expected = f"warning: runs/a: the embeddings have collapsed (mean pairwise similarity {np.cos(turn):.4f}"
    assert capsys.readouterr().out.startswith(expected) is said


def test_calibrated_threshold_marks_matches(retriever: Retriever, gallery: Path) -> None:
    assert retriever.search(gallery / "cat" / "0.png", k=1)[0][0].is_match is None
    threshold = retriever.calibrate(0.1)
    hits = retriever.search(gallery / "cat" / "0.png", k=15)[0]
    assert [hit.is_match for hit in hits] == [hit.similarity >= threshold.similarity for hit in hits]
    retriever.index([gallery / "cat" / "0.png"], progress=False)
    one_line(retriever.calibrate, 0.1, match="needs labelled images")


def test_vote_weighs_by_similarity() -> None:
    hits = [Hit(0, "a", "cat", 0.9), Hit(1, "b", "dog", 0.5), Hit(2, "c", "dog", 0.5), Hit(3, "d", None, 0.9)]
    assert vote(hits) == ("dog", pytest.approx(1 / 1.9))
    assert vote(hits[:2]) == ("cat", pytest.approx(0.9 / 1.4))
    assert vote([Hit(0, "a", "cat", 0.5), Hit(1, "b", "dog", 0.5)])[0] == "cat"
    assert vote(hits[3:]) == (None, 0.0)
    assert vote([Hit(0, "a", "cat", -0.5), Hit(1, "b", "dog", -0.6)]) == ("cat", 0.5)


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        (lambda r, g: r.save(g), "something else than an index"),
        (lambda r, g: (r.save(g / "i"), (g / "i/mine.txt").touch(), r.save(g / "i")), "something else than an index"),
        (lambda r, g: (r.save(g / "i"), (g / "i/index.json").unlink(), r.save(g / "i")), "something else than an ind"),
        (lambda r, g: r.search(g / "cat" / "0.png", k=16), "K=16 is larger than the gallery: it has 15 images"),
        (lambda r, g: r.search(b"nothing", k=1), "1 of 1 images: the image cannot be read"),
        (lambda r, g: r.index([b"nothing"]), "none of the 1 images can be read"),
        (lambda r, g: r.index([g / "cat" / "0.png"] * 2), "is there twice"),
        (lambda r, g: r.index([g / "cat" / "0.png"], ["a", "b"]), "1 images but 2 labels"),
        (lambda r, g: r.index(g / "nothing"), "no such folder"),
        (lambda r, g: Retriever(torch.nn.Flatten()), "net is of type Flatten: expected an EmbeddingNet; make one"),
        (lambda r, g: Retriever(r.embedder.net, device="tpu"), "device=tpu is not available"),
        (lambda r, g: Retriever(r.embedder.net, precision="8"), "precision=8 is not known"),
        (lambda r, g: r.search(g / "cat" / "0.png", reranking="magic"), "rerank=magic is not known"),
    ],
)
def test_bad_input_is_one_line(retriever: Retriever, gallery: Path, call: Callable, reason: str) -> None:
    one_line(call, retriever, gallery, match=reason)


def test_a_broken_network_is_said_and_embeds_nothing(retriever: Retriever, gallery: Path) -> None:
    with torch.no_grad():
        retriever.embedder.net.head.bias.fill_(torch.nan)
    with pytest.raises(UsageError, match="1 of 1 embeddings of a batch hold NaN or infinity"):
        retriever.search(gallery / "cat" / "0.png", k=1)


def test_the_first_dimensions_alone_are_searched(make_checkpoint: Callable, gallery: Path, tmp_path: Path) -> None:
    checkpoint = make_checkpoint()
    whole, cut = (Retriever.from_pretrained(checkpoint, num_workers=0, dim=dim) for dim in (None, 4))
    vectors, short = (each.index(gallery, progress=False).embeddings[1] for each in (whole, cut))
    assert vectors.shape == (15, 16)
    torch.testing.assert_close(short, torch.nn.functional.normalize(vectors[:, :4]), rtol=0, atol=1e-6)
    cut.save(tmp_path / "index")
    assert np.load(tmp_path / "index" / "embeddings.npy").shape == (15, 4)
    assert len(Retriever.from_pretrained(checkpoint, num_workers=0, dim=4).load(tmp_path / "index")) == 15
    one_line(whole.load, tmp_path / "index", match=r"made by another model \(\w+-dim4, ")
    with pytest.raises(UsageError, match=r"num_workers=-1: expected a whole number of at least 0"):
        Retriever.from_pretrained(checkpoint, num_workers=-1)
    with pytest.raises(UsageError, match=r"dim=17: expected a finite number of at least 1 and at most 16"):
        Retriever.from_pretrained(checkpoint, dim=17)
