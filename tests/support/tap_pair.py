"""Two taps of two producers in one group: the smallest channel where one side can lag or fail."""

from __future__ import annotations

import torch

from support.channels import Channel
from tapchannel import TapPlan

PLAN = TapPlan({"pair": ["left", "right"]}, 4, "float32", 4)
SOURCES = {3: ["left"], 8: ["right"]}


def push(channel: Channel, microbatch: int, *taps: str, value: float | None = None) -> None:
    """Push taps of a microbatch, all by default, filled with its number or a value."""
    for rank, [tap] in SOURCES.items():
        if tap in (taps or ("left", "right")):
            filled = torch.full((4, 4), float(microbatch if value is None else value))
            channel.producers[rank].push(microbatch, tap, filled)


def works(channel: Channel, step: int) -> None:
    """Run one sound pass of more microbatches than slots."""
    with channel.open_pass(step, 3):
        for microbatch in range(3):
            push(channel, microbatch, value=step + microbatch)
        for microbatch in range(3):
            with channel.mailbox.recv(microbatch) as taps:
                assert bool((taps["pair"] == step + microbatch).all())
