"""Arrays of other libraries, and what every call must leave as it found it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from gpu.channel import TAP, Channel, consuming, producing
from gpu.device import Foreign, current_context, keep_busy, warm_up, wrong_words
from gpu.pair import Pair, Peer
from tapchannel import Outbox

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


# ---- arrays of other libraries


def _late_words(channel: Channel) -> torch.Tensor:
    """Make words that a kernel on the current stream still holds up."""
    words = torch.zeros(channel.rows, channel.width, dtype=torch.int32, device=channel.producer)
    late = channel.words(1)
    keep_busy(20)
    words.copy_(late)
    return words


def _push_interface(outbox: Outbox, channel: Channel) -> None:
    outbox.push(0, TAP, Foreign(_late_words(channel)))


def _push_interface_with_stream(outbox: Outbox, channel: Channel) -> None:
    """The interface says on which stream the array is made; the reader has to wait for it."""
    other = torch.cuda.Stream()
    with torch.cuda.stream(other):
        words = _late_words(channel)
    outbox.push(0, TAP, Foreign(words, other))


def _push_on_named_stream(outbox: Outbox, channel: Channel) -> None:
    """The array is copied for the push: on the named stream, not behind the current one's work."""
    named = torch.cuda.Stream()
    with torch.cuda.stream(named):
        words = _late_words(channel)
    keep_busy(100)
    outbox.push(0, TAP, Foreign(words), stream=named)


def _push_cupy(outbox: Outbox, channel: Channel) -> None:
    """CuPy has a current stream of its own."""
    import cupy

    with (
        cupy.cuda.Device(torch.device(channel.producer).index),
        cupy.cuda.Stream(non_blocking=True),
    ):
        own = torch.cuda.ExternalStream(cupy.cuda.get_current_stream().ptr)
        with torch.cuda.stream(own):
            late = _late_words(channel)
        outbox.push(0, TAP, cupy.from_dlpack(late))


def _push_by(peer: Peer, channel: Channel, push: Callable[[Outbox, Channel], None]) -> None:
    with producing(channel, peer) as outbox, outbox.open_pass(1, 1):
        push(outbox, channel)


def _receive_words(peer: Peer, channel: Channel) -> int:
    with consuming(channel, peer) as mailbox, mailbox.open_pass(1, 1):
        with mailbox.recv(0) as taps:
            return wrong_words(taps[TAP], 1)


WAYS = {
    "interface": _push_interface,
    "interface with a stream": _push_interface_with_stream,
    "on a named stream": _push_on_named_stream,
    "cupy": _push_cupy,
}


@pytest.mark.parametrize("way", WAYS)
def test_foreign_array(pair: Pair, tmp_path: Path, producer: str, way: str) -> None:
    """Catches an array read, or copied for the push, on a stream that does not wait for it."""
    if way == "cupy" and importlib.util.find_spec("cupy") is None:
        pytest.skip("CuPy is not installed")
    channel = Channel(tmp_path.as_uri(), producer=producer)
    wrong, _ = pair.run(_receive_words, partial(_push_by, push=WAYS[way]), channel)
    assert wrong == 0


# ---- the caller's device and context


class Watch:
    """Calls things, and notes which of them changed this thread's device or context."""

    def __init__(self) -> None:
        self.changed: list[str] = []

    def __call__(self, name: str, call: Callable[..., Any], *args: Any, **named: Any) -> Any:
        """Make one call."""
        before = (torch.cuda.current_device(), current_context())
        result = call(*args, **named)
        if (torch.cuda.current_device(), current_context()) != before:
            self.changed.append(name)
        return result


def _push_from_elsewhere(peer: Peer, channel: Channel) -> tuple[list[str], int, int]:
    """Push with another device current, if there are two, and from a thread without context."""
    torch.cuda.set_device(channel.producer)
    warm_up(channel.producer)
    elsewhere = (
        "cuda:0" if channel.producer == "cuda:1" else f"cuda:{torch.cuda.device_count() - 1}"
    )
    sources = [channel.words(microbatch) for microbatch in range(3)]
    torch.cuda.synchronize(channel.producer)
    torch.cuda.set_device(elsewhere)
    torch.zeros(1, device=elsewhere)
    watch = Watch()
    outbox = watch("attach", channel.outbox)
    opened = watch("open_pass", outbox.open_pass, 1, 3)
    for microbatch in range(2):
        watch("push", outbox.push, microbatch, TAP, sources[microbatch])
    with ThreadPoolExecutor(1) as second:
        before = second.submit(current_context).result()
        second.submit(outbox.push, 2, TAP, sources[2]).result()
        after = second.submit(current_context).result()
    watch("close pass", opened.close)
    watch("flush", outbox.flush)
    watch("info", outbox.info)
    watch("close", outbox.close)
    torch.cuda.set_device(channel.producer)
    peer.tell("outbox closed")
    return watch.changed, before, after


def _receive_from_elsewhere(peer: Peer, channel: Channel) -> list[str]:
    torch.cuda.set_device(channel.consumer)
    warm_up(channel.consumer)
    last = f"cuda:{torch.cuda.device_count() - 1}"
    torch.cuda.set_device(last)
    torch.zeros(1, device=last)
    watch = Watch()
    mailbox = watch("construct", channel.mailbox)
    watch("wait_ready", mailbox.wait_ready, 60)
    opened = watch("open_pass", mailbox.open_pass, 1, 3)
    for microbatch, how in enumerate(({"rows": channel.rows}, {}, {"wait": "host"})):
        lease = watch("recv", mailbox.recv, microbatch, **how)
        watch("view", lease.__getitem__, TAP)
        watch("clone", lease.clone) if microbatch == 1 else watch("release", lease.release)
    watch("close pass", opened.close)
    watch("info", mailbox.info)
    peer.wait("outbox closed")
    watch("close", mailbox.close)
    torch.cuda.set_device(channel.consumer)
    return watch.changed


def test_device_and_context_stay_the_callers(pair: Pair, tmp_path: Path, producer: str) -> None:
    """Catches a call that leaves its own context current for the caller's next kernel."""
    channel = Channel(tmp_path.as_uri(), depth=4, producer=producer)
    changed, (pushed, before, after) = pair.run(
        _receive_from_elsewhere, _push_from_elsewhere, channel
    )
    assert (changed, pushed) == ([], [])
    assert before == after
