"""CPU speed of a network with freed memory kept, and with glibc's default.

    python benchmarks/allocator.py

Alternating rounds of both, each in a separate process. Appends a row per direction to results/allocator.jsonl.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from statistics import median

import torch
from common import make_parser, median_ratio, report, where_it_ran

from proxy_anchor.models.embedding_net import EmbeddingNet
from proxy_anchor.utils import keep_freed_memory


def seconds_per_image(backbone: str, batch: int, side: int) -> tuple[float, float]:
    """(evaluating, training) on one thread, random weights."""
    torch.set_num_threads(1)
    net = EmbeddingNet(backbone, 512, pretrained=False, image_size=side, batch_norm="train")
    images = torch.randint(0, 256, (batch, 3, side, side), dtype=torch.uint8)
    found = []
    for training in (False, True):
        net.train(training)
        for _ in range(2):  # the first pass is warm-up
            start = time.perf_counter()
            with torch.set_grad_enabled(training):
                embeddings = net(images)
            if training:
                embeddings.sum().backward()
            seconds = time.perf_counter() - start
        found.append(seconds / batch)
    return found[0], found[1]


def in_a_process(kept: bool, *arguments: str) -> list[float]:
    """`seconds_per_image` in a separate process, with or without keeping freed memory."""
    command = [sys.executable, __file__, "--worker", "kept" if kept else "default", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    return [float(each) for each in done.stdout.split()[-2:]]


def main() -> None:
    """Time, print, record; with --worker, be the timed process."""
    if sys.argv[1:2] == ["--worker"]:
        mode, backbone, batch, side = sys.argv[2:6]
        if mode == "kept":
            keep_freed_memory()
        print(*seconds_per_image(backbone, int(batch), int(side)))
        return
    parser = make_parser(__doc__, repeats=3)
    parser.add_argument("--backbone", default="tf_efficientnet_lite0")
    arguments = parser.parse_args()
    arguments.repeats = 1 if arguments.quick else arguments.repeats
    sizes = ("4", "64") if arguments.quick else ("32", "224")
    in_a_process(True, arguments.backbone, *sizes)  # fills the file system's cache
    rounds: dict[bool, list[list[float]]] = {False: [], True: []}
    for _ in range(arguments.repeats):
        for kept in (False, True):
            rounds[kept].append(in_a_process(kept, arguments.backbone, *sizes))
    rows = []
    for place, direction in enumerate(("evaluating", "training")):
        default, kept_seconds = ([each[place] for each in rounds[kept]] for kept in (False, True))
        rows.append(
            {
                "network": arguments.backbone,
                "direction": direction,
                "default_images_per_s": 1 / median(default),
                "kept_images_per_s": 1 / median(kept_seconds),
                "speed_up": median_ratio(default, kept_seconds),
            }
        )
    device = torch.device("cpu")
    report("Freed memory kept, one thread", rows, arguments.output / "allocator.jsonl", where_it_ran(device))


if __name__ == "__main__":
    main()
