"""The attach service between a mailbox and its outboxes: who gets in, who does not, and why."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
import traceback
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from support.channels import until
from support.children import Children
from support.handmade_peers import HandmadeOutbox
from support.link import Link
from support.small_channel import (
    GROUPS,
    LIMIT,
    MAX_ROWS,
    NAME,
    PLAN,
    SOURCES,
    WIDTH,
    Footprint,
    SmallChannel,
    attach,
    descriptors,
    refused,
    small_channel,
    states,
    tap_plan,
)
from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.attach import Request
from tapchannel.errors import (
    AttachError,
    AttachTimeout,
    ChannelClosed,
    ConfigError,
    PassAborted,
    PeerLostError,
    PlanMismatchError,
    TapChannelError,
    TransportUnavailable,
)

SECRET = "correct horse battery"
WRONG = "tr0ub4dor and three"
SOON = 0.2  # seconds; for attaches that must end without success
ROWS = torch.ones(5, WIDTH)


@pytest.fixture
def channel(tmp_path: Path) -> Iterator[SmallChannel]:
    """A channel whose producers are here."""
    with small_channel(tmp_path) as made:
        yield made


@pytest.fixture
def waiting(tmp_path: Path) -> Iterator[SmallChannel]:
    """A channel that rank 7 has not attached to."""
    with small_channel(tmp_path, ranks=(3,)) as made:
        yield made


def let_in(waiting: SmallChannel, folder: Path) -> None:
    """Attach rank 7 as it should, and see that all works."""
    waiting.outboxes[7] = attach(folder, 7)
    waiting.carry()


# ---- does everybody mean the same plan?

OTHER_PLANS = {
    "tap missing": (
        {"groups": {"features": ["low"], "embedding": ["embedding"]}},
        ["'high'", "nothing", "missing"],
    ),
    "tap extra": ({"groups": {**GROUPS, "more": ["extra"]}}, ["'extra'", "no such tap", "extra"]),
    "other order": ({"groups": {**GROUPS, "features": ["high", "low"]}}, ["'high'", "place"]),
    "other order of groups": (
        {"groups": {"embedding": ["embedding"], "features": ["low", "high"]}},
        ["'embedding'", "place"],
    ),
    "other group": ({"groups": {**GROUPS, "features": ["low"], "more": ["high"]}}, ["'more'"]),
    "other width": ({"width": 9}, ["width 8", "width 9"]),
    "other dtype": ({"dtype": "float16"}, ["float32", "float16"]),
    "other row limit": ({"max_rows": 17}, ["max_rows 16", "max_rows 17"]),
}


@pytest.mark.parametrize("other", OTHER_PLANS)
def test_other_plan_is_refused_with_a_table(
    waiting: SmallChannel, tmp_path: Path, other: str
) -> None:
    """Two configurations that differ in one word: the user must see which, and on which rank."""
    changes, words = OTHER_PLANS[other]
    with refused(PlanMismatchError, channel=NAME, next_step=...) as caught:
        attach(tmp_path, 7, tap_plan(**changes))
    rows = caught[0].rows  # type: ignore[attr-defined]
    assert {row["rank"] for row in rows} == {7}
    assert all(row["expected"] and row["claimed"] and row["problem"] for row in rows)
    head, *table = str(caught[0]).splitlines()
    assert table[0].split() == ["rank", "expected", "claimed", "problem"]
    for word in words:
        assert word in "\n".join(table)
    let_in(waiting, tmp_path)


def test_only_what_differs_is_listed(waiting: SmallChannel, tmp_path: Path) -> None:
    """A slip that drowns among the neighbours that one narrower tap has moved."""
    with refused(PlanMismatchError) as caught:
        attach(tmp_path, 7, tap_plan(width={"low": 7, "high": 8, "embedding": 8}))
    [row] = [row for row in caught[0].rows if "'low'" in row["problem"]]  # type: ignore[attr-defined]
    assert "width 8" in row["expected"]
    assert "width 7" in row["claimed"]
    let_in(waiting, tmp_path)


@pytest.mark.parametrize(
    ("claimed", "problem"),
    [
        (["low"], "missing: high; extra: low"),
        ([], "missing: high"),
        (["high", "nowhere"], "extra: nowhere"),
        (["high", "high"], "twice: high"),
    ],
)
def test_other_claim_is_refused_with_a_table(
    waiting: SmallChannel, tmp_path: Path, claimed: list[str], problem: str
) -> None:
    """A rank that believes it pushes other taps than the mailbox awaits from it."""
    with refused(PlanMismatchError, channel=NAME) as caught:
        attach(tmp_path, 7, taps=claimed)
    [row] = caught[0].rows  # type: ignore[attr-defined]
    assert (row["rank"], row["expected"], row["problem"]) == (7, "high", problem)
    assert problem in str(caught[0])
    waiting.outboxes[7] = attach(tmp_path, 7, taps=["high"])
    waiting.carry()


def test_claims_in_any_order_are_one_claim(tmp_path: Path) -> None:
    """A refusal because of an order that means nothing."""
    with small_channel(tmp_path, ranks=()) as channel:
        for taps in (["low", "embedding"], ["embedding", "low"]):
            attach(tmp_path, 3, taps=taps).close()
        assert states(channel.mailbox)[3] == "away"


def test_table_of_a_large_plan_arrives(tmp_path: Path) -> None:
    """A table that is too long for its frame: the user sees a protocol error, or a time-out."""
    names = [f"model.layers.{n}.self_attn.hidden_states" for n in range(400)]
    plan = TapPlan({"g": names}, 8, "float32", 4)
    place = {"store": f"file://{tmp_path}", "name": NAME}
    with Mailbox(plan, {0: names}, depth=1, **place):
        with refused(PlanMismatchError) as caught:
            Outbox(plan, 0, taps=names[:-1], attach_timeout=LIMIT, **place)
        assert names[-1] in str(caught[0])
        with refused(PlanMismatchError) as caught:
            other = TapPlan({"g": names[::-1]}, 9, "float32", 4)
            Outbox(other, 0, attach_timeout=LIMIT, **place)
        assert "width 9" in str(caught[0])


@pytest.mark.parametrize("letter", ["x", "渡"])
def test_largest_plan_attaches_or_is_refused_where_it_is_made(tmp_path: Path, letter: str) -> None:
    """A plan that no handshake can carry, found out by a time-out that speaks of the address."""
    names = [f"{n}{letter * (128 - len(str(n)))}" for n in range(4096)]
    plan = TapPlan({"g": names}, 1, "float32", 1)
    place = {"store": f"file://{tmp_path}", "name": NAME}
    try:
        mailbox = Mailbox(plan, {0: names}, depth=1, **place)
    except ConfigError as error:
        told = str(error)
        mailbox = None
    if mailbox is None:
        assert "plan" in told
        assert "expected" in told
        return
    with mailbox, Outbox(plan, 0, attach_timeout=LIMIT, **place):
        assert states(mailbox) == {0: "attached"}


# ---- names and secrets


def test_wrong_name_at_the_right_address_is_refused(tmp_path: Path) -> None:
    """A draft that gets another channel's taps: both names must be in the text."""
    place = {"store": f"unix://{tmp_path}/mailbox.sock"}
    with Mailbox(PLAN, SOURCES, name=NAME, **place) as mailbox:
        with refused(AttachError, channel="teacher", rank=7, next_step=...) as caught:
            Outbox(PLAN, 7, name="teacher", attach_timeout=LIMIT, **place)
        assert NAME in str(caught[0])
        with Outbox(PLAN, 7, name=NAME, attach_timeout=LIMIT, **place):
            assert states(mailbox)[7] == "attached"


def test_wrong_name_in_a_store_is_not_found(waiting: SmallChannel, tmp_path: Path) -> None:
    """A time-out that does not say where it looked for which name."""
    facts = {"channel": "teacher", "rank": 7, "last_progress": ..., "next_step": ..., "seen": ...}
    with refused(AttachTimeout, limit=SOON, **facts) as caught:
        attach(tmp_path, 7, name="teacher", attach_timeout=SOON)
    assert f"{tmp_path}/teacher" in str(caught[0])
    assert caught[0].waited >= SOON  # type: ignore[operator]
    assert "200 ms" in str(caught[0])
    let_in(waiting, tmp_path)


@contextmanager
def nothing_told(caplog: pytest.LogCaptureFixture, mailbox: Mailbox) -> Iterator[list[Any]]:
    """Look for the secrets in whatever a user, a log or a report gets to see."""
    caplog.set_level(logging.DEBUG)
    seen: list[Any] = []
    yield seen
    told = [caplog.text, repr(mailbox), str(mailbox.info()), str(vars(mailbox._service))]
    for error in seen:
        told += [
            str(error),
            repr(error),
            str(vars(error)),
            "".join(traceback.format_exception(error)),
        ]
    for text in told:
        for secret in (SECRET, WRONG):
            assert secret not in text


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (SECRET, WRONG),
        (SECRET, None),
        (None, SECRET),
        (SECRET, SECRET + "!"),
        (SECRET, SECRET[:-1]),
    ],
    ids=["wrong", "missing here", "missing there", "longer", "shorter"],
)
def test_wrong_secret_is_refused_and_never_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, ours: str | None, theirs: str | None
) -> None:
    """A stranger let in, or a secret in a text, a log, a traceback or `info`."""
    with small_channel(tmp_path, ranks=(), secret=ours) as channel:
        with nothing_told(caplog, channel.mailbox) as told:
            with refused(AttachError, channel=NAME, rank=7, next_step=...) as caught:
                attach(tmp_path, 7, secret=theirs)
            assert "secret" in str(caught[0])
            told += caught
        for rank in SOURCES:
            channel.outboxes[rank] = attach(tmp_path, rank, secret=ours)
        channel.carry()


def test_what_carries_the_secret_does_not_show_it() -> None:
    """A secret in the first debugger, or log of an object, that looks at a failed attach."""
    request = Request(NAME, PLAN, 7, None, None, "auto", 7.0, SECRET.encode())
    assert SECRET not in repr(request)
    assert NAME in repr(request)


def test_half_made_objects_can_be_shown() -> None:
    """A constructor's error that a debugger, or a traceback with locals, turns into another one."""
    for kind in (Mailbox, Outbox):
        assert kind.__name__ in repr(kind.__new__(kind))


def test_secret_may_come_from_the_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A secret in the environment that one side does not look at."""
    monkeypatch.setenv("TAPCHANNEL_SECRET", SECRET)
    with small_channel(tmp_path) as channel:
        channel.carry()
        channel.outboxes.pop(7).close()
        monkeypatch.delenv("TAPCHANNEL_SECRET")
        with refused(AttachError):
            attach(tmp_path, 7)
        channel.outboxes[7] = attach(tmp_path, 7, secret=SECRET.encode())
        channel.carry()


# ---- every place to meet


def torch_file_store(folder: Path) -> tuple[object, object]:
    """Give torch's own store over a file."""
    return tuple(dist.FileStore(str(folder / "torch"), 2) for _ in range(2))  # type: ignore[return-value]


def hash_store(folder: Path) -> tuple[object, object]:
    """Give a store inside this process."""
    store = dist.HashStore()
    return store, store


def tcp_store(folder: Path) -> tuple[object, object]:
    """Give a TCPStore and a client of it."""
    limit = timedelta(seconds=LIMIT)
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=limit)
    return master, dist.TCPStore("127.0.0.1", master.port, is_master=False, timeout=limit)


def tcp_url(folder: Path) -> tuple[object, object]:
    """Give a TCPStore and its URL."""
    master, _ = tcp_store(folder)
    return master, f"tcp://127.0.0.1:{master.port}"  # type: ignore[attr-defined]


def prefixed_store(folder: Path) -> tuple[object, object]:
    """Give a store behind a prefix, as process groups hand out."""
    store = dist.PrefixStore("group", dist.HashStore())
    return store, store


def file_url(folder: Path) -> tuple[object, object]:
    """Give a folder."""
    return f"file://{folder}/meet", f"file://{folder}/meet"


def unix_url(folder: Path) -> tuple[object, object]:
    """Give a path that is no URL-safe one."""
    return f"unix://{folder}/my mailbox#1.sock", f"unix://{folder}/my mailbox#1.sock"


@pytest.mark.parametrize(
    "make",
    [torch_file_store, hash_store, tcp_store, tcp_url, prefixed_store, file_url, unix_url],
)
def test_every_store_brings_both_sides_together(
    make: Callable[[Path], tuple[object, object]], tmp_path: Path
) -> None:
    """A kind of store that only one of the two sides can use."""
    here, there = make(tmp_path)
    with Mailbox(PLAN, SOURCES, store=here, name=NAME, timeout=LIMIT) as mailbox:
        channel = SmallChannel(mailbox, {})
        for rank in SOURCES:
            channel.outboxes[rank] = Outbox(PLAN, rank, store=there, name=NAME, timeout=LIMIT)
        channel.carry()
        channel.close()


def test_socket_at_a_path_is_for_this_user_and_goes_with_its_mailbox(tmp_path: Path) -> None:
    """A socket that others may use, or a file that is left behind."""
    path = tmp_path / "mailbox.sock"
    with Mailbox(PLAN, SOURCES, store=f"unix://{path}") as mailbox:
        assert path.stat().st_mode & 0o777 == 0o600
        assert mailbox.address == f"unix://{path}"
    assert not path.exists()


def test_live_mailbox_keeps_its_path(tmp_path: Path) -> None:
    """A second mailbox that takes over the path of one that is in use."""
    place = {"store": f"unix://{tmp_path}/mailbox.sock", "name": NAME}
    with Mailbox(PLAN, SOURCES, timeout=LIMIT, **place) as mailbox:
        with refused(ConfigError, seen=..., next_step=...) as caught:
            Mailbox(PLAN, SOURCES, **place)
        assert str(tmp_path) in str(caught[0])
        channel = SmallChannel(mailbox, {rank: Outbox(PLAN, rank, **place) for rank in SOURCES})
        channel.carry()
        channel.close()


def test_path_of_a_dead_mailbox_is_taken_over(tmp_path: Path) -> None:
    """A socket that a killed mailbox left, and that keeps its restart out until it is removed."""
    path = tmp_path / "mailbox.sock"
    dead = socket.socket(socket.AF_UNIX)
    dead.bind(str(path))
    dead.close()
    with Mailbox(PLAN, SOURCES, store=f"unix://{path}"), Outbox(PLAN, 7, store=f"unix://{path}"):
        pass


def test_path_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    """A file of the user's that is removed for a socket."""
    path = tmp_path / "notes.txt"
    path.write_text("precious")
    with refused(ConfigError, next_step=...):
        Mailbox(PLAN, SOURCES, store=f"unix://{path}")
    assert path.read_text() == "precious"


def test_closed_mailbox_leaves_its_successor_s_socket(tmp_path: Path) -> None:
    """A path removed by a mailbox that no longer owns it: its successor could not be reached."""
    path = tmp_path / "mailbox.sock"
    first = Mailbox(PLAN, SOURCES, store=f"unix://{path}")
    path.unlink()
    with Mailbox(PLAN, SOURCES, store=f"unix://{path}"):
        first.close()
        Outbox(PLAN, 7, store=f"unix://{path}", attach_timeout=LIMIT).close()


@pytest.mark.parametrize(
    "path",
    ["/nowhere/mailbox.sock", "/dev/null", "/dev/null/mailbox.sock", "/tmp/" + "x" * 120, "/tmp"],
    ids=lambda path: path[:24],
)
def test_path_that_cannot_work_is_a_typed_error(path: str) -> None:
    """An OSError that reaches the user bare, on either side."""
    with refused(ConfigError, AttachError, next_step=...) as caught:
        Mailbox(PLAN, SOURCES, store=f"unix://{path}")
    assert path in str(caught[0])
    with refused(ConfigError, AttachError, AttachTimeout, next_step=...) as caught:
        Outbox(PLAN, 7, store=f"unix://{path}", attach_timeout=SOON)
    assert path in str(caught[0])


# ---- stale, late and missing


def test_stale_address_is_told_and_waited_out(tmp_path: Path) -> None:
    """An outbox that gives up on an old address at once, or does not say why it waits."""
    with small_channel(tmp_path, ranks=()) as first:
        stale = first.mailbox.address
    with refused(AttachTimeout, channel=NAME, rank=7, last_progress=...) as caught:
        attach(tmp_path, 7, attach_timeout=SOON)
    assert stale in str(caught[0])
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(attach, tmp_path, 7)
        with small_channel(tmp_path, ranks=(3,)) as second:
            second.outboxes[7] = coming.result(LIMIT)
            second.carry()


def test_outbox_may_come_before_its_mailbox(tmp_path: Path) -> None:
    """A start in the wrong order that fails, or that costs more than a moment."""
    with ThreadPoolExecutor() as pool:
        coming = {rank: pool.submit(attach, tmp_path, rank) for rank in SOURCES}
        with small_channel(tmp_path, ranks=()) as channel:
            channel.mailbox.wait_ready(LIMIT)
            channel.outboxes = {rank: come.result(LIMIT) for rank, come in coming.items()}
            channel.carry()


def test_mailbox_restarted_under_its_name_is_found(channel: SmallChannel, tmp_path: Path) -> None:
    """An outbox of the old life that goes on into the new one, or a new one that finds the old."""
    old = channel.outboxes[7]
    channel.carry()
    channel.mailbox.close()
    with small_channel(tmp_path) as second:
        with pytest.raises((PeerLostError, ChannelClosed)) as raised:
            old.open_pass(9, 1)
        assert raised.value.channel == NAME
        second.carry()
        old.close()
        second.carry()


def test_wait_ready_lists_who_is_missing(tmp_path: Path) -> None:
    """A start that hangs, and nobody knows for whom."""
    with small_channel(tmp_path, ranks=()) as channel:
        facts = {"channel": NAME, "seen": ..., "next_step": ...}
        with refused(AttachTimeout, limit=SOON, **facts) as caught:
            channel.mailbox.wait_ready(SOON)
        for said in ("2 producers", "rank 3", "embedding", "low", "rank 7", "high", "200 ms"):
            assert said in str(caught[0])
        assert caught[0].waited >= SOON  # type: ignore[operator]
        channel.outboxes[3] = attach(tmp_path, 3)
        with refused(AttachTimeout, **facts) as caught:
            channel.mailbox.wait_ready(0)
        assert "rank 3" not in str(caught[0])
        assert "rank 7" in str(caught[0])
        channel.outboxes[7] = attach(tmp_path, 7)
        channel.mailbox.wait_ready(0)
        channel.carry()


def test_wait_ready_says_whom_it_refused(tmp_path: Path) -> None:
    """A rank that is missing because it was refused, and the mailbox's side keeps the reason."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        with refused(PlanMismatchError):
            attach(tmp_path, 7, tap_plan(width=9))
        with refused(AttachTimeout, last_progress=...) as caught:
            channel.mailbox.wait_ready(SOON)
        assert "disagree on the tap plan" in str(caught[0].last_progress)


def test_wait_ready_ends_when_the_mailbox_is_closed(tmp_path: Path) -> None:
    """A thread that waits on for producers who cannot come any more."""
    with small_channel(tmp_path, ranks=()) as channel, ThreadPoolExecutor() as pool:
        waiting = pool.submit(channel.mailbox.wait_ready, LIMIT)
        channel.mailbox.close()
        with refused(ChannelClosed, channel=NAME):
            waiting.result(LIMIT)


def test_producer_may_attach_in_an_open_pass(waiting: SmallChannel, tmp_path: Path) -> None:
    """A rank that starts late and is barred, or that misses the credit which was given before."""
    with waiting.open_pass(3):
        outbox = waiting.outboxes[7] = attach(tmp_path, 7)
        ours = outbox.open_pass(waiting.step, 3)
        for microbatch in range(3):
            waiting.deliver(microbatch)
        ours.close()
    waiting.carry()


# ---- again


def test_lane_is_free_again_after_a_clean_close(channel: SmallChannel, tmp_path: Path) -> None:
    """An outbox that is remembered after it has gone."""
    for life in range(2, 5):
        channel.outboxes.pop(7).close()
        channel.outboxes[7] = attach(tmp_path, 7)
        channel.carry()
        [lane] = [lane for lane in channel.mailbox.info()["lanes"] if lane["rank"] == 7]  # type: ignore[attr-defined]
        assert lane["attaches"] == life


def test_outbox_that_closes_at_once_leaves_its_lane_free(
    waiting: SmallChannel, tmp_path: Path
) -> None:
    """A peer that is gone before "live" was sent, taken for one whose copies are in flight."""
    for _ in range(30):
        attach(tmp_path, 7, attach_timeout=2).close()
    let_in(waiting, tmp_path)


def _push_one(link: Link, folder: Path, step: int) -> None:
    """Push one microbatch of a pass and stay until killed."""
    outbox = attach(folder, 7)
    outbox.open_pass(step, 2)
    outbox.push(0, "high", ROWS)
    link.reach("pushed")
    link.receive()


def test_killed_producer_is_lost_fenced_and_replaced(waiting: SmallChannel, tmp_path: Path) -> None:
    """A dead rank that is not noticed; a restart let in too early, never, or in mid-pass."""
    with Children(limit=30) as children:
        waiting.step = 1
        for side in (waiting.mailbox, waiting.outboxes[3]):
            side.open_pass(1, 2)
        child = children.start(_push_one, tmp_path, 1)
        child.wait_for("pushed")
        waiting.deliver(0, {"high": ROWS})
        child.kill()
    waiting.outboxes[3].push(1, "low", ROWS)
    waiting.outboxes[3].push(1, "embedding", ROWS)
    lost = {"rank": 7, "lane": 1, "pid": child.pid, "host": ..., "next_step": ..., "cause": ...}
    with refused(PeerLostError, channel=NAME, key=..., **lost):
        waiting.mailbox.recv(1, timeout=LIMIT)
    assert states(waiting.mailbox)[7] == "lost"

    restarted = waiting.outboxes[7] = attach(tmp_path, 7)
    restarted.open_pass(1, 2)
    with refused(PassAborted, channel=NAME, rank=7) as caught:
        restarted.push(1, "high", ROWS)
    assert "restarted in the middle" in str(caught[0])
    with refused(PeerLostError, rank=7):
        waiting.mailbox.recv(1, timeout=LIMIT)
    waiting.abort()
    waiting.carry()


def test_pass_is_not_opened_over_a_lost_producer(waiting: SmallChannel, tmp_path: Path) -> None:
    """A pass that can only time out: the rank has not come back yet."""
    with Children(limit=30) as children:
        child = children.start(_push_one, tmp_path, 1)
        child.wait_for("pushed")
        child.kill()
    with refused(PeerLostError, channel=NAME, rank=7, pid=child.pid, next_step=...) as caught:
        waiting.mailbox.open_pass(1, 1)
    assert "wait_ready" in str(caught[0].next_step)
    let_in(waiting, tmp_path)


def test_clean_restart_in_mid_pass_is_barred_too(channel: SmallChannel, tmp_path: Path) -> None:
    """An outbox that comes back in the same pass and cannot know which keys were pushed."""
    channel.open_next(2)
    channel.outboxes.pop(7).close()
    again = channel.outboxes[7] = attach(tmp_path, 7)
    again.open_pass(channel.step, 2)
    with refused(PassAborted, channel=NAME, rank=7):
        again.push(0, "high", ROWS)
    channel.abort()
    channel.carry()


def _leave_the_socket_and_stay(link: Link, address: str) -> None:
    """Attach, end the socket, and live on: copies may still be in flight."""
    with HandmadeOutbox(address) as peer:
        peer.go_live()
        link.reach("live")
        link.receive()
    link.reach("left")
    link.receive()


def test_lane_is_fenced_until_its_process_has_ended(waiting: SmallChannel, tmp_path: Path) -> None:
    """A socket's end taken for the end of the copies: the next life writes into the same slots."""
    with Children(limit=30) as children:
        child = children.start(_leave_the_socket_and_stay, waiting.mailbox.address)
        child.wait_for("live")
        child.send()
        child.wait_for("left")
        with refused(AttachTimeout, channel=NAME, rank=7, last_progress=...) as caught:
            attach(tmp_path, 7, attach_timeout=SOON)
        assert "not fenced" in str(caught[0].last_progress)
        assert str(child.pid) in str(caught[0].last_progress)
        assert states(waiting.mailbox)[7] == "lost"
        child.kill()
        let_in(waiting, tmp_path)


def _refuse_the_last_word(link: Link, folder: Path, address: str) -> None:
    """Take part in a handshake that ends before "live", then attach as one should."""
    with HandmadeOutbox(address) as peer:
        offer = peer.ask()
        peer.write_probe(offer)
        peer.link.shutdown(socket.SHUT_RD)  # "live" cannot be sent any more
        with contextlib.suppress(BrokenPipeError):
            peer.ready()
        link.reach("ready sent")
        link.receive()
    outbox = attach(folder, 7)
    link.reach("attached")
    link.receive()
    outbox.close()


def test_handshake_revoked_at_the_last_word_leaves_the_lane_free(
    waiting: SmallChannel, tmp_path: Path
) -> None:
    """A lane that stays taken, or unfenced for as long as its process lives: it never went live."""
    with Children(limit=30) as children:
        child = children.start(_refuse_the_last_word, tmp_path, waiting.mailbox.address)
        child.wait_for("ready sent")
        until(lambda: waiting.mailbox._service.refusals, LIMIT)
        assert states(waiting.mailbox)[7] != "attached"
        child.send()
        child.wait_for("attached")
        waiting.mailbox.wait_ready(LIMIT)
        waiting.mailbox.open_pass(1, 1)
        waiting.mailbox.abort("seen enough")
        child.send()


# ---- nothing piles up


def _attach_and_close(link: Link, folder: Path, cycles: int) -> list[Footprint]:
    """Attach and close again and again; count descriptors and threads every so often."""
    counts: list[Footprint] = []
    for cycle in range(cycles):
        with attach(folder, 7) as outbox:
            if cycle % 2:
                outbox.open_pass(cycle + 1, 1)
        if cycle % 20 == 19:
            counts.append(Footprint.now())
    return counts


def test_descriptors_and_threads_stay_flat_over_many_attaches(
    waiting: SmallChannel, tmp_path: Path
) -> None:
    """A descriptor or a thread for each attach, on either side: a job of days runs out of them."""
    with Children(limit=40) as children:
        child = children.start(_attach_and_close, tmp_path, 200)
        here: list[Footprint] = []
        while len(here) < 10:
            lanes: Any = waiting.mailbox.info()["lanes"]
            if lanes[1]["attaches"] >= 20 * (len(here) + 1):
                here.append(Footprint.now())
            time.sleep(0.001)  # not synchronisation: leaves the core to the child
        there = child.result()
    assert len(set(there)) == 1, there
    # One handshake's thread and one peer's descriptors may just be on their way in or out.
    assert max(count.descriptors for count in here) <= here[0].descriptors + 6, here
    assert max(count.threads for count in here) <= here[0].threads + 2, here
    let_in(waiting, tmp_path)


def refuse_plan(folder: Path) -> None:
    """Be refused for the plan."""
    with refused(PlanMismatchError):
        attach(folder, 7, tap_plan(max_rows=MAX_ROWS + 1))


def refuse_transport(folder: Path) -> None:
    """Refuse what the mailbox offers."""
    with refused(TransportUnavailable):
        attach(folder, 7, transport="cuda_ipc")


def come_too_early(folder: Path) -> None:
    """Find nobody."""
    with refused(AttachTimeout):
        attach(folder, 7, name="nobody", attach_timeout=0)


@pytest.mark.parametrize("fail", [refuse_plan, refuse_transport, come_too_early])
def test_failed_attaches_leave_nothing_behind(
    waiting: SmallChannel, tmp_path: Path, fail: Callable[[Path], None]
) -> None:
    """A descriptor, a mapping or a thread for each attach that fails."""
    fail(tmp_path)
    before = Footprint.at_rest()
    for _ in range(20):
        fail(tmp_path)
    assert before.grown() is None
    let_in(waiting, tmp_path)


def test_mailboxes_leave_nothing_behind(tmp_path: Path) -> None:
    """A socket, a thread or an arena for each mailbox."""

    def cycle() -> None:
        with small_channel(tmp_path) as channel:
            channel.carry(1)

    cycle()
    before = Footprint.at_rest()
    for _ in range(10):
        cycle()
    assert before.grown() is None


@pytest.mark.parametrize("store", ["file:///dev/null/folder", "unix:///dev/null"])
def test_mailbox_that_could_not_be_made_leaves_nothing_behind(tmp_path: Path, store: str) -> None:
    """A constructor that fails after its arena, its threads or its socket were made."""
    before = Footprint.at_rest()
    for _ in range(5):
        with pytest.raises((TapChannelError, OSError)):
            Mailbox(PLAN, SOURCES, store=store, name=NAME)
    assert before.grown() is None


def test_mailbox_that_nobody_holds_is_gone(tmp_path: Path) -> None:
    """A mailbox that was dropped without `close` and keeps its slots, socket and threads."""
    before = Footprint.at_rest()
    for _ in range(5):
        Mailbox(PLAN, SOURCES, store=f"file://{tmp_path}", name=NAME)
    assert before.grown() is None


def test_closed_mailbox_gives_its_memory_back(tmp_path: Path) -> None:
    """A trainer that keeps the closed mailbox as an attribute, and its slots with it."""
    with small_channel(tmp_path) as channel:
        channel.carry()
    kept = [name for name in descriptors().values() if f"tapchannel:{NAME}" in name]
    assert kept == []


def test_backlog_that_is_full_is_waited_out(tmp_path: Path) -> None:
    """Thousands of ranks that attach at once: a full backlog's EAGAIN is no refusal."""
    path = tmp_path / "busy.sock"
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        with socket.socket(socket.AF_UNIX) as first, socket.socket(socket.AF_UNIX) as second:
            for one in (first, second):
                one.setblocking(False)
                one.connect_ex(str(path))
            with refused(AttachTimeout, channel=NAME, rank=7, last_progress=...):
                Outbox(PLAN, 7, store=f"unix://{path}", name=NAME, attach_timeout=SOON)
