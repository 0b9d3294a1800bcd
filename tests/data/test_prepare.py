"""From archives to a data set: served from localhost, broken off, resumed, damaged, hostile."""

import hashlib
import http.server
import io
import multiprocessing
import os
import re
import signal
import stat
import tarfile
import threading
import zipfile
from pathlib import Path

import lookalikes as look
import numpy as np
import pytest
from commands import run_entry, run_ok

from proxy_anchor.data import prepare as module
from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.benchmarks.cub import load_cub
from proxy_anchor.data.benchmarks.inshop import load_inshop
from proxy_anchor.data.benchmarks.sop import load_sop
from proxy_anchor.data.folder import load_folder
from proxy_anchor.data.prepare import prepare
from proxy_anchor.errors import UsageError


class Server(http.server.ThreadingHTTPServer):
    """Serves `files`; `cuts` are the numbers of bytes after which the next answers break off."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.files: dict[str, bytes] = {}
        self.cuts: list[int] = []
        self.ranges = True
        self.validator = "ETag"
        self.seen: list[str] = []  # Range header of each request, or ""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        server = self.server
        server.seen.append(self.headers.get("Range", ""))
        name = self.path.partition("?")[0]
        if name == "/moved.tgz":
            self.send_response(302)
            self.send_header("Location", "/CUB_200_2011.tgz")
            self.end_headers()
            return
        if name not in server.files:
            self.send_error(404)
            return
        content, start = server.files[name], 0
        tag = {"ETag": f'"{hashlib.md5(content).hexdigest()}"', "Last-Modified": "Tue, 01 Jan 2019 00:00:00 GMT"}
        asked = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        same = self.headers.get("If-Range") == tag.get(server.validator)
        if asked and server.ranges and same:
            start = int(asked[1])
            if start >= len(content):
                self.send_error(416)
                return
            self.send_response(206)
            self.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            self.send_response(200)
        if server.validator:
            self.send_header(server.validator, tag[server.validator])
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        body = content[start:]
        self.wfile.write(body[: server.cuts.pop(0)] if server.cuts else body)

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def server():
    with Server() as served:
        thread = threading.Thread(target=served.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield served
        served.shutdown()
        thread.join()


def pack_tar(source: Path, *, mode: str = "w:gz", only: str = "") -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode=mode) as tar:
        tar.add(source / only, arcname=only or ".")
    return stream.getvalue()


def pack_zip(source: Path, *, only: str = "") -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
        for path in sorted((source / only).rglob("*")):
            if path.is_file():
                packed.write(path, path.relative_to(source))
    return stream.getvalue()


def partial(load):
    return lambda root: load(root, allow_partial=True)


def make(root, *archives, load=load_cub, **named):
    return prepare(root, [str(each) for each in archives], load=partial(load), progress=False, **named)


def refused(root, *archives, **named) -> str:
    before = sorted(path.name for path in root.iterdir()) if root.exists() else None
    with pytest.raises(UsageError) as caught:
        make(root, *archives, **named)
    assert "\n" not in str(caught.value)
    # Nothing looks whole, nothing half-unpacked stays.
    assert (sorted(path.name for path in root.iterdir()) if root.exists() else None) == before
    assert not root.with_name(f".{root.name}.unpacking").exists()
    return str(caught.value)


@pytest.fixture
def cub(tmp_path_factory):
    return look.make_cub(tmp_path_factory.mktemp("source"))


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data" / "set"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
def test_every_kind_of_archive(mode, cub, root, tmp_path):
    archive = tmp_path / "birds.archive"
    archive.write_bytes(pack_zip(cub) if mode == "zip" else pack_tar(cub, mode=mode))
    splits = make(root, archive)
    assert len(splits.train) == 12
    assert splits.train.paths[0].is_relative_to(root)
    expected = {name for name in names(cub) if not any(part.startswith((".", "__M")) for part in name.split("/"))}
    assert names(root) == expected  # twins, .DS_Store and __MACOSX are left out
    assert (root / "CUB_200_2011" / "images.txt").read_bytes() == (cub / "CUB_200_2011" / "images.txt").read_bytes()
    assert archive.is_file()
    assert [path.name for path in root.parent.iterdir()] == ["set"]


def test_cars_in_two_archives_and_single_files(tmp_path, root):
    source = look.make_cars_two_folders(tmp_path / "source")
    for part in ("cars_train", "cars_test", "devkit"):
        (tmp_path / f"{part}_.tgz").write_bytes(pack_tar(source, only=part))
    archives = [tmp_path / f"{part}_.tgz" for part in ("cars_train", "cars_test", "devkit")]
    message = refused(root, *archives, load=load_cars)
    assert "holds no classes" in message
    assert "unpacking" not in message
    labels = source / "cars_test_annos_withlabels.mat"
    splits = make(root, *archives, labels, load=load_cars, verify_checksum=False)
    assert (len(splits.train), len(splits.query)) == (12, 10)


def test_inshop_and_sop_zips(tmp_path, root):
    source = look.make_inshop(tmp_path / "inshop")
    (tmp_path / "img.zip").write_bytes(pack_zip(source, only="img"))
    splits = make(root, tmp_path / "img.zip", source / "Eval" / "list_eval_partition.txt", load=load_inshop)
    assert len(splits.gallery) == 5
    (tmp_path / "sop.zip").write_bytes(pack_zip(look.make_sop(tmp_path / "sop")))
    assert len(make(root.with_name("sop"), tmp_path / "sop.zip", load=load_sop).query) == 10


def test_ones_own_folder(tmp_path, root):
    (tmp_path / "mine.zip").write_bytes(pack_zip(look.make_folder(tmp_path / "mine")))
    splits = prepare(root, [str(tmp_path / "mine.zip")], load=load_folder, progress=False)
    assert splits.train.num_classes + splits.query.num_classes == 4


# Fetching


def test_fetched_and_a_second_run_does_nothing(server, cub, root, capsys):
    server.files["/a/CUB.tgz"] = pack_tar(cub)
    make(root, f"{server.url}/a/CUB.tgz?download=1")
    assert [path.name for path in root.parent.iterdir()] == ["set"]  # what was fetched is not needed any more
    stamp = root.stat().st_mtime_ns
    assert len(make(root, f"{server.url}/a/CUB.tgz?download=1").train) == 12
    assert "is already complete" in capsys.readouterr().out
    assert len(server.seen) == 1
    assert root.stat().st_mtime_ns == stamp


@pytest.mark.parametrize("validator", ["ETag", "Last-Modified"])
def test_a_connection_that_breaks_is_continued_at_once(server, cub, root, validator):
    content = server.files["/CUB.tgz"] = pack_tar(cub)
    server.validator = validator
    server.cuts = [1000, 1500, 0]
    assert len(make(root, f"{server.url}/CUB.tgz").train) == 12
    assert server.seen == ["", "bytes=1000-", "bytes=2500-", "bytes=2500-"]
    assert len(content) > 2500


def test_the_next_run_continues(server, cub, root):
    server.files["/CUB.tgz"] = pack_tar(cub)
    server.cuts = [3000] + [0] * module.CONNECTIONS
    message = refused(root, f"{server.url}/CUB.tgz")
    assert "the connection ended after 3,000 of" in message
    assert "Run the same command again to continue" in message
    server.seen.clear()
    assert len(make(root, f"{server.url}/CUB.tgz").train) == 12
    assert server.seen == ["bytes=3000-"]


def test_a_changed_file_is_not_glued_to_the_old_one(server, cub, root):
    server.files["/CUB.tgz"] = b"x" * 5000
    server.cuts = [3000] + [0] * module.CONNECTIONS
    refused(root, f"{server.url}/CUB.tgz")
    server.files["/CUB.tgz"] = pack_tar(cub)
    assert len(make(root, f"{server.url}/CUB.tgz").train) == 12


@pytest.mark.parametrize("change", ["ranges", "validator"])
def test_a_server_that_cannot_continue_is_begun_anew(server, cub, root, change):
    server.files["/CUB.tgz"] = pack_tar(cub)
    setattr(server, change, False if change == "ranges" else "")
    server.cuts = [3000]
    assert len(make(root, f"{server.url}/CUB.tgz").train) == 12
    assert len(server.seen) == 2


def test_more_bytes_here_than_there(server, cub, root):
    server.files["/CUB.tgz"] = pack_tar(cub)
    server.cuts = [len(server.files["/CUB.tgz"]) - 1] + [0] * module.CONNECTIONS
    refused(root, f"{server.url}/CUB.tgz")
    [part] = root.parent.rglob("*.part")
    part.write_bytes(part.read_bytes() + b"more")
    assert len(make(root, f"{server.url}/CUB.tgz").train) == 12


def test_two_files_of_one_name(server, tmp_path, root):
    source = look.make_inshop(tmp_path / "inshop")
    server.files["/1/download"] = pack_zip(source, only="img")
    server.files["/2/download"] = pack_zip(source, only="Eval")
    assert len(make(root, f"{server.url}/1/download", f"{server.url}/2/download", load=load_inshop).train) == 12


def test_network_errors_are_one_line(server, root):
    assert "cannot be fetched (404 Not Found): check the address" in refused(root, f"{server.url}/no.tgz")
    assert "Connection refused" in refused(root, "http://127.0.0.1:1/x.tgz")
    assert "cannot be fetched" in refused(root, "http://no.such.host.invalid/x.tgz")
    assert "ftp is not supported" in refused(root, "ftp://host/x.tgz")
    assert "no such file" in refused(root, root.with_name("x.tgz"))
    assert "names no archive" in refused(root)
    server.files["/page"] = b"<!DOCTYPE html><title>Sign in</title>"
    assert "it is a web page" in refused(root, f"{server.url}/page")
    assert not list(root.parent.rglob("page"))  # or the next run would meet it again


# Verifying


def test_a_published_checksum_is_compared(server, cub, root, monkeypatch):
    content = server.files["/CUB_200_2011.tgz"] = pack_tar(cub)
    url = f"{server.url}/CUB_200_2011.tgz"
    message = refused(root, url)
    assert f"expected MD5 97eceeb196236b17998738112f37df78, found {hashlib.md5(content).hexdigest()}" in message
    assert not list(root.parent.rglob("*.tgz"))  # or the next run would stumble over it again
    assert len(make(root, url, verify_checksum=False).train) == 12
    monkeypatch.setitem(module.PUBLISHED_MD5, "CUB_200_2011.tgz", hashlib.md5(content).hexdigest())
    assert len(make(root.with_name("b"), url).train) == 12


def test_published_checksums_look_like_md5():
    assert all(re.fullmatch("[0-9a-f]{32}", each) for each in module.PUBLISHED_MD5.values())
    assert len(set(module.PUBLISHED_MD5.values())) == len(module.PUBLISHED_MD5)


def test_counts_are_verified_always(tmp_path, cub, root):
    archive = tmp_path / "birds.tgz"
    archive.write_bytes(pack_tar(cub))
    with pytest.raises(UsageError, match=r"expected 5,864 training images .* found 12"):
        prepare(root, [str(archive)], load=load_cub, progress=False)
    assert not root.exists()


def test_a_folder_that_holds_something_else_is_left_alone(cub, root, tmp_path):
    archive = tmp_path / "birds.tgz"
    archive.write_bytes(pack_tar(cub))
    root.mkdir(parents=True)
    (root / "thesis.tex").write_text("years of work")
    message = refused(root, archive)
    assert f"{root} is not empty and is not the whole data set" in message
    assert (root / "thesis.tex").read_text() == "years of work"
    (root / "thesis.tex").unlink()
    assert len(make(root, archive).train) == 12  # an empty folder is no obstacle


def test_what_a_killed_run_left_is_cleared(cub, root, tmp_path):
    archive = tmp_path / "birds.tgz"
    archive.write_bytes(pack_tar(cub))
    left = root.with_name(".set.unpacking")
    left.mkdir(parents=True)
    (left / "half.jpg").write_bytes(b"x")
    make(root, archive)
    assert not left.exists()
    assert "half.jpg" not in names(root)


def test_killed_while_unpacking_leaves_nothing_under_the_name(cub, root, tmp_path, monkeypatch):
    archive = tmp_path / "birds.tgz"
    archive.write_bytes(pack_tar(cub))
    calls = []

    def die(*arguments):
        calls.append(arguments)
        assert not root.exists()
        if len(calls) == 10:
            raise KeyboardInterrupt
        return original(*arguments)

    original = module._target
    monkeypatch.setattr(module, "_target", die)
    with pytest.raises(KeyboardInterrupt):
        make(root, archive)
    assert not root.exists()
    monkeypatch.undo()
    assert len(make(root, archive).train) == 12


@pytest.mark.skipif("fork" not in multiprocessing.get_all_start_methods(), reason="needs fork")
@pytest.mark.parametrize("moment", [1, 10, 25])
def test_sigkill_while_unpacking_and_again(moment, cub, root, tmp_path, monkeypatch):
    archive = tmp_path / "birds.tgz"
    archive.write_bytes(pack_tar(cub))
    original, calls = module._target, []

    def die(*arguments):
        calls.append(arguments)
        if len(calls) == moment:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*arguments)

    monkeypatch.setattr(module, "_target", die)
    child = multiprocessing.get_context("fork").Process(target=make, args=(root, archive))
    child.start()
    child.join()
    monkeypatch.undo()
    assert child.exitcode == -signal.SIGKILL
    assert not root.exists()
    assert root.with_name(".set.unpacking").is_dir()
    assert len(make(root, archive).train) == 12
    assert [path.name for path in root.parent.iterdir()] == ["set"]


# Damaged and hostile archives


@pytest.mark.parametrize("mode", ["w", "w:gz", "w:bz2", "w:xz", "zip"])
@pytest.mark.parametrize("share", [0.3, 0.9, 0.999])
def test_truncated_archives(mode, share, cub, root, tmp_path):
    content = pack_zip(cub) if mode == "zip" else pack_tar(cub, mode=mode).rstrip(b"\0" if mode == "w" else b"")
    archive = tmp_path / "birds.archive"
    archive.write_bytes(content[: int(len(content) * share)])
    message = refused(root, archive)
    assert "is damaged or cut off" in message or "does not hold" in message


def test_a_flipped_byte_is_noticed(cub, root, tmp_path):
    for content in (pack_tar(cub), pack_zip(cub)):
        archive = tmp_path / "birds.archive"
        broken = bytearray(content)
        broken[len(broken) // 2] ^= 0x55
        archive.write_bytes(broken)
        assert "is damaged or cut off" in refused(root, archive)
    broken = bytearray(pack_tar(cub))
    broken[-6] ^= 0x55  # the checksum at the end of a gz file
    archive.write_bytes(broken)
    assert "is damaged or cut off" in refused(root, archive)


@pytest.mark.parametrize("content", [b"", b"text", b"PK\x03\x04", b"\x1f\x8b", b"<html></html>", bytes(2000)])
def test_what_is_no_archive(content, root, tmp_path):
    (tmp_path / "x.tgz").write_bytes(content)
    message = refused(root, tmp_path / "x.tgz")
    assert "is no archive" in message or "is damaged or cut off" in message


def tar_of(*members: tuple[str, bytes | None, dict]) -> bytes:
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as tar:
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for field, value in fields.items():
                setattr(info, field, value)
            tar.addfile(info, io.BytesIO(content or b""))
    return stream.getvalue()


def zip_of(*members: tuple[str, bytes, int]) -> bytes:
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w") as packed:
        for name, content, mode in members:
            info = zipfile.ZipInfo("x")
            info.filename = name
            info.create_system = 3
            info.external_attr = mode << 16
            packed.writestr(info, content)
    return stream.getvalue()


ESCAPES = [
    "../evil",
    "a/../../evil",
    "a/../b",
    "/tmp/proxy_anchor_evil",
    "..\\evil",
    "C:\\evil",
    "C:/evil",
    "..",
    "./../evil",
]


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_names_that_lead_out_are_refused(kind, name, root, tmp_path):
    content = tar_of((name, b"evil", {})) if kind == "tar" else zip_of((name, b"evil", stat.S_IFREG | 0o644))
    (tmp_path / "x").write_bytes(content)
    assert "reaches out of its folder" in refused(root, tmp_path / "x")
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/proxy_anchor_evil").exists()


@pytest.mark.parametrize("target", ["/tmp", "../..", "a/../../..", "..\\..", "C:\\"])
@pytest.mark.parametrize("kind", ["symlink", "hard link", "zip"])
def test_links_that_lead_out_are_refused(kind, target, root, tmp_path):
    if kind == "zip":
        content = zip_of(("a", target.encode(), stat.S_IFLNK | 0o777), ("a/evil", b"evil", stat.S_IFREG | 0o644))
    else:
        link = {"type": tarfile.SYMTYPE if kind == "symlink" else tarfile.LNKTYPE, "linkname": target}
        content = tar_of(("a", None, link), ("a/evil", b"evil", {}))
    (tmp_path / "x").write_bytes(content)
    assert "reaches out of its folder" in refused(root, tmp_path / "x")
    assert not list(tmp_path.rglob("*evil*"))


def test_links_inside_are_never_made(cub, root, tmp_path):
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w:gz") as tar:
        tar.add(cub, arcname=".")
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            info = tarfile.TarInfo(f"link{kind.decode()}")
            info.type, info.linkname = kind, "CUB_200_2011/images.txt"
            tar.addfile(info)
    (tmp_path / "x").write_bytes(content.getvalue())
    make(root, tmp_path / "x")
    assert not any(path.is_symlink() or path.name.startswith("link") for path in root.rglob("*"))


@pytest.mark.parametrize("kind", [tarfile.CHRTYPE, tarfile.BLKTYPE, tarfile.FIFOTYPE])
def test_devices_are_refused(kind, root, tmp_path):
    (tmp_path / "x").write_bytes(tar_of(("dev", None, {"type": kind})))
    assert "a device or pipe ('dev')" in refused(root, tmp_path / "x")


def test_no_mode_bits_are_taken_over(cub, root, tmp_path):
    script = cub / "CUB_200_2011" / "run.sh"
    script.write_text("x")
    script.chmod(0o4777)
    (tmp_path / "x").write_bytes(pack_tar(cub))
    make(root, tmp_path / "x")
    assert not (root / "CUB_200_2011" / "run.sh").stat().st_mode & 0o7111


@pytest.mark.parametrize("kind", ["tar", "zip"])
def test_bombs_stop_early(kind, root, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "FREE_GROWTH_BYTES", 3 * 2**20)
    zeros = bytes(10 * 2**20)
    if kind == "tar":
        content = tar_of(("bomb", zeros, {}))
    else:
        stream = io.BytesIO()
        with zipfile.ZipFile(stream, "w", zipfile.ZIP_DEFLATED) as packed:
            packed.writestr("bomb", zeros)
        content = stream.getvalue()
    (tmp_path / "x").write_bytes(content)
    assert "grows to more than 3,145,728 bytes" in refused(root, tmp_path / "x")


@pytest.mark.parametrize("kind", [tarfile.XHDTYPE, tarfile.GNUTYPE_LONGNAME])
def test_a_header_that_would_fill_the_memory_is_refused(kind, root, tmp_path):
    (tmp_path / "x").write_bytes(tar_of(("a", bytes(17 * 2**20), {"type": kind})))
    assert "a header of" in refused(root, tmp_path / "x")


def test_too_many_files_are_refused(root, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILES", 3)
    (tmp_path / "x").write_bytes(tar_of(*((f"{number}", b"", {}) for number in range(5))))
    assert "holds more than 3 files" in refused(root, tmp_path / "x")


def test_encrypted_zip_is_one_line(root, tmp_path):
    content = bytearray(zip_of(("img/a.jpg", b"x", 0)))
    for signature, offset in ((b"PK\x03\x04", 6), (b"PK\x01\x02", 8)):  # set the flag in both headers
        content[content.index(signature) + offset] |= 1
    (tmp_path / "img_highres.zip").write_bytes(content)
    message = refused(root, tmp_path / "img_highres.zip", load=load_inshop)
    assert "img_highres.zip is encrypted" in message
    assert "img.zip is not" in message


def test_a_name_that_no_file_can_have(root, tmp_path):
    content = tar_of(("a", b"x", {"pax_headers": {"path": "a\0b"}}))
    (tmp_path / "x").write_bytes(content)
    assert "cannot be unpacked" in refused(root, tmp_path / "x")


def test_random_damage_is_one_line_and_stays_inside(cub, root, tmp_path):
    random = np.random.default_rng(0)
    contents = [pack_tar(cub, mode=mode, only="CUB_200_2011/images.txt") for mode in ("w", "w:gz", "w:bz2", "w:xz")]
    contents += [zip_of(("a/b", bytes(300), 0), ("c", b"x" * 300, 0))] * 2
    folder = tmp_path / "in" / "out"
    folder.mkdir(parents=True)
    refusals = []
    for _ in range(600):
        broken = bytearray(contents[random.integers(len(contents))])
        for position in random.integers(0, len(broken), random.integers(1, 10)):
            broken[position] = random.integers(256)
        (tmp_path / "x").write_bytes(broken)
        try:
            module._unpack(tmp_path / "x", folder, progress=False)
        except UsageError as error:
            refusals.append(str(error))
    assert len(refusals) > 200
    assert not any("\n" in message for message in refusals)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "x"}
    assert [path.name for path in folder.parent.iterdir()] == ["out"]


def test_a_file_where_a_folder_is_needed(root, tmp_path):
    (tmp_path / "x").write_bytes(tar_of(("a", b"x", {}), ("a/b", b"x", {})))
    assert "has a file and a folder of one name" in refused(root, tmp_path / "x")


def test_a_full_disk_is_one_line(cub, root, tmp_path, monkeypatch):
    (tmp_path / "x").write_bytes(pack_tar(cub))

    def full(*arguments):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(module, "_target", full)
    assert "cannot be prepared (No space left on device)" in refused(root, tmp_path / "x")


# The command


def test_the_command_end_to_end(server, cub, tmp_path):
    server.files["/birds.tgz"] = pack_tar(cub)
    arguments = ["dataset=cub", "dataset.root=cub", "dataset.allow_partial=true", f"archive={server.url}/birds.tgz"]
    output = run_ok("prepare.py", *arguments, cwd=tmp_path)
    assert "data: cub, 12 train images of 4 classes" in output
    assert f"ready: {tmp_path / 'cub'}" in output
    assert [path.name for path in tmp_path.iterdir()] == ["cub"]
    assert "is already complete: nothing to do" in run_ok("prepare.py", *arguments, cwd=tmp_path)
    assert len(server.seen) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ("archive=x", "dataset is needed: add dataset=NAME, one of: cars, cub"),
        ("dataset=cub archive=http://h/x?a=b", "two kinds of quotes"),
        ("dataset=glyphs archive=x", "comes in no archive"),
        ("dataset=cub", "archive is needed: add archive=..."),
    ],
)
def test_bad_commands_are_one_line(arguments, text, tmp_path):
    done = run_entry("prepare.py", *arguments.split(), cwd=tmp_path)
    assert done.returncode == 2
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert tmp_path.is_dir()  # an empty working directory is not taken for a run folder
    assert list(tmp_path.iterdir()) == []
