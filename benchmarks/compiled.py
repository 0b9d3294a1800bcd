"""The check of compiled networks, by network and mode of batch norm.

    python benchmarks/compiled.py                            # the paper's networks and a few others
    python benchmarks/compiled.py --networks resnet18 vit_small_patch16_224 --jobs 4

Each network is compiled as by `compile=true`, in a separate process, and checked with three draws of weights (ImageNet
weights where a package has them) on a batch of smooth random images. Batch norm is in training mode, or frozen with
the statistics of two such batches. Appends the rows to results/compiled.jsonl.

    plain, compiled   cosine of the whole gradient with the plain float32 network's, minimum over draws
    refused           messages of the check, where it refused a network
    compile_s         seconds of the first check, compilation included; parallel jobs share the CPU
"""

from __future__ import annotations

import functools
import json
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from common import append_rows, make_parser, where_it_ran
from torch import nn

from proxy_anchor import EmbeddingNet, ProxyAnchorLoss
from proxy_anchor.errors import UsageError
from proxy_anchor.reports.tables import format_table
from proxy_anchor.training.compile import CompiledNet, check_gradients

PAPER = ["bninception", "googlenet", "resnet50", "resnet101"]
OTHERS = [
    *("tf_efficientnet_lite0", "vit_small_patch16_224", "mobilenetv3_small_100", "convnext_atto", "regnetx_002"),
    *("densenet121", "swin_tiny_patch4_window7_224", "seresnet50"),
]
MODES = ("train", "frozen_statistics")


def smooth_images(batch: int, side: int, device: torch.device) -> torch.Tensor:
    """(B, 3, H, W) uint8: noise of 14 x 14 pixels, enlarged."""
    small = torch.rand(batch, 3, 14, 14, device=device) * 255
    images = nn.functional.interpolate(small, size=side, mode="bilinear").to(torch.uint8)
    return images.contiguous(memory_format=torch.channels_last)


def make_network(
    name: str, mode: str, side: int, device: torch.device, batch: int, *, pretrained: bool
) -> EmbeddingNet:
    """In training mode, with settled statistics where they will be frozen."""
    net = EmbeddingNet(name, 512, pretrained=pretrained, image_size=side, batch_norm="train")
    net = net.to(device, memory_format=torch.channels_last).train()
    if mode == "frozen_statistics":
        for module in net.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.momentum = None  # the mean over all batches
                if not pretrained:
                    module.reset_running_stats()
        with torch.no_grad():
            for _ in range(0 if pretrained else 2):
                net(smooth_images(batch, side, device))
        net.batch_norm = mode
        net.train()
    return net


def check(name: str, mode: str, batch: int, side: int, device: torch.device, draws: int) -> dict[str, Any]:
    """One row."""
    pretrained = name == "tf_efficientnet_lite0"
    precision = functools.partial(torch.autocast, device.type, torch.bfloat16)
    found, refused, compiled, net, seconds = [], [], None, None, 0.0
    for seed in range(draws):
        torch.manual_seed(seed)
        drawn = make_network(name, mode, side, device, batch, pretrained=pretrained)
        if net is None or compiled is None:
            net, compiled = drawn, CompiledNet(drawn)
        net.load_state_dict(drawn.state_dict())
        loss = ProxyAnchorLoss(98, 512).to(device)
        labels = torch.randint(98, (batch,), device=device)
        start = time.perf_counter()
        try:
            found.append(check_gradients(net, compiled, loss, smooth_images(batch, side, device), labels, precision))
        except UsageError as error:
            refused.append(f"seed {seed}: {error}")
        seconds = seconds or time.perf_counter() - start
    least = [min((each[i] for each in found), default=float("nan")) for i in range(2)]
    row = {"network": name, "batch_norm": mode, "weights": "ImageNet" if pretrained else "random", "draws": draws}
    return {
        **row,
        "passed": len(found),
        "plain": least[0],
        "compiled": least[1],
        "refused": " ".join(refused),
        "compile_s": seconds,
    }


def main() -> None:
    """Check all in parallel processes, print, record."""
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--networks", nargs="+", default=[*PAPER, *OTHERS], help="timm names")
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=MODES, help="of batch norm")
    parser.add_argument("--batch", type=int, default=180)
    parser.add_argument("--side", type=int, default=224)
    parser.add_argument("--jobs", type=int, default=1, help="networks compiled in parallel")
    parser.add_argument("--one", action="store_true", help="check in this process, and print the row as JSON")
    given = parser.parse_args()
    if given.quick:
        given.networks, given.batch, given.side, given.repeats = ["test_resnet"], 12, 64, 2
    work = [(name, mode) for name in given.networks for mode in given.modes]
    if given.one:
        print(json.dumps(check(*work[0], given.batch, given.side, given.device, given.repeats)))
        return

    def run(one: tuple[str, str]) -> dict[str, Any]:
        sizes = {"--batch": given.batch, "--side": given.side, "--device": given.device, "--repeats": given.repeats}
        options = [str(each) for pair in sizes.items() for each in pair]
        command = [sys.executable, __file__, "--one", "--networks", one[0], "--modes", one[1], *options]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        row: dict[str, Any] = {
            "network": one[0],
            "batch_norm": one[1],
            "passed": 0,
            "refused": done.stderr.strip()[-300:],
        }
        if not done.returncode:
            row = json.loads(done.stdout.splitlines()[-1])
        append_rows(record, [{**row, **where}])  # at once: an interrupted run keeps its rows
        return row

    record, where = given.output / "compiled.jsonl", where_it_ran(given.device)
    print(f"The check of compiled networks; {where['device']}, torch {torch.__version__}, commit {where['commit']}\n")
    with ThreadPoolExecutor(given.jobs) as pool:
        rows = list(pool.map(run, work))
    print(f"{format_table(rows, decimals=3)}\n\nadded to {record}")


if __name__ == "__main__":
    main()
