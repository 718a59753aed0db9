"""The parts of the bench that need no second process."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch

from tapchannel.benchmark.facts import facts
from tapchannel.benchmark.payload import WINDOWS, Sources, wrong_words
from tapchannel.benchmark.peers import catalogue
from tapchannel.benchmark.samples import ratios, spread_of
from tapchannel.benchmark.schedule import order
from tapchannel.benchmark.traffic import (
    KIB,
    MIB,
    PLANS,
    Place,
    Traffic,
    plan_traffic,
    size_text,
    stream_traffic,
)

CPU = Place("cpu")
STREAM = stream_traffic(CPU, 64 * KIB)
FAN_IN = plan_traffic(CPU, "eagle3", 512, 16, 2)


def sent(traffic: Traffic, step: int, message: int) -> dict[str, torch.Tensor]:
    """Give copies of a message's taps, from all producers."""
    taps: dict[str, torch.Tensor] = {}
    for rank in range(traffic.producers):
        of: Mapping[str, torch.Tensor] = Sources(traffic, rank).of(step, message)
        taps.update({name: tensor.clone() for name, tensor in of.items()})
    return taps


@pytest.mark.parametrize("traffic", [STREAM, FAN_IN], ids=["stream", "fan-in"])
def test_what_was_sent_is_right(traffic: Traffic) -> None:
    """Catches: a check that complains about everything."""
    assert wrong_words(traffic, 3, 7, sent(traffic, 3, 7)) == 0


@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16, 64])
def test_a_slot_s_last_message_is_wrong_in_every_word(depth: int) -> None:
    """Catches: stale payload that happens to be equal."""
    stale = sent(STREAM, 1, 3)
    assert wrong_words(STREAM, 1, 3 + depth, stale) == STREAM.message_bytes // 8
    assert wrong_words(STREAM, 2, 3, stale) == STREAM.message_bytes // 8


def test_one_bit_is_seen() -> None:
    """Catches: a check of samples."""
    for word in (0, 1234, -1):
        taps = sent(STREAM, 1, 0)
        taps["state0"].view(torch.int64).view(-1)[word] ^= 1 << 40
        assert wrong_words(STREAM, 1, 0, taps) == 1


def test_taps_that_changed_places_are_seen() -> None:
    """Catches: taps of one shape that arrive as each other."""
    taps = sent(FAN_IN, 1, 0)
    taps["low"], taps["high"] = taps["high"], taps["low"]
    assert wrong_words(FAN_IN, 1, 0, taps) == 2 * taps["low"].nbytes // 8
    taps["low"] = taps["low"][:-1]
    assert wrong_words(FAN_IN, 1, 0, taps) == 2 * taps["high"].nbytes // 8


def test_a_view_of_a_group_is_checked_as_it_lies() -> None:
    """Catches: a check that takes a strided view for contiguous."""
    taps = sent(FAN_IN, 1, 0)
    names = PLANS["eagle3"]["features"]
    whole = torch.cat([taps[name] for name in names], dim=-1)
    for number, name in enumerate(names):
        taps[name] = whole[:, 512 * number : 512 * (number + 1)]
    assert wrong_words(FAN_IN, 1, 0, taps) == 0


def test_windows_cover_more_than_a_cache() -> None:
    """Catches: sources that stay in the cache, which no copy of fresh taps finds there."""
    sources = Sources(stream_traffic(CPU, MIB), 0)
    firsts = {sources.of(1, message)["state0"].data_ptr() for message in range(WINDOWS)}
    assert len(firsts) == WINDOWS
    assert max(firsts) - min(firsts) > 60 * MIB


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("producers", [1, 2, 3, 7])
def test_a_plan_is_dealt_out_whole(plan: str, producers: int) -> None:
    """Catches: a tap that nobody pushes, and a producer that has none."""
    traffic = plan_traffic(CPU, plan, 512, 16, producers)
    names = [name for group in PLANS[plan].values() for name in group]
    assert sorted(tap.name for tap in traffic.taps) == sorted(names)
    assert traffic.producers == min(producers, len(names))
    assert len(traffic.plan().lanes(traffic.sources())) == traffic.producers


@pytest.mark.parametrize(("gpus", "expected"), [(1, [0, 0, 0]), (2, [1, 1, 1]), (4, [1, 2, 3])])
def test_producers_have_gpus_of_their_own_where_there_are(gpus: int, expected: list[int]) -> None:
    """Catches: a fan-in over NVLink that stays on one GPU."""
    place = Place("cuda", gpus)
    assert [place.producer(rank) for rank in range(3)] == [f"cuda:{n}" for n in expected]
    assert place.consumer == "cuda:0"


@pytest.mark.parametrize("ahead", [0, 1, 3, 9])
def test_1f1b_runs_each_microbatch_forward_then_backward(ahead: int) -> None:
    """Catches: a schedule that holds more microbatches than 1F1B does, or loses one."""
    steps = list(order(ahead, 6))
    assert [message for forward, message in steps if forward] == list(range(6))
    assert [message for forward, message in steps if not forward] == list(range(6))
    held = most = 0
    for forward, _ in steps:
        held += 1 if forward else -1
        most = max(most, held)
    assert most == min(ahead + 1, 6)


def test_ratios_are_of_neighbours() -> None:
    """Catches: a ratio of medians, which the machine's drift moves."""
    assert ratios([10.0, 20.0, 40.0], [5.0, 10.0, 20.0]) == [0.5, 0.5, 0.5]
    assert spread_of([3.0, 1.0, 2.0]).median == 2.0
    assert size_text(4 * KIB) == "4 KiB"
    assert size_text(64 * MIB) == "64 MiB"


def test_facts_tell_no_paths() -> None:
    """Catches: folders of the user's in published results."""
    known = facts(["stream", "--out", "/home/a", "--quick", "--extra-peers=/home/b"], CPU)
    assert known["command"] == "tapchannel bench stream --quick"


def test_peers_keep_the_interface() -> None:
    """Catches: a peer that lacks what the frame asks of it."""
    for name, peer in catalogue(None).items():
        assert peer.name == name
        assert peer.about
        for flag in (peer.one_sided, peer.unchecked, peer.blocking):
            assert isinstance(flag, bool)
    assert catalogue(None)["nccl"].absence(CPU, 1)
    assert catalogue(None)["symmetric memory"].absence(CPU, 1)
    assert catalogue(None)["gloo"].absence(Place("cuda", 1), 1)
