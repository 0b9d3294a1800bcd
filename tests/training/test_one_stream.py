"""The network is wrapped where its gradients are computed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from pytorch_lightning.strategies import DDPStrategy

from proxy_anchor.training import one_stream
from proxy_anchor.training.one_stream import OneStreamDDP


@pytest.mark.parametrize(("strategy", "expected"), [(OneStreamDDP, []), (DDPStrategy, ["stream"])])
def test_no_stream_is_made_to_wrap_the_network_and_lightning_still_makes_one(
    monkeypatch: pytest.MonkeyPatch, strategy: type[DDPStrategy], expected: list[str]
) -> None:
    """When the second case fails, Lightning has done away with it, and this package's strategy can go."""
    events: list[str] = []
    wrapped: list[tuple[Any, ...]] = []

    def wrap(module: object, **arguments: Any) -> None:
        wrapped.append((module, arguments))

    monkeypatch.setattr(torch.cuda, "Stream", lambda *_: events.append("stream"))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: torch.no_grad())
    monkeypatch.setattr("pytorch_lightning.strategies.ddp.DistributedDataParallel", wrap)
    monkeypatch.setattr(one_stream, "DistributedDataParallel", wrap)
    made = strategy(parallel_devices=[torch.device("cuda", 0)], bucket_cap_mb=7)
    monkeypatch.setattr(type(made), "root_device", torch.device("cuda", 3))
    net = torch.nn.Linear(1, 1)
    made._setup_model(net)  # type: ignore[arg-type]
    assert events == expected
    assert wrapped == [(net, {"device_ids": [3], "bucket_cap_mb": 7})]
