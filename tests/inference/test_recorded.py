"""A recorded forward: what may be recorded, which batches take it, and that it gives what the network gives."""

import gc

import pytest
import torch
from torch import nn

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.inference import embedder as embedder_module
from proxy_anchor.inference.checkpoint import TrainedNet, load_trained
from proxy_anchor.inference.embedder import Embedder
from proxy_anchor.inference.recorded import RefuseHostReads, record
from proxy_anchor.models.embedding_net import EmbeddingNet

needs_card = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * x.max().item(),
        lambda x: x[x > 0],
        lambda x: x if (x > 0).any() else -x,
        lambda x: torch.nonzero(x),
    ],
)
def test_what_reads_numbers_on_the_host_is_refused(function):
    with RefuseHostReads(), pytest.raises(RuntimeError, match="depends on numbers"):
        function(torch.ones(3))


def test_a_copy_to_another_device_is_refused():
    with RefuseHostReads(), pytest.raises(RuntimeError, match="from one device to another"):
        torch.ones(3).to("meta")


@pytest.mark.parametrize("backbone", ["test_resnet", "test_vit", "test_efficientnet"])
@torch.no_grad()
def test_a_network_is_not_refused_and_gives_the_same(backbone):
    net = EmbeddingNet(backbone, 8, pretrained=False, image_size=160, batch_norm="train").eval()
    images = torch.randint(0, 256, (2, 3, 160, 160), dtype=torch.uint8)
    with RefuseHostReads(), torch.autocast("cpu", torch.bfloat16):
        found = net(images)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(found, net(images))


def test_only_batches_of_more_than_half_are_replayed(make_checkpoint):
    embedder = Embedder(load_trained(make_checkpoint()), device="cpu", batch_size=4)
    pixels = torch.zeros(5, 3, 32, 32, dtype=torch.uint8)
    seen = []
    embedder._recorded = lambda rows: seen.append(len(rows)) or embedder.forward_unrecorded(rows)
    for count in (1, 2, 3, 4, 5):
        assert embedder.forward(pixels[:count]).shape == (count, 16)
    assert seen == [3, 4]


def test_only_long_runs_record(make_checkpoint, monkeypatch):
    calls = []
    monkeypatch.setattr(Embedder, "record", lambda self: calls.append(1))
    monkeypatch.setattr(embedder_module, "_MANY_BATCHES", 3)
    embedder = Embedder(load_trained(make_checkpoint()), device="cpu", batch_size=2, num_workers=0)
    images = [torch.full((40, 40, 3), value, dtype=torch.uint8).numpy() for value in range(6)]
    embedder.embed(images[:5], progress=False)
    assert calls == []
    embedder.embed(images, progress=False)
    assert calls == [1]


def test_nothing_is_recorded_on_a_cpu(make_checkpoint):
    embedder = Embedder(load_trained(make_checkpoint()), device="cpu")
    embedder.record()
    assert embedder._recorded is None


@pytest.fixture
def on_card():
    """make(precision) gives an embedder of batches of 8 on the card."""

    def make(precision="32"):
        torch.manual_seed(0)
        net = EmbeddingNet("test_resnet", 16, pretrained=False, image_size=64, batch_norm="train").eval()
        return Embedder(TrainedNet(net, CentralCrop(64, 72), None), device="cuda", batch_size=8, precision=precision)

    return make


@needs_card
@pytest.mark.parametrize("precision", ["32", "bf16"])
def test_a_replay_is_the_forward(on_card, precision):
    embedder = on_card(precision)
    embedder.record()
    assert embedder._recorded is not None
    batches = [torch.randint(0, 256, (count, 3, 64, 64), dtype=torch.uint8) for count in (8, 5, 8, 2)]
    found = [embedder.forward(pixels) for pixels in batches]  # all before any is looked at
    for pixels, embeddings in zip(batches, found, strict=True):
        expected = embedder.forward_unrecorded(pixels)
        assert embeddings.shape == expected.shape
        assert (embeddings * expected).sum(1).min() > (0.9999 if precision == "32" else 0.99)
    assert torch.equal(found[0], embedder.forward(batches[0].cuda().contiguous(memory_format=torch.channels_last)))


@needs_card
def test_a_replay_keeps_its_weights_when_the_network_moves_away(on_card):
    embedder = on_card()
    embedder.record()
    pixels = torch.randint(0, 256, (8, 3, 64, 64), dtype=torch.uint8)
    expected = embedder.forward(pixels)
    Embedder(embedder.trained, device="cpu")
    torch.full((10_000_000,), float("nan"), device="cuda")
    assert torch.equal(embedder.forward(pixels), expected)


@needs_card
def test_a_recording_goes_with_its_embedder(on_card):
    on_card().record()  # what the libraries keep for themselves
    gc.collect()
    torch.cuda.empty_cache()
    before, reserved = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    embedder = on_card()
    embedder.record()
    assert torch.cuda.memory_allocated() > before
    del embedder
    gc.collect()
    torch.cuda.empty_cache()
    assert torch.cuda.memory_allocated() <= before + 2**20
    assert torch.cuda.memory_reserved() <= reserved + 2**21


@needs_card
def test_what_cannot_be_recorded_runs_as_it_is(on_card):
    class Reads(nn.Module):
        def forward(self, rows):
            return rows.float().flatten(1)[:, :4] * float(rows.max())

    embedder = on_card()
    reads = Reads()
    rows = torch.ones(8, 3, 64, 64, dtype=torch.uint8, device="cuda")
    assert record(reads, rows, keep=reads) is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    embedder.record()
    assert embedder._recorded is not None
    assert torch.isfinite(embedder.forward(rows)).all()


@needs_card
def test_a_capture_that_breaks_off_leaves_the_card_usable(on_card):
    def refused(rows):
        if torch.cuda.is_current_stream_capturing():
            torch.cuda.synchronize()
        return rows.float()

    rows = torch.ones(8, 4, device="cuda")
    assert record(refused, rows, keep=nn.Identity()) is None
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    torch.cuda.empty_cache()  # fails while torch believes that a recording is on
    embedder = on_card()
    embedder.record()
    assert torch.isfinite(embedder.forward(torch.zeros(8, 3, 64, 64, dtype=torch.uint8))).all()
