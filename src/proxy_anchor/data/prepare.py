"""From archives, local or on the web, to a data set's folder: fetch, verify, unpack, count.

Nothing stands under the data set's name before all of it was unpacked and counted. Beside it, while at work:
`.NAME.download/` keeps what was fetched, so that a broken connection is continued; `.NAME.unpacking/` is begun anew.
"""

from __future__ import annotations

import bz2
import errno
import gzip
import hashlib
import http.client
import lzma
import posixpath
import shutil
import ssl
import stat
import tarfile
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import IO
from urllib.parse import unquote, urlparse

from tqdm import tqdm

from proxy_anchor.data.images import is_hidden
from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError

# MD5 of the official archives: CaltechDATA for CUB; torchvision (StanfordCars) for Cars in two folders; for SOP and the
# joint Cars archive, whose sites publish none, what several public loaders agree on. In-Shop has none.
PUBLISHED_MD5 = {
    "CUB_200_2011.tgz": "97eceeb196236b17998738112f37df78",
    "car_ims.tgz": "d5c8f0aa497503f355e17dc7886c3f14",
    "cars_annos.mat": "b407c6086d669747186bd1d764ff9dbc",
    "cars_train.tgz": "065e5b463ae28d29e77c1b4b166cfe61",
    "cars_test.tgz": "4ce7ebf6a94d07f1952d94dd34c4d501",
    "car_devkit.tgz": "c3b158d763b6e2245038c8ad08e45376",
    "cars_test_annos_withlabels.mat": "b0a2b23655a3edd16d84508592a98d10",
    "Stanford_Online_Products.zip": "7f73d41a2f44250d4779881525aea32e",
}
MAX_FILES = 2_000_000
MAX_GROWTH = 20  # pictures hardly shrink when packed: an archive that grows more than this is a bomb ...
FREE_GROWTH_BYTES = 2**31  # ... unless what comes out is small anyway
CONNECTIONS = 5  # a broken one is continued at once, this often without a byte in between
TIMEOUT_S = 30
_CHUNK = 2**20
_OPENERS: dict[bytes, Callable[[IO[bytes]], IO[bytes]]] = {
    b"\x1f\x8b": gzip.open,  # type: ignore[dict-item]
    b"BZh": bz2.open,
    b"\xfd7zXZ\x00": lzma.open,
}
_PLAIN_SUFFIXES = (".mat", ".txt", ".csv")  # annotations that are offered unpacked
_NETWORK = (
    urllib.error.URLError,
    http.client.HTTPException,
    ssl.SSLError,
    ConnectionError,
    TimeoutError,
    ValueError,  # an address or header that cannot be understood
)
_BROKEN = (EOFError, tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError)


def prepare(
    root: Path | str,
    archives: Sequence[str],
    *,
    load: Callable[[Path], Splits],
    verify_checksum: bool = True,
    progress: bool = True,
) -> Splits:
    """The data set, complete below `root`, made from `archives` unless it is there already.

    archives: local files or http(s) addresses of tar archives (plain, gz, bz2, xz), zip archives, or single lists (.mat,
        .txt, .csv). They are unpacked into one folder; local files are left alone.
    load: the data set's loader, which counts classes and images.
    verify_checksum: compare archives of an official name with the published MD5.

    Raises UsageError when something else stands at `root`, an archive cannot be fetched, is damaged, is another file than
    the published one or reaches out of its folder, and when the loader refuses what came out.
    """
    if not archives:
        raise UsageError("archive=[] names no archive: pass files or http(s) addresses.")
    root = Path(root).resolve()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        try:
            splits = load(root)
        except UsageError as error:
            raise UsageError(
                f"{root} is not empty and is not the whole data set: {error} Move it away, or give another dataset.root."
            ) from error
        print(f"{root} is already complete: nothing to do.", flush=True)
        return splits
    downloads, unpacking = (root.with_name(f".{root.name}.{what}") for what in ("download", "unpacking"))
    try:
        files = [_local_file(archive, downloads, progress=progress) for archive in archives]
        shutil.rmtree(unpacking, ignore_errors=True)  # of a run that was killed
        unpacking.mkdir(parents=True)
        try:
            for file in files:
                try:
                    if verify_checksum:
                        _verify(file)
                    _unpack(file, unpacking, progress=progress)
                except UsageError:
                    if file.is_relative_to(downloads):
                        file.unlink()  # or the next run would meet it again
                    raise
            load(unpacking)
            unpacking.replace(root)
        finally:
            shutil.rmtree(unpacking, ignore_errors=True)
    except OSError as error:
        raise UsageError(
            f"{root} cannot be prepared ({error.strerror or error}): free space, or give another dataset.root."
        ) from error
    except UsageError as error:
        raise UsageError(str(error).replace(str(unpacking), f"{', '.join(archives)} unpacked")) from error
    shutil.rmtree(downloads, ignore_errors=True)
    return load(root)


def _local_file(archive: str, downloads: Path, *, progress: bool) -> Path:
    scheme = urlparse(archive).scheme if "://" in archive else ""
    if scheme in ("http", "https"):
        return _download(archive, downloads, progress=progress)
    if scheme:
        raise UsageError(f"archive={archive}: {scheme} is not supported; fetch the file and pass its path.")
    file = Path(archive)
    if not file.is_file():
        raise UsageError(f"archive={archive}: no such file; pass a file or an http(s) address.")
    return file


# Fetching


def _download(url: str, folder: Path, *, progress: bool) -> Path:
    """The file behind `url`, whole, in `folder`; what an earlier run got is continued."""
    # A folder for each address: a server may call all its files "download".
    folder = folder / hashlib.sha256(url.encode()).hexdigest()[:12]
    file = folder / (PurePosixPath(unquote(urlparse(url).path)).name or "archive")
    if file.is_file():
        return file
    folder.mkdir(parents=True, exist_ok=True)
    part, validator = file.with_name(file.name + ".part"), file.with_name(file.name + ".validator")
    failures = 0
    while True:
        before = _size(part)
        try:
            _continue(url, part, validator, progress=progress)
            break
        except urllib.error.HTTPError as error:
            raise UsageError(f"{url} cannot be fetched ({error.code} {error.reason}): check the address.") from error
        except _NETWORK as error:
            failures = 0 if _size(part) > before else failures + 1
            if failures >= CONNECTIONS or (isinstance(error, urllib.error.URLError) and _size(part) == 0):
                reason = getattr(error, "reason", None) or error or type(error).__name__
                raise UsageError(
                    f"{url} cannot be fetched ({reason}); {_size(part):,} bytes are here. "
                    "Run the same command again to continue, or fetch the file and pass its path."
                ) from error
    part.replace(file)
    return file


def _size(file: Path) -> int:
    return file.stat().st_size if file.is_file() else 0


def _continue(url: str, part: Path, validator: Path, *, progress: bool) -> None:
    """Append to `part` what is still missing; ConnectionError when the connection ends early.

    The server is told which version of the file `part` is from (ETag or date): of another version it sends everything.
    """
    have = _size(part)
    known = validator.read_text() if validator.is_file() else ""
    headers = {"User-Agent": "proxy_anchor", "Accept-Encoding": "identity"}
    if have and known:
        headers |= {"Range": f"bytes={have}-", "If-Range": known}
    request = urllib.request.Request(url, headers=headers)
    try:
        response = urllib.request.urlopen(request, timeout=TIMEOUT_S)
    except urllib.error.HTTPError as error:
        if error.code != 416:
            raise
        part.unlink()  # more bytes here than there: begin anew
        raise ConnectionError("the file has become shorter") from error
    with response:
        if response.status == 206:
            begin, total = _content_range(response.headers.get("Content-Range", ""))
            if begin != have:
                raise ConnectionError(f"asked for byte {have}, got byte {begin}")
        else:
            have = 0
            length = response.headers.get("Content-Length")
            total = int(length) if length is not None else None
            tag = response.headers.get("ETag", "")
            # A weak ETag must not be used for ranges.
            validator.write_text(tag if tag and not tag.startswith("W/") else response.headers.get("Last-Modified", ""))
        bar = tqdm(
            initial=have,
            total=total,
            desc=part.stem,
            unit="B",
            unit_scale=True,
            unit_divisor=1024,
            disable=not progress,
        )
        with bar, part.open("ab" if have else "wb") as file:
            while chunk := response.read(_CHUNK):
                file.write(chunk)
                bar.update(len(chunk))
    if total is not None and _size(part) != total:
        raise ConnectionError(f"the connection ended after {_size(part):,} of {total:,} bytes")


def _content_range(text: str) -> tuple[int, int | None]:
    """(first byte, size of the whole file or None) of "bytes 5-9/10"."""
    span, _, total = text.removeprefix("bytes ").partition("/")
    return int(span.partition("-")[0]), int(total) if total.isdecimal() else None


def _verify(file: Path) -> None:
    expected = PUBLISHED_MD5.get(file.name)
    if expected is None:
        return
    with file.open("rb") as stream:
        found = hashlib.file_digest(stream, "md5").hexdigest()
    if found != expected:
        raise UsageError(
            f"{file} is not the published {file.name}: expected MD5 {expected}, found {found}. Fetch it again, or set "
            "verify_checksum=false for another packing (images are counted in any case)."
        )


# Unpacking


def _unpack(archive: Path, folder: Path, *, progress: bool) -> None:
    """Write the regular files of an archive below `folder`; no link, device or mode bit is ever made.

    Raises UsageError for a name or link that leads out of the folder, an encrypted, damaged or foreign archive, and when
    more comes out than pictures could.
    """
    limit = max(MAX_GROWTH * archive.stat().st_size, FREE_GROWTH_BYTES)
    written = count = 0
    try:
        with archive.open("rb") as raw:
            head = raw.read(512)
            raw.seek(0)
            bar = tqdm(
                total=archive.stat().st_size,
                desc=f"unpacking {archive.name}",
                unit="B",
                unit_scale=True,
                unit_divisor=1024,
                disable=not progress,
            )
            with bar:
                for name, stream in _members(archive, raw, head):
                    target = _target(folder, name, archive)
                    if target is None or stream is None:
                        continue
                    count += 1
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with stream, target.open("wb") as file:
                        while chunk := stream.read(_CHUNK):
                            written += len(chunk)
                            if written > limit:
                                raise UsageError(
                                    f"{archive} grows to more than {limit:,} bytes: pictures do not. Nothing was kept."
                                )
                            file.write(chunk)
                    if count > MAX_FILES:
                        raise UsageError(f"{archive} holds more than {MAX_FILES:,} files. Nothing was kept.")
                    bar.update(max(0, raw.tell() - bar.n))
                bar.update(bar.total - bar.n)
    except UsageError:
        raise
    except _BROKEN as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(f"{archive} is damaged or cut off ({reason}): fetch it again.") from error
    except (RuntimeError, ValueError) as error:  # zipfile does not know the method, or no file can have the name
        reason = " ".join(str(error).split())
        raise UsageError(f"{archive} cannot be unpacked ({reason}): unpack it with another program.") from error
    except (FileExistsError, NotADirectoryError, IsADirectoryError) as error:
        raise UsageError(
            f"{archive} has a file and a folder of one name ({error.filename}): fetch it again."
        ) from error
    except OSError as error:
        if error.errno not in (None, errno.EINVAL):  # EINVAL: zipfile went to where a damaged entry pointed
            raise  # the disk's
        raise UsageError(f"{archive} is damaged or cut off ({error}): fetch it again.") from error  # gzip's and bz2's


def _members(archive: Path, raw: IO[bytes], head: bytes) -> Iterator[tuple[str, IO[bytes] | None]]:
    """(name, content) of each entry; content None for a folder or a link that stays inside, which are not written."""
    opener = next((opener for magic, opener in _OPENERS.items() if head.startswith(magic)), None)
    if head.startswith(b"PK"):
        yield from _zip_members(archive, raw)
    elif opener is not None or head[257:262] == b"ustar":
        yield from _tar_members(archive, opener(raw) if opener else raw)
    elif archive.suffix.lower() in _PLAIN_SUFFIXES and not _is_web_page(head):
        yield archive.name, archive.open("rb")
    else:
        what = "it is a web page; fetch the file in a browser" if _is_web_page(head) else "expected tar, tgz or zip"
        raise UsageError(f"{archive} is no archive: {what}.")


def _is_web_page(head: bytes) -> bool:
    return head.lstrip(b"\xef\xbb\xbf \t\r\n").lower().startswith((b"<!doctype", b"<html", b"<?xml"))


class _SmallReads:
    """A file that refuses to read much at once: tarfile would take a header of any size into memory."""

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.seek, self.tell = file.seek, file.tell

    def read(self, size: int) -> bytes:
        """As of the file."""
        if size > 16 * _CHUNK:
            raise tarfile.ReadError(f"a header of {size:,} bytes")
        return self.file.read(size)


def _tar_members(archive: Path, unpacked: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with tarfile.open(fileobj=_SmallReads(unpacked), mode="r:") as tar:  # type: ignore[call-overload]
        for member in tar:
            tar.members.clear()  # it would keep all of them
            if member.issym() or member.islnk():
                # A hard link's target counts from the archive's root, a symbolic link's from its own folder.
                start = posixpath.dirname(member.name) if member.issym() else ""
                _refuse_outside(archive, member.name, posixpath.join(start, member.linkname))
            elif not (member.isreg() or member.isdir()):
                raise UsageError(
                    f"{archive} holds a device or pipe ({member.name!r}): it is no data set. Nothing was kept."
                )
            yield member.name, tar.extractfile(member) if member.isreg() else None
        # The checksum of a compressed file stands at its end, behind what tar reads.
        while unpacked.read(_CHUNK):
            pass


def _zip_members(archive: Path, raw: IO[bytes]) -> Iterator[tuple[str, IO[bytes] | None]]:
    with zipfile.ZipFile(raw) as packed:
        for info in packed.infolist():
            if info.flag_bits & 0x1:
                raise UsageError(
                    f"{archive} is encrypted (as In-Shop's img_highres.zip is; its public img.zip is not): unpack it with "
                    "the authors' password into dataset.root, or take the public one."
                )
            if stat.S_ISLNK(info.external_attr >> 16):
                target = packed.read(info)[:4096].decode("utf-8", "replace") if info.file_size <= 4096 else "/"
                _refuse_outside(archive, info.filename, posixpath.join(posixpath.dirname(info.filename), target))
                yield info.filename, None
            else:
                yield info.filename, None if info.is_dir() else packed.open(info)


def _refuse_outside(archive: Path, name: str, path: str) -> str:
    """`path` in its shortest form, if it stays inside; `name` is the entry to blame."""
    path = path.replace("\\", "/")
    shortest = posixpath.normpath(path)
    if path.startswith("/") or shortest.split("/")[0] == ".." or (len(path) > 1 and path[1] == ":"):
        raise UsageError(f"{archive} reaches out of its folder ({name!r}): do not trust it. Nothing was kept.")
    return shortest


def _target(folder: Path, name: str, archive: Path) -> Path | None:
    """Where an entry goes; None for the archive's own root and what archive tools leave behind."""
    # Any `..` is refused, also one that would stay inside: no honest archive has it.
    if ".." in name.replace("\\", "/").split("/"):
        _refuse_outside(archive, name, "..")
    inside = PurePosixPath(_refuse_outside(archive, name, name))
    if inside == PurePosixPath(".") or is_hidden(Path(inside)):
        return None
    return folder / inside
