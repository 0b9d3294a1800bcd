"""JPEG files for the card's decoder, on a CPU: which files go there, and that the crops are those of Pillow."""

import io
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from PIL import Image

from proxy_anchor.data.augment import CentralCrop
from proxy_anchor.data.images import InputImages, collate_readable
from proxy_anchor.data.resample import resample
from proxy_anchor.errors import UsageError
from proxy_anchor.inference.jpeg import CardDecoder, EncodedImages, plain_size

CPU = torch.device("cpu")
CROP = CentralCrop(32, 40)


def picture(height, width, mode="RGB", seed=0):
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC).convert(mode)


def jpeg(image, **options):
    stream = io.BytesIO()
    image.save(stream, "JPEG", **options)
    return stream.getvalue()


@pytest.mark.parametrize(
    "options", [{}, {"progressive": True}, {"quality": 30}, {"subsampling": 0}, {"optimize": True}]
)
@pytest.mark.parametrize("mode", ["RGB", "L"])
def test_size_of_plain_files(mode, options):
    assert plain_size(jpeg(picture(37, 53, mode), **options)) == (37, 53)


def test_size_with_metadata_and_fill_bytes():
    content = jpeg(picture(37, 53), exif=b"Exif\0\0" + 2000 * b"x", comment=b"a comment", icc_profile=3000 * b"p")
    assert plain_size(content) == (37, 53)
    assert plain_size(content[:2] + b"\xff\xff" + content[2:]) == (37, 53)


def test_what_a_decoder_could_misunderstand_is_not_plain():
    whole = jpeg(picture(37, 53))
    others = {
        "cmyk": jpeg(picture(37, 53, "CMYK")),  # with Adobe's marker
        "adobe": whole[:2] + b"\xff\xee\x00\x0eAdobe\0d\0\0\0\0\0" + whole[2:],
        "png": b"\x89PNG\r\n\x1a\n" + whole,
        "truncated": whole[: len(whole) // 2],
        "header only": whole[:8],
        "empty": b"",
        "text": b"<html>",
        "12 bits": whole.replace(b"\xff\xc0\x00\x11\x08", b"\xff\xc0\x00\x11\x0c"),
        "lossless": whole.replace(b"\xff\xc0\x00\x11", b"\xff\xc3\x00\x11"),
        "no frame": b"\xff\xd8" + b"\xff\xd9",
        "rubbish after the start": b"\xff\xd8" + 100 * b"z" + b"\xff\xd9",
    }
    assert {name: plain_size(content) for name, content in others.items()} == dict.fromkeys(others)


@pytest.fixture
def folder(tmp_path):
    """Files in the order of their names: a of every kind, some of which a decoder refuses."""
    sizes = [(60, 90), (90, 60), (70, 70), (300, 41), (33, 200), (64, 64)]
    for i, size in enumerate(sizes):
        (tmp_path / f"{i}.jpg").write_bytes(jpeg(picture(*size, seed=i), quality=95))
    (tmp_path / "6.jpg").write_bytes(jpeg(picture(50, 80, "L", seed=6)))
    (tmp_path / "7.jpg").write_bytes(jpeg(picture(50, 80, "CMYK", seed=7)))
    picture(45, 67, seed=8).save(tmp_path / "8.png")
    (tmp_path / "9.jpg").write_bytes(jpeg(picture(50, 80))[:900])
    return [*(tmp_path / f"{i}.jpg" for i in range(8)), tmp_path / "8.png", tmp_path / "9.jpg", tmp_path / "absent.jpg"]


def decoded(images, batches=1, side=0):
    dataset = InputImages(images, CROP, thumbnail_side=side)
    encoded = EncodedImages(dataset)
    decoder = CardDecoder(dataset, CROP, CPU)
    found = {}
    for rows in np.array_split(np.arange(len(images)), batches):
        places, take, thumbnails, skipped = decoder(encoded.read(rows.tolist()))
        found |= {row: (pixels, small) for row, pixels, small in zip(places, take(), thumbnails, strict=True)}
        found |= dict(skipped)
    return found


@pytest.mark.parametrize("batches", [1, 3])
def test_crops_are_those_of_pillow(folder, batches):
    found = decoded(folder, batches=batches)
    dataset = InputImages(folder, CROP)
    rows, pixels, _, skipped = collate_readable([dataset[row] for row in range(len(folder))])
    assert sorted(found) == list(range(len(folder)))
    assert {row: found[row] for row, _ in skipped} == dict(skipped)
    assert [row for row, _ in skipped] == [9, 10]
    for row, expected in zip(rows, pixels, strict=True):
        assert (found[row][0].int() - expected.int()).abs().max() <= 1, row


def test_bytes_and_arrays_go_the_same_way(folder):
    inputs = [folder[0].read_bytes(), np.asarray(picture(45, 67, seed=8))]
    found = decoded(inputs)
    for image, row in ((folder[0], 0), (folder[8], 1)):
        assert (found[row][0].int() - decoded([image])[0][0].int()).abs().max() <= 1


def test_a_file_that_the_decoder_refuses_is_judged_by_pillow_and_costs_no_other(folder, tmp_path, monkeypatch):
    damaged = bytearray(folder[0].read_bytes())
    start = damaged.index(b"\xff\xda")
    damaged[start + 2 : start + 4] = b"\x00\x01"  # a scan's header that is too short: its beginning and end look whole
    (tmp_path / "damaged.jpg").write_bytes(damaged)
    assert plain_size(bytes(damaged)) == (60, 90)
    found = decoded([folder[1], tmp_path / "damaged.jpg", folder[2]])
    assert isinstance(found[1], str)
    assert "damaged.jpg" in found[1]
    for row, path in ((0, folder[1]), (2, folder[2])):
        assert (found[row][0].int() - decoded([path])[0][0].int()).abs().max() <= 1


def test_threads_read_what_one_reads(folder):
    inputs = [*folder, folder[8].read_bytes(), folder[0].read_bytes(), b"nothing"]
    encoded = EncodedImages(InputImages(inputs, CROP))
    alone = [encoded.read([row]) for row in range(len(inputs))]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(encoded.read, [[row] for row in range(len(inputs))]))
    for one, other in zip(alone, together, strict=True):
        assert (one.rows, one.sizes, one.others[0], one.others[3]) == (
            other.rows,
            other.sizes,
            other.others[0],
            other.others[3],
        )
        assert all(torch.equal(a, b) for a, b in zip(one.files, other.files, strict=True))
    assert alone[0].files[0].numpy().tobytes() == folder[0].read_bytes()


def test_only_so_many_pixels_are_decoded_at_once(folder, monkeypatch):
    together = decoded(folder)
    monkeypatch.setattr("proxy_anchor.inference.jpeg._PIXELS_AT_ONCE", 13000)
    apart = decoded(folder)
    assert together.keys() == apart.keys()
    for row in range(9):
        assert torch.equal(together[row][0], apart[row][0])


def test_a_header_that_claims_too_many_pixels_is_left_to_pillow(folder, tmp_path):
    content = bytearray(folder[0].read_bytes())
    place = content.index(b"\xff\xc0")
    content[place + 5 : place + 9] = b"\xff\xff\xff\xff"
    (tmp_path / "bomb.jpg").write_bytes(content)
    assert plain_size(bytes(content)) == (65535, 65535)
    images = InputImages([tmp_path / "bomb.jpg"], CROP)
    batch = EncodedImages(images).read([0])
    assert batch.files == []
    assert batch.others[3] == [(0, images[0][3])]
    assert "bomb.jpg" in images[0][3]


def test_thumbnails_keep_the_shape(folder):
    found = decoded(folder, side=24)
    with Image.open(io.BytesIO(found[0][1])) as small:
        assert small.size == (24, 16)
    with Image.open(io.BytesIO(found[3][1])) as small:
        assert small.size == (3, 24)


def test_an_empty_batch_and_a_batch_of_unreadable_files(folder):
    assert list(decoded([folder[9]])) == [0]
    assert isinstance(decoded([folder[9]])[0], str)


def test_a_build_without_the_decoder_is_one_line(monkeypatch, folder):
    def absent(*arguments, **named):
        raise RuntimeError("decode_jpegs_cuda: torchvision not compiled with nvJPEG support\nand more")

    monkeypatch.setattr("torchvision.io.decode_jpeg", absent)
    with pytest.raises(UsageError, match=r"embed\.decode=gpu: .* not compiled with nvJPEG support\): use cpu"):
        decoded(folder)


def test_pictures_from_bytes_are_opened_one_at_a_time_by_readers_and_decoder(folder):
    """Each changes the process's rules for warnings meanwhile, and two at once would leave them changed."""
    running, most = [], []

    class Slow(InputImages):
        def __getitem__(self, row):
            running.append(row)
            most.append(len(running))
            time.sleep(0.02)
            running.remove(row)
            return super().__getitem__(row)

    damaged = folder[0].read_bytes()[:200] + b"\xff\xd9"
    images = Slow([damaged, b"nothing", b"nothing either"], CROP)
    encoded, decoder = EncodedImages(images), CardDecoder(images, CROP, CPU)
    batch = encoded.read([0])
    assert batch.rows == [0]  # the decoder finds out
    with ThreadPoolExecutor(3) as pool:
        refused = pool.submit(decoder, batch)
        for each in [pool.submit(encoded.read, [row]) for row in (1, 2)]:
            each.result()
    assert [row for row, _ in refused.result()[3]] == [0]
    assert max(most) == 1


def test_a_decoder_is_closed_when_what_it_read_has_been_cropped():
    decoder, waited = CardDecoder(InputImages([], CROP), CROP, CPU), []

    class Event:
        def query(self):
            return False

        def synchronize(self):
            waited.append(self)

    decoder._in_use.extend((Event(), [torch.zeros(1)]) for _ in range(2))
    decoder.close()
    assert len(waited) == 2
    assert not decoder._in_use


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs an NVIDIA card")
@pytest.mark.parametrize("with_triton", [True, False])
def test_the_cards_decoder_writes_into_no_memory_that_is_still_read(tmp_path, monkeypatch, with_triton):
    """Crops are queued behind 20 ms of idling, so that the next files are decoded before those of the batch are cropped."""
    if not with_triton:
        monkeypatch.setattr("proxy_anchor.data.resample._kernel", lambda: None)
    card = torch.device("cuda")
    for number in range(64):
        (tmp_path / f"{number}.jpg").write_bytes(jpeg(picture(300, 400, seed=number)))
    paths = [tmp_path / f"{number}.jpg" for number in range(64)]
    batches = [range(start, start + 8) for start in range(0, 64, 8)]
    dataset = InputImages(paths, CROP)
    encoded, decoder = EncodedImages(dataset), CardDecoder(dataset, CROP, card)

    def crops():
        found = [decoder(encoded.read(rows)) for rows in batches]
        return torch.cat([take().cpu() for _, take, _, _ in found])

    expected = crops()

    def late(*arguments):
        torch.cuda._sleep(40_000_000)
        return resample(*arguments)

    monkeypatch.setattr("proxy_anchor.inference.jpeg.resample", late)
    assert torch.equal(crops(), expected)
    assert torch.equal(crops(), expected)
