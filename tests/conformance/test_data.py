"""What was pushed is what a lease shows, whatever its dtype, rows and producer."""

from __future__ import annotations

import pytest
import torch

from support.channels import Channel, Maker
from support.payloads import EVERY_DTYPE, moved, payload, same_bits
from tapchannel import Outbox, ProtocolError, Shard, TapPlan, UsageError

PLAN = TapPlan(
    {"features": ["layer1", "layer2"], "embedding": ["embedding"]},
    width={"layer1": 24, "layer2": 40, "embedding": 16},
    dtype={"features": "float32", "embedding": "bfloat16"},
    max_rows=12,
)
SOURCES = {4: ["embedding", "layer2"], 7: ["layer1"]}


def push_taps(outbox: Outbox, taps: list[str], step: int, microbatch: int, rows: int) -> None:
    """Push what `payload` gives for these taps of PLAN, on the outbox's device."""
    device = str(outbox.info()["device"])
    for name in taps:
        tap = PLAN.tap(name)
        tensor = payload((step, microbatch, name), rows, tap.width, tap.dtype.name)
        outbox.push(microbatch, name, tensor.to(device))


def push_everywhere(channel: Channel, step: int, microbatch: int, rows: int) -> None:
    """Push all taps of PLAN, each from its own producer."""
    for rank, producer in channel.producers.items():
        producer.run(push_taps, SOURCES[rank], step, microbatch, rows)


def expected(step: int, microbatch: int, rows: int) -> dict[str, torch.Tensor]:
    """Return what a lease must show, by tap and by group."""
    taps = {
        tap.name: payload((step, microbatch, tap.name), rows, tap.width, tap.dtype.name)
        for tap in PLAN.taps
    }
    return taps | {"features": torch.cat([taps["layer1"], taps["layer2"]], 1)}


def test_smoke(channel_of: Maker) -> None:
    """Bug: any at all. Three passes over fewer slots than microbatches, three taps, two lanes."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    for step in (1, 2, 5):
        with channel.open_pass(step, 5):
            for microbatch in range(5):
                push_everywhere(channel, step, microbatch, 12)
                with channel.mailbox.recv(microbatch) as taps:
                    for name, tensor in expected(step, microbatch, 12).items():
                        assert same_bits(taps[name], tensor), name


def test_every_dtype_crosses_bit_for_bit(channel_of: Maker) -> None:
    """Bug: a dtype whose elements are counted or converted wrongly; a NaN that is tidied."""
    names = list(EVERY_DTYPE)
    plan = TapPlan({name: [name] for name in names}, 24, {name: name for name in names}, 5)
    channel = channel_of(plan)
    with channel.open_pass(1, 1):
        channel.producer.run(push_dtypes, names)
        with channel.mailbox.recv(0) as taps:
            wrong = [
                name for name in names if not same_bits(taps[name], payload(name, 5, 24, name))
            ]
    assert not wrong


def push_dtypes(outbox: Outbox, names: list[str]) -> None:
    """Push one tap of each dtype, named like it."""
    device = str(outbox.info()["device"])
    for name in names:
        outbox.push(0, name, moved(payload(name, 5, 24, name), device))


def test_rows_vary_from_microbatch_to_microbatch(channel_of: Maker) -> None:
    """Bug: a view that is sized by the slot, or by what lay in it before, and not by what came."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    counts = [12, 1, 3, 12, 0, 7, 2, 12]
    with channel.open_pass(1, len(counts)):
        for microbatch, rows in enumerate(counts):
            push_everywhere(channel, 1, microbatch, rows)
            with channel.mailbox.recv(microbatch) as taps:
                assert {name: info.rows for name, info in taps.info.items()} == dict.fromkeys(
                    ("layer1", "layer2", "embedding"), rows
                )
                for name, tensor in expected(1, microbatch, rows).items():
                    assert same_bits(taps[name], tensor), (microbatch, name)


def test_empty_taps_travel(channel_of: Maker) -> None:
    """Bug: a tap of no rows that is never stamped, or shows the rows of the microbatch before."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 8, "float32", 4), depth=1)
    with channel.open_pass(1, 3):
        channel.producer.push(0, "tap", torch.ones(4, 8))
        with channel.mailbox.recv(0):
            pass
        for microbatch, shape in ((1, (0, 8)), (2, (2, 0, 8))):
            channel.producer.push(microbatch, "tap", torch.empty(shape))
            with channel.mailbox.recv(microbatch) as taps:
                assert taps["tap"].shape == (0, 8)
                assert taps.info["tap"].shape == shape


def test_taps_of_one_group_may_differ_in_rows(channel_of: Maker) -> None:
    """Bug: a group view that shows rows which one of its taps does not have."""
    channel = channel_of(PLAN, depth=1)
    with channel.open_pass(1, 1):
        channel.producer.run(push_taps, ["layer1", "embedding"], 1, 0, 3)
        channel.producer.run(push_taps, ["layer2"], 1, 0, 4)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["layer1"], expected(1, 0, 3)["layer1"])
            assert same_bits(taps["layer2"], expected(1, 0, 4)["layer2"])
            with pytest.raises(UsageError, match="different rows"):
                taps["features"]


def test_group_view_is_the_concatenation_and_lies_in_the_slot(channel_of: Maker) -> None:
    """Bug: a view that is a copy: it costs memory traffic, and writes of its own go unseen."""
    channel = channel_of(PLAN, SOURCES, depth=2)
    places: dict[int, int] = {}
    with channel.open_pass(1, 4):
        for microbatch in range(4):
            push_everywhere(channel, 1, microbatch, 12)
            with channel.mailbox.recv(microbatch) as taps:
                group = taps["features"]
                places[microbatch] = group.untyped_storage().data_ptr()
                assert group.untyped_storage().nbytes() == PLAN.slot_bytes
                for name in ("layer1", "layer2"):
                    column = PLAN.tap(name).column
                    assert taps[name].data_ptr() == group[:, column:].data_ptr()
                    assert taps[name].stride() == (64, 1)
                for name, offset in (
                    ("features", 0),
                    ("embedding", PLAN.group("embedding").offset),
                ):
                    assert taps[name].data_ptr() == places[microbatch] + offset
                del group
    assert places[2] == places[0]
    assert places[3] == places[1] == places[0] + PLAN.slot_bytes


def test_row_shares_make_whole_rows(channel_of: Maker) -> None:
    """Bug: a share that lands at the rows of another, or a lease that waits for one share only."""
    plan = TapPlan({"tap": ["tap"]}, 6, "float16", 9)
    sources = {rank: [Shard("tap", rows=(rank, 3))] for rank in range(3)}
    channel = channel_of(plan, sources, depth=1)
    with channel.open_pass(1, 2):
        for microbatch, rows in ((0, 9), (1, 6)):
            whole = payload(microbatch, rows, 6, "float16")
            for rank in (2, 0, 1):
                share = whole[rank * rows // 3 : (rank + 1) * rows // 3]
                channel.producers[rank].push(microbatch, "tap", share)
            with channel.mailbox.recv(microbatch) as taps:
                assert same_bits(taps["tap"], whole)
                assert taps.info["tap"].ranks == (0, 1, 2)
                assert taps.info["tap"].rows == rows


def test_column_shares_make_whole_rows(channel_of: Maker) -> None:
    """Bug: a share of the columns written with its own pitch instead of the group's."""
    plan = TapPlan({"pair": ["tap", "other"]}, {"tap": 8, "other": 2}, "int32", 5)
    sources = {0: [Shard("tap", columns=(0, 2)), "other"], 1: [Shard("tap", columns=(1, 2))]}
    channel = channel_of(plan, sources, depth=1)
    tap, other = payload("tap", 5, 8, "int32"), payload("other", 5, 2, "int32")
    with channel.open_pass(1, 1):
        channel.producers[1].push(0, "tap", tap[:, 4:])
        channel.producers[0].push(0, "other", other)
        channel.producers[0].push(0, "tap", tap[:, :4])
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["pair"], torch.cat([tap, other], 1))
            assert taps.info["tap"].ranks == (0, 1)


def test_uneven_row_shares_say_where_they_begin(channel_of: Maker) -> None:
    """Bug: row_begin that is ignored, or shares with a gap between them that are shown as whole."""
    plan = TapPlan({"tap": ["tap"]}, 4, "float32", 8)
    channel = channel_of(plan, {rank: [Shard("tap", rows=(rank, 2))] for rank in (0, 1)}, depth=1)
    whole = payload("whole", 5, 4)
    with channel.open_pass(1, 2):
        channel.producers[0].push(0, "tap", whole[:1])
        channel.producers[1].push(0, "tap", whole[1:], row_begin=1)
        with channel.mailbox.recv(0) as taps:
            assert same_bits(taps["tap"], whole)
        channel.producers[0].push(1, "tap", whole[:1])
        channel.producers[1].push(1, "tap", whole[1:])  # by default from row 4 on: rows 1 to 3 lack
        with channel.mailbox.recv(1) as taps:
            with pytest.raises(ProtocolError, match="side by side") as gap:
                taps["tap"]
        assert gap.value.tap == "tap"
        assert gap.value.seen == "[0, 1), [4, 8)"


def test_a_tensor_of_an_autograd_graph_brings_its_values_only(channel_of: Maker) -> None:
    """Bug: a push that refuses activations, or a lease that joins the producer's graph."""
    channel = channel_of(TapPlan({"tap": ["tap"]}, 3, "float32", 4))
    with channel.open_pass(1, 2):
        channel.producer.run(push_activations)
        for microbatch in range(2):
            with channel.mailbox.recv(microbatch) as taps:
                assert not taps["tap"].requires_grad
                assert torch.equal(taps["tap"].cpu(), torch.full((4, 3), 6.0))


def push_activations(outbox: Outbox) -> None:
    """Push a hidden state of a graph, and one of inference mode."""
    device = str(outbox.info()["device"])
    weight = torch.full((4, 3), 2.0, device=device, requires_grad=True)
    outbox.push(0, "tap", weight * 3)
    with torch.inference_mode():
        outbox.push(1, "tap", torch.full((4, 3), 2.0, device=device) * 3)
