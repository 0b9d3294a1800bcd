"""A training step on several GPUs by the arguments of torch's wrapper, which averages the gradients.

    python benchmarks/ddp.py --devices 2

Every form trains the same compiled network and loss, each time in new processes, one per GPU: `one_bucket` (see
`LeanDDP`), `torch` (DistributedDataParallel as Lightning makes it, without sending statistics), `torch_best`
(`one_bucket` and a static graph), `torch_unsplit` (the same, where Dynamo does not know of the wrapper),
`torch_reducer` (compiled autograd sends the gradients). Rows `own` are of earlier commits, which averaged all gradients
as one vector after the backward pass, without the wrapper. Appends the rows to results/ddp.jsonl; CPUs take part by
gloo.

    per_gpu         images per GPU in a step
    step_ms         of a step, the median of 5 times 20
    share           images per second as a share of the first form's at that batch
    failed          the last line of the error, where a form does not run
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from common import HERE, append_rows, seconds_per_call, where_it_ran
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.reports.tables import format_table
from proxy_anchor.training.compile import CompiledNet, compile_loss
from proxy_anchor.training.distributed import _SENDS_STATISTICS, ONE_BUCKET, gather_batch

BEST = {**ONE_BUCKET, "static_graph": True}
FORMS: dict[str, dict[str, Any]] = {
    "one_bucket": ONE_BUCKET,
    "torch": {},
    "torch_best": BEST,
    "torch_unsplit": BEST,
    "torch_reducer": BEST,
}


class Step(nn.Module):
    """Images (b, 3, H, W) and labels (b,) of this rank to the loss of the global batch."""

    def __init__(self, net: EmbeddingNet, loss: ProxyAnchorLoss) -> None:
        super().__init__()
        self.net, self.loss = net, loss
        self._embed, self._loss = [CompiledNet(net)], [compile_loss(loss.forward)]  # lists: no submodules

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """The loss ()."""
        return self._loss[0](*gather_batch(self._embed[0](images), labels))


def time_form(rank: int, form: str, batch: int, given: argparse.Namespace, port: int, file: str) -> None:
    """Write the seconds of a step, of rank 0. Runs in each process."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    cuda = given.device == "cuda"
    device = torch.device("cuda", rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    dist.init_process_group("nccl" if cuda else "gloo", rank=rank, world_size=given.devices)
    torch._dynamo.config.optimize_ddp = {"torch_unsplit": False, "torch_reducer": "python_reducer"}.get(form, True)
    torch._dynamo.config.compiled_autograd = form == "torch_reducer"
    torch.manual_seed(0)
    net = EmbeddingNet(given.network, 512, pretrained=False, image_size=given.side, batch_norm="frozen_statistics")
    net = net.to(device, memory_format=torch.channels_last).train()
    loss = ProxyAnchorLoss(98, 512).to(device)
    loss.check_labels = False
    step: nn.Module = Step(net, loss)
    step = DistributedDataParallel(
        step, device_ids=[rank] if cuda else None, **{_SENDS_STATISTICS: False}, **FORMS[form]
    )
    optimizer = torch.optim.AdamW(step.parameters(), lr=1e-5, fused=True)
    images = torch.randint(0, 256, (batch, given.side, given.side, 3), dtype=torch.uint8, device=device)
    images, labels = images.permute(0, 3, 1, 2), torch.randint(98, (batch,), device=device)

    def train_step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            value = step(images, labels)
        value.backward()
        optimizer.step()
        optimizer.zero_grad()

    calls = 20 if cuda else 1
    seconds_per_call(train_step, device, calls)
    seconds = sorted(seconds_per_call(train_step, device, calls) for _ in range(5))[2]
    if rank == 0:
        Path(file).write_text(json.dumps(seconds), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def run_form(form: str, batch: int, given: argparse.Namespace) -> dict[str, Any]:
    """Part of a row: the seconds of a step, or why there are none."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "seconds.json"
        context = mp.spawn(time_form, (form, batch, given, port, str(file)), given.devices, join=False)
        try:
            end = time.monotonic() + given.timeout
            while not context.join(timeout=5):  # also False where one of several has ended
                if time.monotonic() > end:
                    raise TimeoutError(f"no result after {given.timeout} s")
            return {"step_ms": 1000 * json.loads(file.read_text(encoding="utf-8"))}
        except Exception as error:  # the other forms go on
            return {"failed": str(error).strip().splitlines()[-1][-200:]}
        finally:
            for process in context.processes:
                process.kill()


def main() -> None:
    """Run, print, record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=2, help="processes, one per GPU")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--network", default="tf_efficientnet_lite0", help="timm name, random weights")
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--batches", type=int, nargs="+", help="images per GPU (default: 180, and 180 in all)")
    parser.add_argument("--forms", nargs="+", default=list(FORMS), choices=list(FORMS))
    parser.add_argument("--timeout", type=int, default=240, help="seconds for a form at a batch")
    parser.add_argument("--output", type=Path, default=HERE / "results", help="folder of the .jsonl record")
    given = parser.parse_args()
    where = where_it_ran(torch.device(given.device))
    rows: list[dict[str, Any]] = []
    for batch in given.batches or (180, 180 // given.devices):
        first = None
        for form in given.forms:
            found = run_form(form, batch, given)
            seconds = found.get("step_ms")
            first = first or seconds
            share = first / seconds if first and seconds else None
            row = {"devices": given.devices, "per_gpu": batch, "form": form, "step_ms": None, "share": share}
            rows.append({**row, "failed": "", **found})
            append_rows(given.output / "ddp.jsonl", [{**rows[-1], **where}])  # at once: a form takes a minute
    print(f"A step by the arguments of torch's wrapper; {where['device']}, commit {where['commit']}\n")
    print(format_table(rows, decimals=2))


if __name__ == "__main__":
    main()
