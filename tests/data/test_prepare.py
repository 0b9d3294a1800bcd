"""From archives to a data set: served from localhost, broken off, damaged, hostile."""

import functools
import hashlib
import http.server
import multiprocessing
import os
import re
import shutil
import signal
import stat
import tarfile
import threading
import zipfile
from pathlib import Path
from typing import ClassVar

import commands
import lookalikes as look
import pytest

from proxy_anchor.data import prepare as module
from proxy_anchor.data.benchmarks.cars import load_cars
from proxy_anchor.data.benchmarks.cub import load_cub
from proxy_anchor.data.prepare import prepare


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serves a folder; `cuts` are the numbers of bytes after which the next answers break off."""

    cuts: ClassVar[list[int]] = []
    seen: ClassVar[list[str]] = []  # path of each request

    def do_GET(self) -> None:
        self.seen.append(self.path)
        super().do_GET()

    def copyfile(self, source, outputfile) -> None:
        outputfile.write(source.read(self.cuts.pop(0) if self.cuts else -1))

    def log_message(self, *arguments) -> None:
        pass


@pytest.fixture
def url(tmp_path):
    """The address of the folder tmp_path / "served"."""
    Handler.cuts.clear()
    Handler.seen.clear()
    (tmp_path / "served").mkdir()
    handler = functools.partial(Handler, directory=tmp_path / "served")
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


def pack(source: Path, file: Path, form: str = "gztar", only: str = ".") -> Path:
    """Pack a folder, or one folder `only` of it, into a file of any name."""
    file.parent.mkdir(parents=True, exist_ok=True)
    return Path(shutil.make_archive(str(file.parent / "packed"), form, source, only)).rename(file)


def partial(load):
    return lambda root: load(root, allow_partial=True)


def make(root, *archives, load=load_cub, **named):
    return prepare(root, [str(each) for each in archives], load=partial(load), **named)


def refused(root, *archives, **named) -> str:
    before = sorted(path.name for path in root.iterdir()) if root.exists() else None
    line = commands.one_line(make, root, *archives, **named)
    # Nothing looks whole, nothing half-unpacked stays.
    assert (sorted(path.name for path in root.iterdir()) if root.exists() else None) == before
    assert not root.with_name(f".{root.name}.unpacking").exists()
    return line


@pytest.fixture
def cub(tmp_path_factory):
    return look.make_cub(tmp_path_factory.mktemp("source"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """No waiting before a connection is tried again."""
    monkeypatch.setattr("pooch.core.time.sleep", lambda _: None)


@pytest.fixture
def root(tmp_path):
    return tmp_path / "data" / "set"


def names(folder: Path) -> set[str]:
    return {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.parametrize("form", ["tar", "gztar", "bztar", "xztar", "zip"])
def test_every_kind_of_archive(form, cub, root, tmp_path):
    archive = pack(cub, tmp_path / "birds.archive", form)
    splits = make(root, archive)
    assert len(splits.train) == 12
    assert splits.train.paths[0].is_relative_to(root)
    assert names(root) == names(cub)
    assert (root / "CUB_200_2011" / "images.txt").read_bytes() == (cub / "CUB_200_2011" / "images.txt").read_bytes()
    assert archive.is_file()
    assert [path.name for path in root.parent.iterdir()] == ["set"]


def test_cars_in_two_archives_and_single_files(tmp_path, root):
    source = look.make_cars_two_folders(tmp_path / "source")
    parts = ("cars_train", "cars_test", "devkit")
    archives = [pack(source, tmp_path / f"{part}_.tgz", only=part) for part in parts]
    message = refused(root, *archives, load=load_cars)
    assert "holds no classes" in message
    assert "unpacking" not in message
    labels = source / "cars_test_annos_withlabels.mat"
    splits = make(root, *archives, labels, load=load_cars, verify_checksum=False)
    assert (len(splits.train), len(splits.query)) == (12, 10)


# Fetching


def test_fetched_and_a_second_run_does_nothing(url, cub, root, tmp_path, capsys):
    pack(cub, tmp_path / "served/a/CUB.tgz")
    make(root, f"{url}/a/CUB.tgz?download=1")
    assert [path.name for path in root.parent.iterdir()] == ["set"]  # what was fetched is not needed any more
    stamp = root.stat().st_mtime_ns
    assert len(make(root, f"{url}/a/CUB.tgz?download=1").train) == 12
    assert "is already complete" in capsys.readouterr().out
    assert len(Handler.seen) == 1
    assert root.stat().st_mtime_ns == stamp


def test_a_connection_that_breaks_is_tried_again(url, cub, root, tmp_path):
    pack(cub, tmp_path / "served/CUB.tgz")
    Handler.cuts.extend([1000, 0])
    assert len(make(root, f"{url}/CUB.tgz").train) == 12
    assert len(Handler.seen) == 3


def test_what_was_fetched_is_kept_for_the_next_run(url, cub, root, tmp_path):
    pack(cub, tmp_path / "served/CUB.tgz")
    assert "404" in refused(root, f"{url}/CUB.tgz", f"{url}/second.mat")
    Handler.seen.clear()
    assert len(make(root, f"{url}/CUB.tgz").train) == 12
    assert Handler.seen == []


def test_what_cannot_be_fetched_is_one_line(url, root, tmp_path):
    assert "check the address, or fetch the file" in refused(root, f"{url}/no.tgz")
    assert "Connection refused" in refused(root, "http://127.0.0.1:1/x.tgz")
    assert "no such file; pass a file or an http(s) address" in refused(root, "ftp://host/x.tgz")
    assert "no such file" in refused(root, root.with_name("x.tgz"))
    (tmp_path / "served/page").write_text("<!DOCTYPE html><title>Sign in</title>")
    assert "perhaps a web page" in refused(root, f"{url}/page")
    assert not any(path.is_file() for path in root.parent.rglob("page"))  # or the next run would meet it again


# Verifying


def test_a_published_checksum_is_compared(url, cub, root, tmp_path, monkeypatch):
    found = hashlib.md5(pack(cub, tmp_path / "served/CUB_200_2011.tgz").read_bytes()).hexdigest()
    address = f"{url}/CUB_200_2011.tgz"
    assert f"expected MD5 97eceeb196236b17998738112f37df78, found {found}" in refused(root, address)
    assert not any(path.is_file() for path in root.parent.rglob("*.tgz"))  # or the next run would meet it again
    assert len(make(root, address, verify_checksum=False).train) == 12
    monkeypatch.setitem(module.PUBLISHED_MD5, "CUB_200_2011.tgz", found)
    assert len(make(root.with_name("b"), address).train) == 12


def test_a_folder_that_holds_something_else_is_left_alone(cub, root, tmp_path):
    archive = pack(cub, tmp_path / "birds.tgz")
    root.mkdir(parents=True)
    (root / "thesis.tex").write_text("years of work")
    assert f"{root} is not empty and is not the whole data set" in refused(root, archive)
    assert (root / "thesis.tex").read_text() == "years of work"
    (root / "thesis.tex").unlink()
    assert len(make(root, archive).train) == 12  # an empty folder is no obstacle


def test_killed_while_unpacking_and_again(cub, root, tmp_path, monkeypatch):
    archive = pack(cub, tmp_path / "birds.tgz")
    unpack = tarfile.TarFile.extractall

    def die(*arguments, **named):
        unpack(*arguments, **named)
        os.kill(os.getpid(), signal.SIGKILL)

    monkeypatch.setattr(tarfile.TarFile, "extractall", die)
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


ESCAPES = ["../evil", "a/../b", "/tmp/proxy_anchor_evil", "..\\evil", "C:/evil", ".."]


def add(archive: Path, name: str, kind: bytes | int, target: str) -> None:
    """Add a member that no packer would write. kind: tarfile's type, or in a zip archive the file's mode."""
    if isinstance(kind, int):
        with zipfile.ZipFile(archive, "a") as packed:
            member = zipfile.ZipInfo("x")
            member.filename, member.create_system, member.external_attr = name, 3, kind << 16
            packed.writestr(member, target)
    else:
        with tarfile.open(archive, "a") as tar:
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, target
            tar.addfile(member)


@pytest.mark.parametrize("name", ESCAPES)
@pytest.mark.parametrize("kind", [tarfile.REGTYPE, stat.S_IFREG | 0o644])
def test_nothing_is_written_outside_of_the_folder(kind, name, root, tmp_path):
    add(tmp_path / "x", name, kind, "")
    refused(root, tmp_path / "x")
    assert not list(tmp_path.rglob("*evil*"))
    assert not Path("/tmp/proxy_anchor_evil").exists()


@pytest.mark.parametrize(
    ("kind", "target"), [(tarfile.SYMTYPE, "/tmp"), (tarfile.LNKTYPE, "../../x"), (tarfile.FIFOTYPE, "")]
)
def test_links_that_lead_out_and_devices_are_refused(kind, target, cub, root, tmp_path):
    archive = pack(cub, tmp_path / "x", "tar")
    add(archive, "link", kind, target)
    assert "'link'" in refused(root, archive)


def test_a_changed_byte_of_a_compressed_archive_is_found(cub, root, tmp_path):
    (cub / "CUB_200_2011" / "stored").write_bytes(os.urandom(2**18))  # cannot be compressed, as images cannot
    packed = pack(cub, tmp_path / "x", "gztar")
    content = bytearray(packed.read_bytes())
    content[len(content) // 2] ^= 1
    packed.write_bytes(content)
    assert "is damaged, cut off or encrypted" in refused(root, packed)


@pytest.mark.parametrize("form", ["gztar", "zip"])
def test_an_archive_that_is_cut_off_is_one_line(form, cub, root, tmp_path):
    archive = pack(cub, tmp_path / "x", form)
    archive.write_bytes(archive.read_bytes()[: -(archive.stat().st_size // 2)])
    assert re.search("is damaged, cut off or encrypted|is not a tar", refused(root, archive))


# The command


def test_the_command(cub, tmp_path):
    archive = pack(cub, tmp_path.with_name("birds.tgz"))
    arguments = ["dataset=cub", "dataset.root=cub", "dataset.allow_partial=true", f"archive={archive}"]
    output = commands.run_ok("prepare.py", *arguments, cwd=tmp_path)
    assert "data: cub, 12 train images of 4 classes" in output
    assert f"ready: {tmp_path / 'cub'}" in output
    assert [path.name for path in tmp_path.iterdir()] == ["cub"]
    for wrong, text in {
        "archive=x": "dataset=",
        "dataset=cub archive=http://h/x?a=b": "write 'archive=\"http://h/x?a=b\"'",
    }.items():
        assert text in commands.refused("prepare.py", *wrong.split(), cwd=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["cub"]
