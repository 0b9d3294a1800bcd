"""Prepare a data set's folder from archives: fetch, verify, unpack, count.

The folder gets its name only after everything has been unpacked and counted. During the work there are, next to it,
`.NAME.download/` with the fetched archives, which a later run finds again, and `.NAME.unpacking/`.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path, PurePosixPath
from urllib.parse import unquote, urlparse

import pooch
import requests

from proxy_anchor.data.table import Splits
from proxy_anchor.errors import UsageError, reason_of

# MD5 of the official archives. CUB: from CaltechDATA. Cars in two folders: from torchvision (StanfordCars). SOP and the
# joint Cars archive: their sites publish none; several public loaders agree on these. In-Shop has none.
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
RETRIES = 4  # after a broken connection
TIMEOUT_S = 30
_LISTS = (".mat", ".txt", ".csv")  # annotations that are offered unpacked


def prepare(
    root: Path | str,
    archives: Sequence[str],
    *,
    load: Callable[[Path], Splits],
    verify_checksum: bool = True,
) -> Splits:
    """Build the data set below `root` from `archives`, unless it is complete.

    archives: local files or http(s) addresses of tar archives (plain, gz, bz2, xz), zip archives, or single lists
        (.mat, .txt, .csv). All are unpacked into one folder; local files are not changed.
    load: the data set's loader, which counts classes and images.
    verify_checksum: compare archives of an official name with the published MD5.

    Raises UsageError when `root` holds something else, when an archive cannot be fetched, is damaged or is not the
    published file, and when the loader refuses the result.
    """
    root = Path(root).resolve()
    if root.exists() and (not root.is_dir() or any(root.iterdir())):
        try:
            splits = load(root)
        except UsageError as error:
            raise UsageError(
                f"{root} is not empty and is not the whole data set: {error} Move it away, or give another "
                "dataset.root."
            ) from error
        print(f"{root} is already complete: nothing to do.", flush=True)
        return splits
    downloads, unpacking = (root.with_name(f".{root.name}.{what}") for what in ("download", "unpacking"))
    try:
        files = [_local_file(archive, downloads) for archive in archives]
        shutil.rmtree(unpacking, ignore_errors=True)  # left by a run that was killed
        unpacking.mkdir(parents=True)
        for file in files:
            try:
                if verify_checksum:
                    _verify(file)
                _unpack(file, unpacking)
            except UsageError:
                if file.is_relative_to(downloads):
                    file.unlink()  # otherwise the next run would use it again
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
    """The path of an archive, which is fetched if it is an address."""
    address = urlparse(archive)
    if address.scheme not in ("http", "https"):
        if not Path(archive).is_file():
            raise UsageError(f"archive={archive}: no such file; pass a file or an http(s) address.")
        return Path(archive)
    name = PurePosixPath(unquote(address.path)).name or "archive"
    # One folder per address, because a server may call all its files "download".
    folder = downloads / pooch.utils.unique_file_name(archive)
    pooch.get_logger().setLevel("WARNING")  # the progress bar already shows it
    store = pooch.create(folder, base_url="", registry={name: None}, urls={name: archive}, retry_if_failed=RETRIES)
    try:
        return Path(store.fetch(name, downloader=pooch.HTTPDownloader(progressbar=True, timeout=TIMEOUT_S)))
    except requests.RequestException as error:
        raise UsageError(
            f"{archive} cannot be fetched ({reason_of(error)}): check the address, or fetch the file and pass its path."
        ) from error


def _verify(file: Path) -> None:
    expected = PUBLISHED_MD5.get(file.name)
    if expected and (found := pooch.file_hash(str(file), "md5")) != expected:
        raise UsageError(
            f"{file} is not the published {file.name}: expected MD5 {expected}, found {found}. Fetch it again, or set "
            "verify_checksum=false for another packing (images are counted in any case)."
        )


def _unpack(archive: Path, folder: Path) -> None:
    """Unpack an archive into `folder`, or copy a list.

    Nothing is written outside `folder`, see `shutil.unpack_archive` and tarfile's filter "data". Raises UsageError for
    an encrypted, damaged or unknown archive.
    """
    print(f"unpacking {archive.name}", flush=True)
    try:
        if zipfile.is_zipfile(archive):
            shutil.unpack_archive(archive, folder, "zip")
        elif tarfile.is_tarfile(archive):
            with tarfile.open(archive) as tar:
                tar.extractall(folder, filter="data")
                # tarfile stops before the checksum at the end of a compressed file.
                while tar.fileobj is not None and tar.fileobj.read(2**20):
                    pass
        elif archive.suffix.lower() in _LISTS:
            shutil.copyfile(archive, folder / archive.name)
        else:
            raise UsageError(f"{archive} is not a tar, tgz or zip archive (perhaps a web page): fetch it in a browser.")
    except Exception as error:  # damaged bytes raise many types: zlib.error, RuntimeError, EOFError, ...
        if isinstance(error, UsageError) or (isinstance(error, OSError) and error.errno is not None):
            raise  # the one above, or from the disk: errors of gzip and bz2 have no number
        raise UsageError(
            f"{archive} is damaged, cut off or encrypted ({reason_of(error)}): fetch it again, or unpack it with "
            "another program."
        ) from error
