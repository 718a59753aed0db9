"""Roles that several test modules play, in several environments."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import KERNEL_MS, keep_busy, wrong_words
from gpu.pair import Peer
from tapchannel import Outbox

# Which stream makes the tensor and is pushed from, and on which thread.
WAYS = (
    ("legacy default", "main"),
    ("side", "main"),
    ("named in the call", "main"),
    ("side", "second"),
    ("legacy default", "second"),
)


# ---- behind a long kernel


def _push_behind_kernel(outbox: Outbox, channel: Channel, microbatch: int, seed: int) -> bool:
    """Push a tensor that a long kernel holds up; tell whether the push returned before its end."""
    torch.cuda.set_device(channel.producer)
    kind, _ = WAYS[microbatch]
    legacy = kind == "legacy default"
    stream = torch.cuda.default_stream() if legacy else torch.cuda.Stream()
    made = torch.cuda.Event()
    with torch.cuda.stream(stream):
        source = torch.zeros(
            channel.rows, channel.width, dtype=torch.int32, device=channel.producer
        )
        late = channel.words(seed)
        keep_busy(KERNEL_MS)
        source.copy_(late)
        made.record()
        if kind != "named in the call":
            outbox.push(microbatch, TAP, source)
    if kind == "named in the call":
        outbox.push(microbatch, TAP, source, stream=stream)
    return not made.query()


def push_all_ways(peer: Peer, channel: Channel) -> list[bool]:
    """Push in all ways, in two passes; tell which pushes returned before their kernel's end."""
    returned_early = []
    with producing(channel, peer) as outbox, ThreadPoolExecutor(1) as second:
        for step in (1, 2):
            with outbox.open_pass(step, len(WAYS)):
                for microbatch, (_, thread) in enumerate(WAYS):
                    task = (outbox, channel, microbatch, 10 * step + microbatch)
                    if thread == "second":
                        returned_early.append(second.submit(_push_behind_kernel, *task).result())
                    else:
                        returned_early.append(_push_behind_kernel(*task))
    return returned_early


def receive_all_ways(peer: Peer, channel: Channel) -> list[int]:
    """Receive a pass by stream waits that are queued first, one by host waits read elsewhere."""
    wrong = []
    elsewhere = torch.cuda.Stream()
    with consuming(channel, peer) as mailbox:
        with mailbox.open_pass(1, len(WAYS)):
            for microbatch in range(len(WAYS)):
                with mailbox.recv(microbatch, rows=channel.rows) as taps:
                    wrong.append(wrong_words(taps[TAP], 10 + microbatch))
        with mailbox.open_pass(2, len(WAYS)):
            for microbatch in range(len(WAYS)):
                # What the host has seen landed, any stream may read.
                with mailbox.recv(microbatch, wait="host") as taps, torch.cuda.stream(elsewhere):
                    wrong.append(wrong_words(taps[TAP], 20 + microbatch))
    return wrong


# ---- sources that are freed at once

BURST = 48


def push_burst(peer: Peer, channel: Channel) -> None:
    """Free each source at once; overwrite the next allocation of its size on the same stream."""
    with producing(channel, peer) as outbox, outbox.open_pass(1, BURST):
        for microbatch in range(BURST):
            source = channel.words(microbatch)
            outbox.push(microbatch, TAP, source)
            del source
            garbage = torch.full(
                (channel.rows, channel.width), -1, dtype=torch.int32, device="cuda"
            )
            del garbage


def receive_burst(peer: Peer, channel: Channel) -> list[int]:
    """Count the wrong words of each."""
    wrong = []
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, BURST):
        for microbatch in range(BURST):
            with mailbox.recv(microbatch) as taps:
                wrong.append(wrong_words(taps[TAP], microbatch))
    return wrong
