"""Bad input: each slip is a typed error that says what, where and what to do, and nothing is lost.

Every test goes on with the same pass, or with the next one, and compares what arrives.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from support.small_channel import (
    LIMIT,
    MAX_ROWS,
    NAME,
    PLAN,
    SOURCES,
    WIDTH,
    SmallChannel,
    attach,
    here,
    refused,
    small_channel,
    tap_plan,
)
from tapchannel import Lease, Mailbox, Outbox, Shard, TapPlan, memory
from tapchannel.descriptor import PROBE_STRIDE
from tapchannel.errors import (
    ChannelClosed,
    ConfigError,
    CreditTimeout,
    PassAborted,
    PeerLostError,
    PlanMismatchError,
    ProtocolError,
    TransportUnavailable,
    UsageError,
    WouldBlock,
)
from tapchannel.keys import MAX_MICROBATCHES, MAX_STEP, Key
from tapchannel.transport.select import TRANSPORTS

ROWS = torch.ones(5, WIDTH)
OURS = here(channel=NAME, rank=7, lane=1)  # what an error of rank 7's outbox says of where it is


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[SmallChannel]:
    """A channel whose producers are here."""
    with small_channel(tmp_path) as made:
        yield made


def key(channel: SmallChannel, microbatch: int) -> Key:
    """Give a key of the pass that is open."""
    return Key(1, channel.step, microbatch)


# ---- push


class Slip(NamedTuple):
    """A bad push, and what its error must say."""

    microbatch: Any = 0
    tap: Any = "high"
    tensor: Any = ROWS
    options: dict[str, Any] = {}
    facts: dict[str, Any] = {}


def nested() -> torch.Tensor:
    """Give a tensor whose rows are of different lengths, and that has no shape."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a prototype
        return torch.nested.nested_tensor([torch.ones(1, WIDTH), torch.ones(2, WIDTH)])


class Wrapper(torch.Tensor):
    """A tensor in name only, as a DTensor is: its rows are another's."""

    @staticmethod
    def __new__(cls, rows: torch.Tensor) -> Wrapper:
        """Wrap nothing."""
        return torch.Tensor._make_wrapper_subclass(cls, rows.shape, dtype=rows.dtype)

    @classmethod
    def __torch_dispatch__(cls, *_: object) -> object:
        """Compute nothing."""
        raise NotImplementedError


OTHERS_TAP = {"expected": "'high'"}
OUTSIDE = {"expected": "0 to 1"}
BAD_PUSHES = {
    "tap in no plan": Slip(tap="nowhere", facts=OTHERS_TAP),
    "tap of another rank": Slip(tap="low", facts=OTHERS_TAP),
    "group for a tap": Slip(tap="features", facts=OTHERS_TAP),
    "tap that is no name": Slip(tap=None, facts=OTHERS_TAP),
    "tap that is a list": Slip(tap=["high"], facts=OTHERS_TAP),
    "wrong dtype": Slip(
        tensor=ROWS.double(), facts={"seen": "float64 on cpu", "expected": "float32 on cpu"}
    ),
    "wrong device": Slip(
        tensor=ROWS.to("meta"), facts={"seen": "float32 on meta", "expected": "float32 on cpu"}
    ),
    "wrong width": Slip(
        tensor=torch.ones(5, 9), facts={"seen": "shape (5, 9)", "expected": "last dimension 8"}
    ),
    "scalar": Slip(tensor=torch.tensor(1.0), facts={"seen": "shape ()"}),
    "no tensor": Slip(tensor=[[1.0] * WIDTH], facts={"seen": "list", "expected": ...}),
    "sparse tensor": Slip(tensor=torch.eye(WIDTH).to_sparse()),
    "nested tensor": Slip(tensor=nested()),
    "tensor without memory": Slip(
        tensor=Wrapper(ROWS), facts={"seen": "Wrapper", "expected": ..., "next_step": ...}
    ),
    "too many rows": Slip(
        tensor=torch.ones(MAX_ROWS + 1, WIDTH), facts={"seen": ..., "expected": ..., "key": ...}
    ),
    "rows past the tap's end": Slip(
        options={"row_begin": 12}, facts={"seen": ..., "expected": ..., "key": ...}
    ),
    "rows before the tap": Slip(options={"row_begin": -1}, facts={"seen": -1, "expected": ...}),
    "rows of 65 bits": Slip(options={"row_begin": 1 << 64}, facts={"expected": ...}),
    "more rows than there are": Slip(options={"rows": 6}, facts={"seen": 6, "expected": "0 to 5"}),
    "fewer rows than none": Slip(options={"rows": -1}, facts={"seen": -1, "expected": "0 to 5"}),
    "rows that are a text": Slip(options={"rows": "5"}, facts={"expected": ...}),
    "key behind the pass": Slip(microbatch=2, facts={"seen": 2, **OUTSIDE}),
    "key far behind the pass": Slip(microbatch=1 << 20, facts={"seen": 1 << 20, **OUTSIDE}),
    "key before the pass": Slip(microbatch=-1, facts={"seen": -1, "expected": ...}),
    "key of 65 bits": Slip(microbatch=1 << 64, facts={"expected": ...}),
    "key that is a text": Slip(microbatch="0", facts={"expected": ...}),
    "key that is a flag": Slip(microbatch=True, facts={"expected": ...}),
}


@pytest.mark.parametrize("name", BAD_PUSHES)
def test_bad_push_is_refused_and_leaves_no_trace(channel: SmallChannel, name: str) -> None:
    """A push that has written or counted something before it is refused, or an untyped error."""
    slip = BAD_PUSHES[name]
    with channel.open_pass(2):
        with refused(UsageError, ConfigError, channel=NAME, rank=7, **slip.facts) as caught:
            channel.outboxes[7].push(slip.microbatch, slip.tap, slip.tensor, **slip.options)
        assert repr(slip.tap) in str(caught[0])
        channel.deliver(0)
        channel.deliver(1)
    channel.carry()


def test_rows_over_the_limit_come_with_both_numbers(channel: SmallChannel) -> None:
    """ "Too many rows", and the user has to look up how many there were and how many may be."""
    with channel.open_pass(1):
        with refused(UsageError, **OURS, tap="high", key=key(channel, 0)) as caught:
            channel.outboxes[7].push(0, "high", torch.ones(MAX_ROWS + 1, WIDTH))
        for number in ("17 rows", "16 rows"):
            assert number in str(caught[0])
        channel.deliver(0)


def test_full_slot_passes(channel: SmallChannel) -> None:
    """A limit that is one too strict."""
    full = torch.randn(MAX_ROWS, WIDTH)
    with channel.open_pass(1):
        channel.outboxes[7].push(0, "high", full)
        channel.deliver(0, {"high": full})


def test_tap_pushed_twice_is_refused(channel: SmallChannel) -> None:
    """A recomputed forward whose hook pushes again: the second push must not reach the slot."""
    first = torch.randn(5, WIDTH)
    with channel.open_pass(1):
        channel.outboxes[7].push(0, "high", first)
        with refused(UsageError, **OURS, key=key(channel, 0), tap="high", cause=..., next_step=...):
            channel.outboxes[7].push(0, "high", first + 1)
        channel.deliver(0, {"high": first})
    channel.carry()


def test_queued_tap_pushed_twice_is_refused(channel: SmallChannel) -> None:
    """A doubled push that only the wait for credit would find."""
    with channel.open_pass(4):
        value = torch.randn(5, WIDTH)
        channel.outboxes[7].push(3, "high", value)
        with refused(UsageError, tap="high", key=key(channel, 3)):
            channel.outboxes[7].push(3, "high", value)
        for microbatch in range(3):
            channel.deliver(microbatch)
        channel.deliver(3, {"high": value})


def test_full_queue_is_refused_and_drains(tmp_path: Path) -> None:
    """A queue that grows without end, or a push that is dropped in silence."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        channel.outboxes[7] = attach(tmp_path, 7, queue_limit=1)
        values = [torch.randn(5, WIDTH) for _ in range(4)]
        with channel.open_pass(4):
            for microbatch in range(3):  # depth 2: the third has to wait
                channel.outboxes[7].push(microbatch, "high", values[microbatch])
            facts = {"seen": ..., "key": key(channel, 3), "cause": ...}
            with refused(CreditTimeout, **OURS, tap="high", next_step=..., **facts):
                channel.outboxes[7].push(3, "high", values[3])
            channel.deliver(0, {"high": values[0]})
            channel.outboxes[7].flush(LIMIT)
            for microbatch in range(1, 4):
                pushed = {"high": values[microbatch]} if microbatch < 3 else None
                channel.deliver(microbatch, pushed)
        channel.carry()


def test_queue_that_is_not_served_ends_in_a_time_out(tmp_path: Path) -> None:
    """A push that waits for ever for a consumer that does not receive (I3)."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        channel.outboxes[7] = attach(tmp_path, 7, timeout=0.1)
        channel.open_next(3)
        for microbatch in range(3):
            channel.outboxes[7].push(microbatch, "high", ROWS)
        facts = {"key": key(channel, 2), "seen": ..., "expected": ..., "last_progress": ...}
        with refused(CreditTimeout, **OURS, cause=..., next_step=..., **facts) as caught:
            channel.outboxes[7].flush(LIMIT)
        assert caught[0].limit == pytest.approx(0.1)
        assert "100 ms" in str(caught[0])
        channel.abort()
        channel.carry()


# ---- recv


@pytest.mark.parametrize("microbatch", [2, 1 << 17, -1, 1 << 64, "0", True, None, 0.0], ids=repr)
@pytest.mark.parametrize("call", [Mailbox.recv, Mailbox.try_recv])
def test_key_outside_the_pass_is_refused(
    channel: SmallChannel, call: Callable[..., Lease], microbatch: Any
) -> None:
    """A key that wraps around into another pass, or an untyped error of the native core."""
    with channel.open_pass(2):
        with refused(UsageError, ConfigError, seen=..., expected=...):
            call(channel.mailbox, microbatch)
        channel.deliver(0)
        channel.deliver(1)
    channel.carry()


def test_microbatch_received_twice_is_refused(channel: SmallChannel) -> None:
    """A second lease on a slot that may be another key's by now."""
    with channel.open_pass(2):
        for outbox, tap in ((channel.outboxes[3], "low"), (channel.outboxes[7], "high")):
            outbox.push(0, tap, ROWS)
        channel.outboxes[3].push(0, "embedding", ROWS)
        lease = channel.mailbox.recv(0)
        with refused(UsageError, channel=NAME, key=key(channel, 0), next_step=...):
            channel.mailbox.recv(0)
        with refused(UsageError, channel=NAME, key=key(channel, 0)):
            channel.mailbox.try_recv(0)
        assert torch.equal(lease["high"], ROWS)
        del lease
        with refused(UsageError, channel=NAME, key=key(channel, 0)):
            channel.mailbox.recv(0)
        channel.deliver(1)
    channel.carry()


@pytest.mark.parametrize(
    "options",
    [
        {"wait": "later"},
        {"wait": None},
        {"rows": -1},
        {"rows": MAX_ROWS + 1},
        {"rows": "5"},
        {"timeout": -1},
        {"timeout": math.inf},
        {"timeout": math.nan},
        {"timeout": "1"},
    ],
    ids=str,
)
def test_impossible_option_of_recv_is_refused(
    channel: SmallChannel, options: dict[str, Any]
) -> None:
    """A wait without end, or a slip that is taken for the default."""
    with channel.open_pass(1):
        with refused(ConfigError, seen=..., expected=...) as caught:
            channel.mailbox.recv(0, **options)
        assert next(iter(options)) in str(caught[0])
        channel.deliver(0)


def test_nothing_landed_would_block_and_changes_nothing(channel: SmallChannel) -> None:
    """A look that takes the slot, fails the pass, or is told as an error in `info`."""
    with channel.open_pass(1):
        channel.outboxes[7].push(0, "high", ROWS)
        with refused(WouldBlock, channel=NAME, key=key(channel, 0)):
            channel.mailbox.try_recv(0)
        assert channel.mailbox.info()["last_error"] is None
        channel.deliver(0, {"high": ROWS})


def test_other_rows_than_named_are_refused(channel: SmallChannel) -> None:
    """A view that shows rows which nobody pushed for this key (I1)."""
    channel.open_next(1)
    for rank, taps in SOURCES.items():
        for tap in taps:
            channel.outboxes[rank].push(0, tap, ROWS)
    facts = {"key": key(channel, 0), "seen": 5, "expected": 4, "tap": ..., "next_step": ...}
    with refused(UsageError, channel=NAME, **facts):
        channel.mailbox.recv(0, rows=4)
    channel.abort()
    channel.carry()


@pytest.mark.parametrize("wait", ["stream", "host"])
def test_slot_that_is_held_is_named(channel: SmallChannel, wait: str) -> None:
    """A certain deadlock, or a time-out without the culprit: which slot, since which microbatch."""
    channel.open_next(3)
    for microbatch in range(2):
        for rank, taps in SOURCES.items():
            for tap in taps:
                channel.outboxes[rank].push(microbatch, tap, ROWS)
    views = [channel.mailbox.recv(microbatch)["high"] for microbatch in range(2)]
    kind = UsageError if wait == "stream" else CreditTimeout
    with refused(kind, channel=NAME, key=key(channel, 2), next_step=..., cause=...) as caught:
        channel.mailbox.recv(2, wait=wait, timeout=0.1)
    assert f"slot 0 is still held by a live tensor view since {key(channel, 0)}" in str(caught[0])
    assert "depth=3" in str(caught[0])
    del views
    channel.abort()
    channel.carry()


# ---- passes


def test_pass_opened_twice_is_refused(channel: SmallChannel) -> None:
    """A second pass that throws away the first one's credit."""
    with channel.open_pass(2):
        for side in (channel.mailbox, channel.outboxes[7]):
            with refused(UsageError, channel=NAME, next_step=...) as caught:
                side.open_pass(channel.step + 1, 2)
            assert f"pass {channel.step}" in str(caught[0])
        channel.deliver(0)
        channel.deliver(1)
    channel.carry()


@pytest.mark.parametrize("step", [1, 0])
def test_step_that_does_not_grow_is_refused(channel: SmallChannel, step: int) -> None:
    """A pass number that comes again: an old stamp would match (I1)."""
    channel.carry(1)
    for side in (channel.mailbox, channel.outboxes[7]):
        with refused(UsageError, channel=NAME, seen=step, expected="more than 1", next_step=...):
            side.open_pass(step, 1)
    channel.carry()


@pytest.mark.parametrize(
    ("step", "microbatches"),
    [
        (-1, 1),
        (MAX_STEP + 1, 1),
        ("1", 1),
        (True, 1),
        (1.0, 1),
        (1, 0),
        (1, -1),
        (1, MAX_MICROBATCHES + 1),
        (1, None),
    ],
)
def test_impossible_pass_is_refused(channel: SmallChannel, step: Any, microbatches: Any) -> None:
    """A number that does not fit the stamp and overflows into its neighbour field."""
    for side in (channel.mailbox, channel.outboxes[7]):
        with refused(ConfigError, expected=...):
            side.open_pass(step, microbatches)
    channel.carry()


@pytest.mark.parametrize(("consumer", "producer"), [(1, 2), (2, 1), (3, 2)])
def test_different_counts_of_microbatches_are_told_on_both_sides(
    channel: SmallChannel, consumer: int, producer: int
) -> None:
    """A side that waits for a microbatch which the other side never heard of."""
    channel.step += 1
    channel.mailbox.open_pass(channel.step, consumer)
    for outbox in channel.outboxes.values():
        outbox.open_pass(channel.step, producer)

    def count(number: int) -> str:
        return f"pass {channel.step} with {number} microbatch{'es' if number != 1 else ''}"

    facts = {"key": key(channel, 0), "next_step": ...}
    with refused(ProtocolError, **OURS, seen=count(consumer), expected=count(producer), **facts):
        channel.outboxes[7].push(0, "high", ROWS)
    with refused(
        ProtocolError, channel=NAME, seen=count(producer), expected=count(consumer), **facts
    ):
        channel.mailbox.recv(0)
    channel.abort()
    channel.carry()


def test_producer_in_a_pass_that_the_consumer_has_left_is_told(channel: SmallChannel) -> None:
    """A push that waits for ever for the credit of a pass which is over."""
    channel.outboxes[7].open_pass(5, 1)
    channel.outboxes[3].open_pass(6, 1)
    channel.mailbox.open_pass(6, 1)
    channel.step = 6
    facts = {"key": Key(1, 5, 0), "seen": ..., "expected": ..., "cause": ..., "next_step": ...}
    with refused(ProtocolError, **OURS, **facts) as caught:
        channel.outboxes[7].push(0, "high", ROWS)
    assert "pass 6" in str(caught[0].seen)
    assert "pass 5" in str(caught[0].expected)
    channel.abort()
    channel.carry()


def test_nothing_is_pushed_or_received_outside_a_pass(channel: SmallChannel) -> None:
    """A call before the first pass or after the last that crashes, waits, or touches a slot."""
    for _ in range(2):
        with refused(UsageError, channel=NAME, next_step=...) as caught:
            channel.mailbox.recv(0)
        assert "open_pass" in str(caught[0].next_step)
        with refused(UsageError, **OURS, next_step=...):
            channel.outboxes[7].push(0, "high", ROWS)
        channel.carry(1)


def test_incomplete_pass_says_what_is_missing_and_is_aborted(channel: SmallChannel) -> None:
    """A pass that closes though a tap never came: the next one would be one microbatch off."""
    channel.step += 1
    ours = channel.outboxes[7].open_pass(channel.step, 2)
    others = channel.outboxes[3].open_pass(channel.step, 2)
    consumer = channel.mailbox.open_pass(channel.step, 2)
    channel.deliver(0)
    facts = {"key": key(channel, 1), "seen": 1, "expected": 2, "next_step": ...}
    with refused(UsageError, **OURS, tap="high", **facts):
        ours.close()
    with refused(PassAborted, channel=NAME, rank=7, who="the producer", reason=..., next_step=...):
        channel.mailbox.recv(1)  # rank 3 has not pushed either: the one that gave up is to be named
    with refused(PassAborted, channel=NAME):
        consumer.close()
    with refused(PassAborted, rank=3, who="the consumer"):
        others.close()
    channel.carry()


def test_incomplete_pass_of_the_consumer_says_what_is_missing(channel: SmallChannel) -> None:
    """A consumer that skips a microbatch and grants its slot to the next pass."""
    channel.step += 1
    opened = [
        side.open_pass(channel.step, 2) for side in (channel.mailbox, *channel.outboxes.values())
    ]
    channel.deliver(0)
    with refused(UsageError, channel=NAME, key=key(channel, 1), seen=1, expected=2, next_step=...):
        opened[0].close()
    for outbox in channel.outboxes.values():
        outbox.abort("over there, too")
    channel.carry()


@pytest.mark.parametrize(
    "error",
    [
        ValueError("plain"),
        ValueError("lone surrogate \udcff of a file's name"),
        ValueError("null \0 and \x1b[31m colour"),
        ValueError("渡" * 500),
        ValueError(),
        KeyboardInterrupt(),
        OSError(2, "No such file", "/data/\udcff"),
    ],
    ids=lambda error: ascii(error)[:40],
)
def test_any_exception_inside_a_pass_aborts_it_and_comes_out(
    channel: SmallChannel, error: BaseException
) -> None:
    """An error whose own text breaks the abort: the pass stays open and the cause is lost (I7)."""
    for opener in (channel.mailbox, channel.outboxes[7]):
        channel.step += 1
        others = [
            side for side in (channel.mailbox, *channel.outboxes.values()) if side is not opener
        ]
        for side in others:
            side.open_pass(channel.step, 1)
        with pytest.raises(type(error)) as raised, opener.open_pass(channel.step, 1):
            raise error
        assert raised.value is error
        for side in others:
            side.abort("the other side failed")
        channel.carry(1)


@pytest.mark.parametrize("reason", ["\udcff", "\0", "x" * 5000, "\x1b[31m", "", None, 7], ids=ascii)
def test_any_reason_to_abort_reaches_the_other_side_in_print(
    channel: SmallChannel, reason: Any
) -> None:
    """A reason that is not UTF-8, too long, or no text, and so no abort at all."""
    channel.open_next(1)
    channel.outboxes[7].abort(reason)
    with refused(PassAborted, channel=NAME, rank=7, who="the producer") as caught:
        channel.mailbox.recv(0)
    assert str(caught[0]).isprintable()
    channel.abort()
    channel.carry(1)


def test_abort_inside_a_pass_leaves_it_in_peace(channel: SmallChannel) -> None:
    """A block that is left after `abort` and complains that no pass is open."""
    for side in (channel.mailbox, channel.outboxes[7]):
        channel.step += 1
        with side.open_pass(channel.step, 1):
            side.abort("the loss is not finite")
    channel.abort()
    channel.carry(1)


# ---- leases


def a_lease(channel: SmallChannel) -> Lease:
    """Open a pass of one microbatch and receive it."""
    channel.open_next(1)
    for rank, taps in SOURCES.items():
        for tap in taps:
            channel.outboxes[rank].push(0, tap, ROWS)
    return channel.mailbox.recv(0)


USES: dict[str, Callable[[Lease], object]] = {
    "view of a tap": lambda lease: lease["high"],
    "view of a group": lambda lease: lease["features"],
    "info": lambda lease: lease.info,
    "missing": lambda lease: lease.missing,
    "clone": lambda lease: lease.clone(),
    "release": lambda lease: lease.release(),
    "record_stream": lambda lease: lease.record_stream(None),  # type: ignore[arg-type]
    "verify": lambda lease: lease.verify(),
    "with": lambda lease: lease.__enter__(),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("ending", ["release", "with", "clone"])
def test_lease_used_after_release_is_refused(channel: SmallChannel, use: str, ending: str) -> None:
    """A view on a slot that is another key's by now (I1, I9)."""
    lease = a_lease(channel)
    if ending == "with":
        with lease:
            pass
    else:
        getattr(lease, ending)()
    with refused(UsageError, channel=NAME, key=key(channel, 0), next_step=...) as caught:
        USES[use](lease)
    assert "released" in str(caught[0])
    assert "released" in repr(lease)
    channel.abort()
    channel.carry()


@pytest.mark.parametrize("name", ["nowhere", "", None, 7, ("high",)])
def test_unknown_name_in_a_lease_is_refused(channel: SmallChannel, name: Any) -> None:
    """A KeyError without the names that there are."""
    lease = a_lease(channel)
    with refused(ConfigError, UsageError, expected=...) as caught:
        lease[name]
    assert "high" in str(caught[0])
    caught.clear()  # its traceback holds the lease
    del lease
    channel.abort()
    channel.carry()


@pytest.mark.parametrize(
    ("names", "live"), [(["high"], 1), (["features"], 1), (["high", "low"], 2)]
)
def test_release_under_live_views_is_refused_and_counts_them(
    channel: SmallChannel, names: list[str], live: int
) -> None:
    """A slot that goes back under its reader; a wrong count, which sends the user searching."""
    lease = a_lease(channel)
    views = [lease[name] for name in names]
    noun = "view" if live == 1 else "views"
    with refused(
        UsageError, channel=NAME, key=key(channel, 0), next_step=..., expected=...
    ) as caught:
        lease.release()
    assert f"{live} live {noun}" in str(caught[0])
    assert torch.equal(lease["high"], ROWS)
    views.clear()
    lease.release()
    channel.abort()
    channel.carry()


def test_release_sees_views_that_only_autograd_holds(channel: SmallChannel) -> None:
    """A slot that goes back while a saved input waits for its backward (I9)."""
    lease = a_lease(channel)
    weight = torch.ones(WIDTH, 1, requires_grad=True)
    loss = (lease["high"] @ weight).sum()
    with refused(UsageError):
        lease.release()
    loss.backward()
    del loss
    lease.release()
    assert torch.equal(weight.grad, torch.full((WIDTH, 1), 5.0))  # type: ignore[arg-type]
    channel.abort()
    channel.carry()


def test_views_of_different_rows_cannot_be_read_side_by_side(channel: SmallChannel) -> None:
    """A group's view with rows that one of its taps never had."""
    channel.open_next(1)
    channel.outboxes[3].push(0, "low", ROWS)
    channel.outboxes[3].push(0, "embedding", ROWS)
    channel.outboxes[7].push(0, "high", torch.ones(4, WIDTH))
    lease = channel.mailbox.recv(0)
    with refused(UsageError, channel=NAME, key=key(channel, 0), seen=..., next_step=...) as caught:
        lease["features"]
    assert "low: 5" in str(caught[0].seen)
    assert "high: 4" in str(caught[0].seen)
    assert lease["high"].shape == (4, WIDTH)
    caught.clear()  # its traceback holds the lease
    del lease
    channel.abort()
    channel.carry()


# ---- after close, or after the other side closed

AFTER_CLOSE: dict[str, Callable[[Mailbox], object]] = {
    "open_pass": lambda mailbox: mailbox.open_pass(9, 1),
    "recv": lambda mailbox: mailbox.recv(0),
    "try_recv": lambda mailbox: mailbox.try_recv(0),
    "reset": lambda mailbox: mailbox.reset(),
    "wait_ready": lambda mailbox: mailbox.wait_ready(LIMIT),
}


@pytest.mark.parametrize("use", AFTER_CLOSE)
@pytest.mark.parametrize("in_pass", [False, True])
def test_mailbox_used_after_close_is_refused(tmp_path: Path, use: str, in_pass: bool) -> None:
    """A call that crashes, hangs or succeeds on a mailbox that is gone."""
    with small_channel(tmp_path) as channel:
        if in_pass:
            channel.open_next(1)
        channel.mailbox.close()
        with refused(ChannelClosed, channel=NAME, next_step=...) as caught:
            AFTER_CLOSE[use](channel.mailbox)
        assert use.removeprefix("try_") in str(caught[0])
        channel.mailbox.abort("closed already: nothing to do")
        channel.mailbox.close()
        assert channel.mailbox.info()["channel"] == NAME
    with small_channel(tmp_path) as another:
        another.carry()


OUTBOX_AFTER_CLOSE: dict[str, Callable[[Outbox], object]] = {
    "open_pass": lambda outbox: outbox.open_pass(9, 1),
    "push": lambda outbox: outbox.push(0, "high", ROWS),
    "flush": lambda outbox: outbox.flush(),
}


@pytest.mark.parametrize("use", OUTBOX_AFTER_CLOSE)
@pytest.mark.parametrize("in_pass", [False, True])
def test_outbox_used_after_close_is_refused(
    channel: SmallChannel, tmp_path: Path, use: str, in_pass: bool
) -> None:
    """A call that crashes, hangs or writes into a mailbox that this outbox has left."""
    if in_pass:
        channel.open_next(1)
    outbox = channel.outboxes[7]
    outbox.close()
    with refused(ChannelClosed, **OURS, next_step=...) as caught:
        OUTBOX_AFTER_CLOSE[use](outbox)
    assert use in str(caught[0])
    outbox.abort("closed already: nothing to do")
    outbox.close()
    assert outbox.info()["rank"] == 7
    channel.abort()
    channel.outboxes[7] = attach(tmp_path, 7)
    channel.carry()


@pytest.mark.parametrize("in_pass", [False, True])
def test_outbox_of_a_closed_mailbox_is_told(tmp_path: Path, in_pass: bool) -> None:
    """A producer that goes on pushing into memory which nobody reads."""
    with small_channel(tmp_path) as channel:
        if in_pass:
            channel.open_next(1)
        channel.mailbox.close()
        outbox = channel.outboxes[7]
        with pytest.raises((PeerLostError, PassAborted, ChannelClosed)) as raised:
            outbox.push(0, "high", ROWS) if in_pass else outbox.open_pass(1, 1)
        assert (raised.value.channel, raised.value.rank) == (NAME, 7)
        assert raised.value.next_step
    with small_channel(tmp_path) as another:
        another.carry()


def test_lease_outlives_its_closed_mailbox(tmp_path: Path) -> None:
    """A view whose memory is unmapped under its reader."""
    with small_channel(tmp_path) as channel:
        view = a_lease(channel)["high"]
    assert torch.equal(view, ROWS)


# ---- construction


@pytest.mark.parametrize(
    "settings",
    [
        {"depth": 0},
        {"depth": 4097},
        {"depth": True},
        {"depth": 2.0},
        {"when_full": "drop"},
        {"memory": "hbm"},
        {"timeout": math.inf},
        {"timeout": -1},
        {"transport": "rdma"},
        {"device": "gpu"},
        {"store": 7},
        {"name": ""},
        {"secret": "short"},
        {"secret": 12345678},
        {"listen": "eth0"},
        {"listen": "tcp://*:0"},
        {"listen": 7},
        {"listen": "tcp://198.51.100.7"},
        {"allow_no_secret": "yes"},
    ],
    ids=str,
)
def test_impossible_mailbox_is_refused(tmp_path: Path, settings: dict[str, Any]) -> None:
    """A setting that is taken for another, or fails much later in another rank."""
    place = {"store": f"file://{tmp_path}", "name": NAME}
    with refused(ConfigError) as caught:
        Mailbox(PLAN, SOURCES, **{**place, **settings})
    assert next(iter(settings)) in str(caught[0])
    assert caught[0].expected is not None
    with small_channel(tmp_path) as channel:
        channel.carry()


@pytest.mark.parametrize(
    "settings",
    [
        {"rank": -1},
        {"rank": 1 << 31},
        {"rank": "7"},
        {"queue_limit": 0},
        {"timeout": math.nan},
        {"attach_timeout": -1},
        {"transport": "rdma"},
        {"device": "gpu"},
        {"taps": "high"},
        {"taps": [7]},
        {"taps": 7},
        {"name": 7},
        {"secret": "short"},
    ],
    ids=str,
)
def test_impossible_outbox_is_refused(
    channel: SmallChannel, tmp_path: Path, settings: dict[str, Any]
) -> None:
    """A slip of this side alone, found by the other side or by a time-out, or not at all."""
    channel.outboxes.pop(7).close()
    with refused(ConfigError) as caught:
        attach(tmp_path, **{"rank": 7, **settings})
    assert next(iter(settings)) in str(caught[0]) or "channel name" in str(caught[0])
    channel.outboxes[7] = attach(tmp_path, 7)
    channel.carry()


def test_mailbox_larger_than_the_device_says_the_arithmetic(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A machine that swaps or kills, where one sentence would have shown the slip."""
    size = 3 * PLAN.slot_bytes + 2 * PROBE_STRIDE
    monkeypatch.setattr(memory, "_available_host_bytes", lambda: size - 1)
    with refused(ConfigError, seen=..., expected=..., next_step=...) as caught:
        Mailbox(PLAN, SOURCES, depth=3, store=f"file://{tmp_path}", name=NAME)
    for said in (
        f"3 slots × {PLAN.slot_bytes} B",
        f"2 lanes × {PROBE_STRIDE} B = {size} B",
        f"{size - 1} B",
    ):
        assert said in str(caught[0])
    monkeypatch.undo()
    with small_channel(tmp_path, depth=3) as channel:
        channel.carry()


def test_mailbox_larger_than_this_machine_is_refused_at_once(tmp_path: Path) -> None:
    """The same against the machine's real memory: 64 TiB are asked for and not touched."""
    vast = TapPlan({"g": ["tap"]}, 4096, "float32", 1 << 30)
    with refused(ConfigError, seen=..., expected=...) as caught:
        Mailbox(vast, {0: ["tap"]}, depth=4, store=f"file://{tmp_path}")
    assert "65536.000 GiB" in str(caught[0])


def test_gpu_that_is_not_there_is_refused_with_each_reason(tmp_path: Path) -> None:
    """An error of torch's, or of the driver's, in place of which transport was refused and why."""
    place = {"store": f"file://{tmp_path}", "name": NAME}
    with refused(TransportUnavailable) as caught:
        Mailbox(PLAN, SOURCES, device="cuda:4000", **place)
    assert caught[0].refused.keys() == set(TRANSPORTS)  # type: ignore[attr-defined]
    with refused(TransportUnavailable):
        Mailbox(PLAN, SOURCES, device="cpu", transport="cuda_ipc", **place)


@pytest.mark.parametrize(
    ("sources", "problem"),
    [
        ({3: ["embedding", "low"]}, "missing"),
        ({3: ["embedding", "low"], 7: ["high", "low"]}, "twice"),
        ({3: ["embedding", "low"], 7: ["high", "nowhere"]}, "not in the plan"),
        ({3: ["embedding", "low"], 7: ["features"]}, "a group"),
        ({3: ["embedding", "low"], 7: [Shard("high", columns=(0, 2))]}, "missing"),
        ({3: ["embedding", "low"], 7: []}, "missing"),
    ],
)
def test_sources_that_do_not_cover_the_plan_are_refused(
    tmp_path: Path, sources: dict[int, list[Any]], problem: str
) -> None:
    """A tap that nobody pushes, found when the first pass times out."""
    with refused(PlanMismatchError) as caught:
        Mailbox(PLAN, sources, store=f"file://{tmp_path}", name=NAME)
    assert any(problem in row["problem"] for row in caught[0].rows)  # type: ignore[attr-defined]
    assert problem in str(caught[0])


def test_second_outbox_for_a_lane_is_refused(channel: SmallChannel, tmp_path: Path) -> None:
    """Two writers of one cell; the first one must not notice."""
    ours = {"channel": NAME, "rank": 7, "cause": ..., "next_step": ...}
    with channel.open_pass(2):
        channel.deliver(0)
        with refused(UsageError, **ours) as caught:
            attach(tmp_path, 7)
        assert str(here()["pid"]) in str(caught[0])
        channel.deliver(1)
    channel.carry()
    channel.outboxes.pop(7).close()
    channel.outboxes[7] = attach(tmp_path, 7)
    channel.carry()


def test_rank_that_is_in_no_source_is_refused(channel: SmallChannel, tmp_path: Path) -> None:
    """A rank that waits for its lane until the time-out."""
    with refused(PlanMismatchError, channel=NAME, next_step=...) as caught:
        attach(tmp_path, 5)
    [row] = caught[0].rows  # type: ignore[attr-defined]
    assert row["rank"] == 5
    assert "3, 7" in row["expected"]
    channel.carry()


def test_two_shares_of_one_tap_on_a_rank_are_refused(tmp_path: Path) -> None:
    """A rank whose push could not say which of its shares is meant."""
    plan = tap_plan(groups={"features": ["low"]})
    halves = {3: [Shard("low", columns=(0, 2)), Shard("low", columns=(1, 2))]}
    place = {"store": f"file://{tmp_path}", "name": NAME}
    with refused(UsageError, PlanMismatchError, ConfigError, tap="low", next_step=...):
        with Mailbox(plan, halves, **place):
            attach(tmp_path, 3, plan)
