"""From archives, local or on the web, to a data set's folder: fetch, verify, unpack, count.

Nothing stands under the data set's name before all of it was unpacked and counted. Next to it, during the work:
`.NAME.download/` keeps what was fetched, so that a broken download is continued; `.NAME.unpacking/` is begun anew.
"""

from __future__ import annotations

import lzma
import shutil
import stat
import tarfile
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any
from urllib.parse import unquote, urlparse

import pooch
import requests
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
RETRIES = 4  # of a connection that breaks
TIMEOUT_S = 30
_CHUNK = 2**14  # what a connection that breaks may lose
_LISTS = (".mat", ".txt", ".csv")  # annotations that are offered unpacked
# RuntimeError: zipfile has no password or method. ValueError: no file can have the name.
_BROKEN = (
    EOFError,
    tarfile.TarError,
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    RuntimeError,
    ValueError,
    OSError,
)


def prepare(
    root: Path | str,
    archives: Sequence[str],
    *,
    load: Callable[[Path], Splits],
    verify_checksum: bool = True,
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
        files = [_local_file(archive, downloads) for archive in archives]
        shutil.rmtree(unpacking, ignore_errors=True)  # of a run that was killed
        unpacking.mkdir(parents=True)
        for file in files:
            try:
                if verify_checksum:
                    _verify(file)
                _unpack(file, unpacking)
            except UsageError:
                if file.is_relative_to(downloads):
                    file.unlink()  # or the next run would meet it again
                raise
        load(unpacking)
        unpacking.replace(root)
    except OSError as error:
        raise UsageError(
            f"{root} cannot be prepared ({error.strerror or error}): free space, or give another dataset.root."
        ) from error
    except UsageError as error:
        raise UsageError(str(error).replace(str(unpacking), f"{', '.join(archives)} unpacked")) from error
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
    shutil.rmtree(downloads, ignore_errors=True)
    return load(root)


def _local_file(archive: str, downloads: Path) -> Path:
    if urlparse(archive).scheme in ("http", "https"):
        return _fetch(archive, downloads)
    if not Path(archive).is_file():
        raise UsageError(f"archive={archive}: no such file; pass a file or an http(s) address.")
    return Path(archive)


def _fetch(url: str, downloads: Path) -> Path:
    """The file behind `url`, whole; what an earlier run got is continued."""
    name = PurePosixPath(unquote(urlparse(url).path)).name or "archive"
    # A folder for each address: a server may call all its files "download".
    folder = downloads / pooch.utils.unique_file_name(url)
    part = folder / f"{name}.part"
    pooch.get_logger().setLevel("WARNING")  # the bar says as much
    store = pooch.create(folder, base_url="", registry={name: None}, urls={name: url}, retry_if_failed=RETRIES)
    try:
        return Path(store.fetch(name, downloader=_Continued(part)))
    except requests.RequestException as error:
        reason, have = " ".join(str(error).split()), part.stat().st_size if part.is_file() else 0
        raise UsageError(
            f"{url} cannot be fetched ({reason}); {have:,} bytes are here. "
            "Run the same command again to continue, or fetch the file and pass its path."
        ) from error


class _Continued:
    """A downloader for pooch, which has none that goes on where a broken connection ended.

    part: what has come so far. `.version` next to it says of which version of the file (ETag or date): of another version
    the server sends everything.
    """

    def __init__(self, part: Path) -> None:
        self.part, self.version = part, part.with_suffix(".version")

    def __call__(self, url: str, output_file: str, _: Any) -> None:
        """Append to `part` what is missing, then move it to `output_file`. Raises RequestException for pooch to retry."""
        have = self.part.stat().st_size if self.part.is_file() else 0
        headers = {"Accept-Encoding": "identity"}
        if have and (version := self.version.read_text()):
            headers |= {"Range": f"bytes={have}-", "If-Range": version}
        response = requests.get(url, headers=headers, stream=True, timeout=TIMEOUT_S)
        if response.status_code == 416:
            self.part.unlink()
            raise requests.ConnectionError("the file has become shorter")
        if not response.ok:
            raise UsageError(f"{url}: {response.status_code} {response.reason}: check the address.")
        with response:
            if response.status_code != 206:
                have = 0
                tag = response.headers.get("ETag", "")
                # A weak ETag must not be used for ranges.
                self.version.write_text(tag if tag[:2] != "W/" and tag else response.headers.get("Last-Modified", ""))
            total = have + int(response.headers.get("Content-Length", 0))
            bar = tqdm(desc=self.part.stem, initial=have, total=total, unit="B", unit_scale=True, disable=None)
            with bar, self.part.open("ab" if have else "wb") as file:
                for chunk in response.iter_content(_CHUNK):
                    file.write(chunk)
                    bar.update(len(chunk))
        self.part.replace(output_file)


def _verify(file: Path) -> None:
    expected = PUBLISHED_MD5.get(file.name)
    if expected and (found := pooch.file_hash(str(file), "md5")) != expected:
        raise UsageError(
            f"{file} is not the published {file.name}: expected MD5 {expected}, found {found}. Fetch it again, or set "
            "verify_checksum=false for another packing (images are counted in any case)."
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Write the regular files of an archive below `folder`; no link and no device is ever made.

    Raises UsageError for a name that leads out of the folder, an encrypted, damaged or foreign archive.
    """
    try:
        if zipfile.is_zipfile(archive):
            members = _zip_members(archive, folder)
        elif tarfile.is_tarfile(archive):
            members = _tar_members(archive, folder)
        elif archive.suffix.lower() in _LISTS:
            members = iter([shutil.copyfile(archive, folder / archive.name).name])
        else:
            raise UsageError(f"{archive} is no tar, tgz or zip archive (perhaps a web page): fetch it in a browser.")
        for _ in tqdm(members, desc=f"unpacking {archive.name}", unit=" files", disable=None):
            pass
    except UsageError:
        raise
    except _BROKEN as error:
        is_name_taken = isinstance(error, FileExistsError | NotADirectoryError | IsADirectoryError)
        if isinstance(error, OSError) and error.errno is not None and not is_name_taken:
            raise  # the disk's; those of gzip and bz2 have no number
        reason = " ".join(str(error).split()) or type(error).__name__
        raise UsageError(
            f"{archive} is damaged, cut off or encrypted ({reason}): fetch it again, or unpack it with another program."
        ) from error


def _tar_members(archive: Path, folder: Path) -> Iterator[str]:
    with tarfile.open(archive) as tar:
        for member in tar:
            tar.members.clear()  # type: ignore[attr-defined]  # it would keep all of them
            if _is_wanted(archive, member.name) and not (member.issym() or member.islnk()):
                tar.extract(member, folder, filter="data")
            yield member.name
        # The checksum of a compressed file stands at its end, behind what tar reads.
        while tar.fileobj is not None and tar.fileobj.read(2**20):
            pass


def _zip_members(archive: Path, folder: Path) -> Iterator[str]:
    with zipfile.ZipFile(archive) as packed:
        for info in packed.infolist():
            if _is_wanted(archive, info.filename) and not stat.S_ISLNK(info.external_attr >> 16):
                packed.extract(info, folder)
            yield info.filename


def _is_wanted(archive: Path, name: str) -> bool:
    """Whether to write an entry: not what archive tools leave behind. Raises UsageError for a name that leads out."""
    path = PureWindowsPath(name)  # also knows \\ and drives
    if path.anchor or ".." in path.parts:
        raise UsageError(f"{archive} reaches out of its folder ({name!r}): do not trust it. Nothing was kept.")
    return not is_hidden(Path(*path.parts))
