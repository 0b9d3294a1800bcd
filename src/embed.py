"""Write the embeddings of a folder's images to a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from omegaconf import DictConfig

from proxy_anchor.cli import checks
from proxy_anchor.cli import main as entry
from proxy_anchor.errors import UsageError

if TYPE_CHECKING:
    from torch import Tensor


def embed(cfg: DictConfig) -> int:
    """Write paths, classes and unit vectors; returns the number of images."""
    import shutil
    import time

    from proxy_anchor.data.folder import list_images
    from proxy_anchor.inference.checkpoint import load_trained
    from proxy_anchor.inference.embedder import Embedder
    from proxy_anchor.inference.gallery import report_skipped

    checks.check_use(cfg, "embed")
    if cfg.output.endswith(".parquet") and not find_spec("pyarrow"):
        raise UsageError(f"output={cfg.output} needs pyarrow: pip install -e '.[export]', or write .npz.")
    output, root = Path(cfg.output), Path(cfg.images)
    paths, labels = list_images(root)
    embedder = Embedder(load_trained(cfg.checkpoint), **cfg.embed)
    shards = output.with_name(f".{output.name}.parts")
    start = time.perf_counter()
    done = embedder.embed(paths, shards=shards)
    seconds = time.perf_counter() - start
    report_skipped([(str(paths[row]), reason) for row, reason in done.skipped])
    if not done.rows:
        raise UsageError(f"none of the {len(paths)} images below {root} can be read.")
    base = root if root.is_dir() else root.parent
    names = [Path(os.path.relpath(paths[row], base)).as_posix() for row in done.rows]
    write_embeddings(output, names, [labels[row] for row in done.rows], done.embeddings)
    shutil.rmtree(shards, ignore_errors=True)
    new = len(done.rows) - done.reused
    print(f"{len(names):,} embeddings of D={embedder.embedding_dim} in {output} ({new / seconds:.0f} images/s)")
    return len(names)


def write_embeddings(file: Path, paths: Sequence[str], labels: Sequence[str | None], vectors: Tensor) -> None:
    """Columns id (row number), path, label and vector (N, D) as .npz or .parquet.

    An unknown label is "" in an .npz file, null in a Parquet file. Names that are not UTF-8 get backslashes.
    """
    import numpy as np

    paths = [path.encode("utf-8", "backslashreplace").decode() for path in paths]
    labels = [label and label.encode("utf-8", "backslashreplace").decode() for label in labels]
    ids, rows = np.arange(len(paths)), vectors.numpy()
    aside = file.with_name(file.name + ".tmp")
    if file.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        # LanceDB searches vectors of a fixed size only.
        column = pyarrow.FixedSizeListArray.from_arrays(rows.ravel(), rows.shape[1])
        known = pyarrow.array(labels, pyarrow.string())  # also where no label is known
        parquet.write_table(pyarrow.table({"id": ids, "path": paths, "label": known, "vector": column}), aside)
    else:
        names, classes = np.array(paths, np.str_), np.array([each or "" for each in labels], np.str_)
        with aside.open("wb") as stream:
            np.savez(stream, id=ids, path=names, label=classes, vector=rows)
    aside.replace(file)


if __name__ == "__main__":
    entry.run(embed, "embed")
