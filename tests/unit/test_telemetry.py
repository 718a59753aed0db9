"""Telemetry: the flight recorder tells what happened, in order, to whoever may look."""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from support.children import Children
from support.link import Link
from support.small_channel import SOURCES, SmallChannel, attach, descriptors, small_channel
from tapchannel import _native, telemetry
from tapchannel.errors import ConfigError, UsageError
from tapchannel.keys import Key
from tapchannel.telemetry import Event, chrome_trace, inspect, inspect_main, prometheus, read_events

RING = _native.layout()["ring_entries"]
METRIC = re.compile(
    r'tapchannel_[a-z][a-z0-9_]*\{(\w+="(?:[^"\\\n]|\\.)*",?)+\} -?[0-9.e+-]+(inf|nan)?'
)


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[SmallChannel]:
    """A channel whose producers are here."""
    with small_channel(tmp_path) as made:
        yield made


def steps(events: list[Event], key: Key, lane: int, side: str) -> list[str]:
    """Give the steps that one side of a lane took on a key."""
    return [
        event.step_name
        for event in events
        if event.key == key and event.lane == lane and event.side == side
    ]


def test_recorder_tells_the_protocol_step_by_step(channel: SmallChannel) -> None:
    """A step that is not recorded, is recorded under another's name, or out of order."""
    channel.carry(2)
    events = read_events(channel.mailbox)
    key = Key(1, channel.step, 1)
    for lane, taps in enumerate(SOURCES.values()):
        assert steps(events, key, lane, "producer") == ["announce", "put", "stamp"] * len(taps)
        assert "open_pass" not in steps(events, key, lane, "consumer")
        assert steps(events, key, lane, "consumer")[-2:] == ["read", "release"]
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    names = {event.step_name for event in events}
    assert {"attach", "open_pass", "close_pass", "grant"} <= names


def test_both_sides_read_the_same_recorder(channel: SmallChannel) -> None:
    """A side that sees only its own half: after a crash the other half is what is wanted."""
    channel.carry(1)
    for lane, rank in enumerate(SOURCES):
        seen_here = [event for event in read_events(channel.mailbox) if event.lane == lane]
        assert read_events(channel.outboxes[rank]) == seen_here


def test_bytes_of_a_put_are_the_tap_s(channel: SmallChannel) -> None:
    """A rate computed from bytes that were never moved."""
    channel.open_next(1)
    channel.outboxes[7].push(0, "high", torch.ones(3, 8))
    put = [event for event in read_events(channel.outboxes[7]) if event.step_name == "put"]
    assert [(event.bytes, event.cell) for event in put] == [(3 * 8 * 4, 0)]


def test_ring_keeps_the_newest(channel: SmallChannel) -> None:
    """A recorder that stops when it is full, or mixes rounds."""
    passes = RING // 3
    for _ in range(passes):
        channel.carry(1)
    events = [event for event in read_events(channel.mailbox) if event.lane == 1]
    for side in ("producer", "consumer"):
        kept = [event for event in events if event.side == side]
        assert len(kept) == RING
        newest = max(event.key.step for event in kept if event.key)
        assert newest == channel.step


def test_chrome_trace_is_what_the_viewer_takes(channel: SmallChannel) -> None:
    """A trace that does not load: no list of events, times that are no microseconds."""
    channel.carry(1)
    events = read_events(channel.mailbox)
    trace = json.loads(json.dumps(chrome_trace(events)))
    assert len(trace["traceEvents"]) == len(events)
    for made, event in zip(trace["traceEvents"], events, strict=True):
        assert made["ts"] == pytest.approx(event.time_ns / 1000)
        assert (made["pid"], made["tid"]) == (event.side, event.lane)
        assert made["name"].startswith(event.step_name)
        assert made["ph"] == "i"


def test_prometheus_text_is_well_formed(channel: SmallChannel) -> None:
    """A line that a scraper refuses, and with it the rest; a metric told twice with one label."""
    channel.carry(1)
    for role in (channel.mailbox, *channel.outboxes.values()):
        text = prometheus(role.info())
        assert text.endswith("\n")
        lines = text.splitlines()
        assert lines
        for line in lines:
            assert METRIC.fullmatch(line), line
        assert len({line.rpartition(" ")[0] for line in lines}) == len(lines)
    text = prometheus(channel.mailbox.info())
    assert 'tapchannel_bytes{channel="draft",role="mailbox",rank="7"} 160' in text
    assert 'tapchannel_messages{channel="draft",role="mailbox",rank="3"} 2' in text


def test_prometheus_labels_are_escaped() -> None:
    """A channel's name that ends its label, and so the whole scrape."""
    text = prometheus({"channel": 'a"b\\c', "role": "outbox", "rank": 1, "bytes": 5, "note": "x"})
    assert text == 'tapchannel_bytes{channel="a\\"b\\\\c",role="outbox",rank="1"} 5\n'


def test_annotate_without_nvtx_is_a_typed_error(channel: SmallChannel) -> None:
    """torch's own RuntimeError about a missing library."""
    if torch.cuda.is_available():
        telemetry.annotate(channel.mailbox)
        channel.carry(1)
        return
    with pytest.raises(UsageError, match="NVTX"):
        telemetry.annotate(channel.mailbox)
    channel.carry(1)


def test_annotated_calls_still_do_their_work(
    channel: SmallChannel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A range that swallows the result or the error of what it wraps, or that is left open."""
    ranges: list[str] = []
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", ranges.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", lambda: ranges.append("pop"))
    for role in (channel.mailbox, *channel.outboxes.values()):
        telemetry.annotate(role)
    ranges.clear()
    channel.carry(1)
    assert {"tapchannel.push", "tapchannel.recv", "tapchannel.open_pass"} <= set(ranges)
    assert ranges.count("pop") * 2 == len(ranges)
    ranges.clear()
    with pytest.raises(UsageError):
        channel.outboxes[7].push(0, "high", torch.ones(1, 8))
    assert ranges == ["tapchannel.push", "pop"]


def _carry_and_wait(link: Link, folder: Path) -> None:
    """Push one microbatch, tell so, and wait to be looked at."""
    outbox = attach(folder, 7)
    outbox.open_pass(1, 1)
    outbox.push(0, "high", torch.ones(2, 8))
    link.reach("pushed")
    link.receive()


def test_recorder_is_read_from_outside_and_after_a_kill(tmp_path: Path) -> None:
    """A recorder that dies with its process: who wants to read it has just lost that process."""
    with small_channel(tmp_path, ranks=()) as channel, Children(limit=30) as children:
        channel.mailbox.open_pass(1, 1)
        child = children.start(_carry_and_wait, tmp_path)
        child.wait_for("pushed")
        running = inspect(child.pid)
        child.stop()
        stopped = inspect(child.pid)
        child.kill()
        left = [event for event in read_events(channel.mailbox) if event.lane == 1]
    for events in (running, stopped, left):
        assert "stamp" in steps(events, Key(1, 1, 0), 1, "producer")


def test_inspect_tells_why_it_cannot(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback in place of a sentence; an exit code that says all is well."""
    gone = unused_pid()
    with pytest.raises(ConfigError) as raised:
        inspect(gone)
    assert str(gone) in str(raised.value)
    assert inspect_main([str(gone)]) == 1
    assert "cannot be inspected" in capsys.readouterr().out
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as other:
        with pytest.raises(ConfigError, match="no open channel") as raised:
            inspect(other.pid)
        assert raised.value.pid == other.pid


def unused_pid() -> int:
    """Give a pid that no process has."""
    return int(Path("/proc/sys/kernel/pid_max").read_text()) - 1


def test_inspect_command_prints_the_last_events(
    channel: SmallChannel, capsys: pytest.CaptureFixture[str]
) -> None:
    """A command that prints too much, or JSON that does not parse."""
    channel.carry(2)
    assert inspect_main([str(os.getpid()), "--last", "5"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5
    assert "release" in lines[-1] or "close_pass" in lines[-1]
    assert inspect_main([str(os.getpid()), "--json", "--last", "3"]) == 0
    parsed = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(parsed) == 3
    facts = {"time_ns", "side", "step_name", "lane", "key", "cell", "bytes", "microbatches"}
    assert parsed[0].keys() == facts


def _inspect_rubbish(link: Link, size: int) -> tuple[str, bool]:
    """Inspect a process whose only block is rubbish; tell what was said, and if nothing leaked."""
    rubbish = os.memfd_create("tapchannel:lane0:x", os.MFD_ALLOW_SEALING)
    os.write(rubbish, os.urandom(size))
    before = descriptors()
    try:
        inspect(os.getpid())
    except ConfigError as error:
        return str(error), descriptors() == before
    raise AssertionError("rubbish was read as a block")


@pytest.mark.parametrize("size", [0, 10, 64, 1 << 20])
def test_block_of_another_hand_is_refused(size: int) -> None:
    """A block that says of itself what it is not: a crash, or an error of another kind."""
    with Children(limit=30) as children:
        child = children.start(_inspect_rubbish, size)
        said, flat = child.result()
    assert "no open channel" in said
    assert flat


def test_inspect_finds_a_channel_of_the_longest_name(tmp_path: Path) -> None:
    """A name that is cut where the lane's number should follow."""
    for name in ("x" * 128, "渡" * 128):
        with small_channel(tmp_path, ranks=(), name=name) as made:
            made.mailbox.open_pass(1, 1)
            assert {event.lane for event in inspect(os.getpid())} == {0, 1}
