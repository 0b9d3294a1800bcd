"""Exact nearest neighbours by cosine similarity, with faiss (GPU or CPU) or torch.

Every engine compares every query with every gallery row; nothing is approximate. Rows are normalised in float64.
Similarities are float32 whatever the settings of autocast and `torch.set_float32_matmul_precision`: bfloat16
similarities change about 2 % of the nearest neighbours.

Engines sum the D products of a similarity in different orders, so their similarities differ by up to twice
`float32_error(D)`, and neighbours that are closer than this may be swapped. `metrics` accounts for it.
"""

from __future__ import annotations

import functools
import subprocess
import sys
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from proxy_anchor.errors import UsageError, check_choice, check_int
from proxy_anchor.retrieval.rows import as_rows, check_k, check_same_dim, normalise, warn_of_copies

ENGINES = ("auto", "faiss_gpu", "faiss_cpu", "torch")
FAISS_GPU_MAX_K = 2048  # fixed in faiss: its GPU kernels hold the K best in registers
CHUNK_ELEMENTS = 2**25  # similarities in memory at once with the torch engine: 128 MiB in float32
_FAISS_GPU_SCRATCH_BYTES = 256 * 2**20  # faiss tiles its work to fit; its own default is up to 1.5 GiB
_FAISS_GPU_LOCK = threading.Lock()  # faiss's handles and scratch memory serve one search at a time
# Timeout of the test search: the first start of CUDA takes half a minute on a slow disk.
_PROBE_SECONDS = 120.0

# Runs in a subprocess: where faiss has no kernel for the GPU it aborts the process. Rounding to TF32 would turn the
# first similarity, 1 - 2**-13, into 1, and the tie would go to row 0.
_FAISS_GPU_PROBE = """
import faiss, numpy as np
assert faiss.get_num_gpus() > 0, "it sees no GPU"
gallery = np.eye(4, 8, dtype="float32")
gallery[0, 0] = 1 - 2.0**-13
gallery[3, 0] = 1
query = np.eye(1, 8, dtype="float32")
resources = faiss.StandardGpuResources()
resources.setTempMemory(2**20)
similarities, indices = faiss.knn_gpu(resources, query, gallery, 2, metric=faiss.METRIC_INNER_PRODUCT)
assert indices.tolist() == [[3, 0]] and similarities.tolist() == [[1, 1 - 2.0**-13]]
"""


def search(
    queries: Tensor | np.ndarray,
    gallery: Tensor | np.ndarray,
    k: int,
    *,
    engine: str = "auto",
    exclude_self: bool = False,
) -> tuple[Tensor, Tensor]:
    """Find the K gallery rows most similar to each query, exactly.

    queries: (Q, D) and gallery: (N, D), any float type, need not be normalised; a zero row has similarity 0 to all.
    k: 1 <= K <= N, or N - 1 with exclude_self. exclude_self: queries and gallery are the same table, and row i never
    gets index i (removed by index: among exact duplicates the first hit need not be the row itself).
    Returns (similarities (Q, K) float32 in [-1, 1] up to rounding, indices (Q, K) int64) on the device of `queries`.

    Order: decreasing float32 similarity; among returned rows of equal float32 similarity the lower index comes first,
    with every engine. Not promised: which of several equally similar rows make the cut at K, and that exact duplicates
    in different places get the same last bit (BLAS rounds by position).
    Memory beyond inputs and result: normalised copies, 12 bytes per input value; torch 16 x CHUNK_ELEMENTS bytes (or
    one row of similarities if that is more); faiss 256 MiB on the GPU, which it keeps, 20 MB on the CPU.
    Raises UsageError when K is out of range, shapes disagree, a row holds NaN or infinity, or the engine is missing.
    """
    query_rows = as_rows(queries, "queries")
    gallery_rows = query_rows if gallery is queries else as_rows(gallery, "gallery").to(query_rows.device)
    check_same_dim(query_rows, gallery_rows)
    if exclude_self and len(query_rows) != len(gallery_rows):
        raise UsageError(
            f"exclude_self=True with {len(query_rows)} queries and {len(gallery_rows)} gallery rows: both must be the "
            "same table; drop exclude_self for a separate gallery."
        )
    check_k(k, len(gallery_rows), exclude_self)
    engine = resolve_engine(engine, k, exclude_self=exclude_self, device=query_rows.device)
    unit_queries = normalise(query_rows, "query").float()
    unit_gallery = unit_queries if gallery is queries else normalise(gallery_rows, "gallery").float()
    similarities, indices = nearest(unit_queries, unit_gallery, k, engine, exclude_self=exclude_self)
    if not exclude_self:
        warn_of_copies(unit_queries, unit_gallery, indices[:, 0])
    return similarities, indices


def resolve_engine(
    name: str, k: int, *, exclude_self: bool = False, device: torch.device | str | None = None, resident: bool = False
) -> str:
    """Choose the engine: "faiss_gpu", "faiss_cpu" or "torch".

    name: one of ENGINES. k: the largest K. device: of the embeddings, if known.
    resident: the gallery stays on the device between searches of few queries.
    auto: torch for a resident gallery on a GPU; faiss on the GPU if it works and allows K; else torch if the embeddings
    are on a GPU or K is too large for faiss; else faiss on the CPU if installed; else torch.
    faiss_gpu: torch where K is too large for it, with the same results.
    Raises UsageError for an unknown name and for a named engine that is missing.
    """
    check_choice("engine", name, ENGINES)
    check_int("k", k, 1)
    listed = k + exclude_self  # the row itself is in the list before it is removed
    if name == "torch":
        return name
    on_gpu = device is not None and torch.device(device).type == "cuda"
    if name == "auto":
        if on_gpu and resident:  # needs no setup: 0.6 ms a query (docs/search.md)
            return "torch"
        if faiss_gpu_works():
            return "faiss_gpu" if listed <= FAISS_GPU_MAX_K else "torch"
        return "faiss_cpu" if not on_gpu and has_faiss() else "torch"
    if not has_faiss():
        raise UsageError(f"engine={name}: pip install {name.replace('_', '-')} is needed, or use engine=torch.")
    if name == "faiss_gpu" and not faiss_gpu_works():
        raise UsageError(
            "engine=faiss_gpu: this faiss finds no working GPU (a CPU build, no CUDA device, or a test search that "
            "failed); install faiss-gpu in place of faiss-cpu, or use engine=faiss_cpu or engine=torch."
        )
    return "torch" if name == "faiss_gpu" and listed > FAISS_GPU_MAX_K else name


def has_faiss() -> bool:
    """Whether faiss is installed. It is imported only when a search needs it."""
    try:
        import faiss  # noqa: F401
    except ImportError:
        return False
    return True


def faiss_gpu_works() -> bool:
    """Whether faiss is a GPU build and passes a test search.

    The test runs once per process. Warns if it aborts, hangs or is wrong; other engines are used then.
    """
    if not has_faiss():
        return False
    import faiss

    # A broken build aborts the process, so nothing of faiss that uses the GPU is called here.
    return hasattr(faiss, "StandardGpuResources") and torch.cuda.is_available() and _probe_faiss_gpu()


@functools.cache
def _probe_faiss_gpu() -> bool:
    try:
        process = subprocess.Popen(
            [sys.executable, "-c", _FAISS_GPU_PROBE], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
        )
        errors = process.communicate(timeout=_PROBE_SECONDS)[1].strip().splitlines()
        reason = f"exit code {process.returncode}{': ' + errors[-1] if errors else ''}"
    except OSError as error:
        reason = str(error)
    except subprocess.TimeoutExpired:
        process.kill()
        with suppress(subprocess.TimeoutExpired):  # a process that hangs in the driver survives the signal
            process.communicate(timeout=5)
        reason = f"no answer within {_PROBE_SECONDS:g} s"
    else:
        if process.returncode == 0:
            return True
    warnings.warn(
        f"faiss does not work on this GPU (a test search in a subprocess: {reason}): other engines are used, with "
        "the same results; reinstall faiss-gpu, or set search_engine=torch.",
        stacklevel=2,
    )
    return False


def nearest(queries: Tensor, gallery: Tensor, k: int, engine: str, *, exclude_self: bool) -> tuple[Tensor, Tensor]:
    """`search` on checked input: float32 unit rows on one device.

    K is in range and the engine comes from `resolve_engine`.
    """
    with full_precision(queries.device):
        if engine == "torch":
            similarities, indices = _search_torch(queries, gallery, k, exclude_self)
        else:
            run = _search_faiss_gpu if engine == "faiss_gpu" else _search_faiss_cpu
            similarities, indices = run(queries, gallery, k + exclude_self)
            if exclude_self:
                similarities, indices = _drop_self(similarities, indices)
        return order_ties(similarities, indices)


def _search_torch(queries: Tensor, gallery: Tensor, k: int, exclude_self: bool) -> tuple[Tensor, Tensor]:
    similarities = queries.new_empty(len(queries), k)
    indices = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    for rows in row_chunks(len(queries), len(gallery)):
        chunk = similarity_chunk(queries, gallery, rows, exclude_self)
        torch.topk(chunk, k, out=(similarities[rows], indices[rows]))
    return similarities, indices


def _search_faiss_cpu(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
    import faiss

    # knn works on blocks of 4096 x 1024 similarities and needs no index, hence no copy of the gallery.
    found = faiss.knn(queries.cpu().numpy(), gallery.cpu().numpy(), k, metric=faiss.METRIC_INNER_PRODUCT)
    similarities, indices = (torch.from_numpy(each).to(queries.device) for each in found)
    return similarities, indices


def _search_faiss_gpu(queries: Tensor, gallery: Tensor, k: int) -> tuple[Tensor, Tensor]:
    import faiss
    import faiss.contrib.torch_utils  # lets faiss.knn_gpu read and write torch tensors in place

    home = queries.device
    device = home if home.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    with _FAISS_GPU_LOCK, torch.cuda.device(device):
        similarities, indices = faiss.knn_gpu(
            _faiss_gpu_resources(torch.cuda.current_device()),
            queries.to(device).contiguous(),
            gallery.to(device).contiguous(),
            k,
            metric=faiss.METRIC_INNER_PRODUCT,
            device=torch.cuda.current_device(),
        )
        torch.cuda.current_stream().synchronize()  # threads on other streams share the scratch memory
    return similarities.to(home), indices.to(home)


@functools.cache
def _faiss_gpu_resources(device: int) -> Any:
    """faiss's handles and scratch memory on a GPU; creating them takes 0.1 s."""
    import faiss

    resources = faiss.StandardGpuResources()
    resources.setTempMemory(_FAISS_GPU_SCRATCH_BYTES)
    resources.setPinnedMemory(0)  # only for copies from the host, which are not made; the default is 256 MiB
    return resources


def _drop_self(similarities: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Drop index i from row i, or the last hit if duplicates displaced i.

    (Q, K + 1) to (Q, K).
    """
    queries, listed = indices.shape
    drop = indices == torch.arange(queries, device=indices.device)[:, None]
    drop[:, -1] |= ~drop.any(1)
    return similarities[~drop].view(queries, listed - 1), indices[~drop].view(queries, listed - 1)


def order_ties(similarities: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Sort hits of equal similarity by index, in place."""
    tied = (similarities[:, 1:] == similarities[:, :-1]).any(1).nonzero().squeeze(1)
    if len(tied):
        by_index, order = indices[tied].sort(dim=1)
        values, order = similarities[tied].gather(1, order).sort(dim=1, descending=True, stable=True)
        similarities[tied], indices[tied] = values, by_index.gather(1, order)
    return similarities, indices


def row_chunks(num_rows: int, row_size: int) -> Iterator[slice]:
    """Slices over the rows, of at most CHUNK_ELEMENTS values, at least one row."""
    step = max(1, CHUNK_ELEMENTS // max(1, row_size))
    return (slice(start, min(start + step, num_rows)) for start in range(0, num_rows, step))


def similarity_chunk(queries: Tensor, gallery: Tensor, rows: slice | Tensor, exclude_self: bool) -> Tensor:
    """(q, N) similarities of the chosen queries; with exclude_self -inf to themselves."""
    chunk = queries[rows] @ gallery.T
    if exclude_self:
        own = torch.arange(rows.start, rows.stop, device=chunk.device) if isinstance(rows, slice) else rows
        chunk.scatter_(1, own[:, None], -torch.inf)
    return chunk


@contextmanager
def full_precision(device: torch.device) -> Iterator[None]:
    """Disable autocast, gradients, and TF32 or bfloat16 in float32 products.

    The matmul setting is global to the process and is restored on exit.
    """
    # Not torch.get_float32_matmul_precision, which raises if these newer settings have been used.
    mkldnn: Any = torch.backends.mkldnn
    backends: list[Any] = [torch.backends.cuda.matmul, mkldnn.matmul]
    before = [backend.fp32_precision for backend in backends]
    try:
        for backend in backends:
            backend.fp32_precision = "ieee"
        with torch.autocast(device.type, enabled=False), torch.no_grad():
            yield
    finally:
        for backend, precision in zip(backends, before, strict=True):
            backend.fp32_precision = precision
