"""Who is let in to a mailbox, and how somebody is put out again."""

from __future__ import annotations

import logging
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.channels import BRIEFLY, UCX, until
from support.handmade_peers import HandmadeOutbox, dial, ended, hello, receive
from support.small_channel import (
    LIMIT,
    NAME,
    SOURCES,
    SmallChannel,
    attach,
    refused,
    small_channel,
    states,
)
from tapchannel import Outbox
from tapchannel.descriptor import Challenge, proof
from tapchannel.errors import AttachError, AttachTimeout, ConfigError, PeerLostError
from tapchannel.wire import CHALLENGE, HELLO, OFFER, REFUSAL, send_frame

SECRET = "correct horse battery staple"
ROWS = torch.ones(5, 8)


# ---- a handshake that was overheard


def test_replayed_handshake_is_refused(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a proof that holds for more than one challenge: who overheard one is let in."""
    caplog.set_level(logging.WARNING)
    with small_channel(tmp_path, ranks=(), secret=SECRET) as channel:
        with dial(channel.mailbox.address) as link:
            fields, _ = receive(link, CHALLENGE)
            said = Challenge.parse(fields)
            nonce = bytes(range(32))
            overheard = hello(proof=proof(SECRET.encode(), "outbox", said, nonce, 7).hex())
            send_frame(link, HELLO, overheard)
            _, fds = receive(link, OFFER)  # once, it is right
            for fd in fds:
                os.close(fd)
        for _ in range(3):
            with dial(channel.mailbox.address) as link:
                receive(link, CHALLENGE)
                send_frame(link, HELLO, overheard)
                fields, fds = receive(link, REFUSAL)
                assert fds == []
                assert "secret" in fields.text("what", 512)
                assert ended(link)
        assert states(channel.mailbox)[7] == "away"
        until(lambda: sum("secret" in one.getMessage() for one in caplog.records) == 3, LIMIT)
        assert str(overheard["proof"]) not in caplog.text
        for rank in SOURCES:
            channel.outboxes[rank] = attach(tmp_path, rank, secret=SECRET)
        channel.carry()


# ---- a peer that hides its end


@pytest.mark.parametrize("last_words", [b"", b"\0", b"x" * 5000])
def test_bytes_after_the_handshake_do_not_hide_a_peers_end(
    tmp_path: Path, last_words: bytes
) -> None:
    """Catches a lane that a dead peer keeps for ever, by a byte that nobody reads."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        with HandmadeOutbox(channel.mailbox.address) as peer:
            peer.go_live()
            assert states(channel.mailbox)[7] == "attached"
            peer.link.sendall(last_words)
        until(lambda: states(channel.mailbox)[7] == "lost", LIMIT)


def test_an_outbox_that_came_too_late_for_live_may_come_again(tmp_path: Path) -> None:
    """Catches a lane that stays fenced as long as a process lives which has put nothing by it."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        with HandmadeOutbox(channel.mailbox.address) as peer:
            peer.write_probe(peer.ask())
            peer.ready()
            until(lambda: states(channel.mailbox)[7] == "attached", LIMIT)
        until(lambda: states(channel.mailbox)[7] == "away", LIMIT)
        channel.outboxes[7] = attach(tmp_path, 7)
        channel.carry()


# ---- a crowd at the door


def test_refusals_do_not_flood_the_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Catches a line of the log for each time that somebody knocks."""
    caplog.set_level(logging.WARNING)
    knocks = 100
    with small_channel(tmp_path) as channel:
        began = time.monotonic()
        for _ in range(knocks):
            knock(channel.mailbox.address)
        seconds = time.monotonic() - began
        lines = [one for one in caplog.records if "refused a peer" in one.getMessage()]
        assert 8 <= len(lines) <= 8 * (seconds + 1)
        if len(lines) < knocks:  # else this machine is so slow that the limit was never met
            until(lambda: knock(channel.mailbox.address) and "more refused since" in caplog.text)
        channel.carry()


def knock(address: str) -> bool:
    """Say something that is refused."""
    with dial(address) as link:
        receive(link, CHALLENGE)
        link.sendall(b"GET / HTTP/1.1\r\n")
        return ended(link)


# ---- a lane is revoked


@pytest.fixture(params=[None, UCX.transport], ids=["shm", "ucx"])
def transport(request: pytest.FixtureRequest) -> str | None:
    """Give the transport under test."""
    if request.param == "ucx":
        request.applymarker(pytest.mark.ucx)
    return request.param


def revocable(transport: str | None) -> dict[str, object]:
    """Give the mailbox's settings."""
    return {} if transport is None else {"transport": transport, "listen": UCX.listen}


def test_revoked_lane_ends_and_the_others_are_heard_of_it(tmp_path: Path) -> None:
    """Catches a revoked producer whose taps are still taken, or that is not told why."""
    with small_channel(tmp_path) as channel:
        channel.carry()
        channel.open_next(2)
        channel.outboxes[7].push(0, "high", ROWS)
        channel.mailbox.revoke(7, "its taps are wrong")
        assert states(channel.mailbox) == {3: "attached", 7: "revoked"}
        for tap in ("embedding", "low"):
            channel.outboxes[3].push(0, tap, ROWS)
        with refused(PeerLostError, rank=7, lane=1, channel=NAME, next_step=...) as told:
            channel.mailbox.recv(0, wait="host", timeout=LIMIT)
        assert "revoked" in str(told[0])
        assert "its taps are wrong" in str(told[0])
        with refused(PeerLostError, rank=7) as heard:
            channel.outboxes[7].push(1, "high", ROWS)
        assert "its taps are wrong" in str(heard[0])
        channel.abort()
        with refused(PeerLostError, rank=7):
            channel.mailbox.open_pass(99, 1)


def test_revoke_wakes_who_waits(tmp_path: Path) -> None:
    """Catches a recv that waits for a revoked producer to its deadline."""
    with small_channel(tmp_path) as channel, ThreadPoolExecutor() as pool:
        channel.open_next(1)
        waiting = pool.submit(channel.mailbox.recv, 0, wait="host", timeout=LIMIT)
        began = time.monotonic()
        channel.mailbox.revoke(7)
        with pytest.raises(PeerLostError, match="revoked"):
            waiting.result(LIMIT)
        assert time.monotonic() - began < LIMIT / 2
        channel.abort()


def test_nobody_is_let_in_on_a_revoked_lane_before_the_reset(
    tmp_path: Path, transport: str | None
) -> None:
    """Catches a revoked producer that attaches again at once; or a rank that is lost for good."""
    with small_channel(tmp_path, ranks=(), **revocable(transport)) as channel:
        for rank in SOURCES:
            channel.outboxes[rank] = reattach(tmp_path, rank, transport)
        channel.carry()
        channel.mailbox.revoke(7, "")
        channel.mailbox.revoke(7, "twice is fine")
        with refused(AttachError, rank=7, next_step=...) as told:
            reattach(tmp_path, 7, transport)
        assert "revoked" in str(told[0])
        channel.mailbox.reset()
        channel.step = 0
        if transport is None:
            # Its memory stays mapped by an outbox that lives: nobody is let in beside it.
            with refused(AttachTimeout, rank=7) as kept:
                reattach(tmp_path, 7, transport, BRIEFLY)
            assert "not fenced" in str(kept[0])
            channel.outboxes[7].close()
        channel.outboxes[7].close()
        channel.outboxes[7] = reattach(tmp_path, 7, transport)
        channel.carry()


def reattach(folder: Path, rank: int, transport: str | None, limit: float = LIMIT) -> Outbox:
    """Attach an outbox by the transport under test."""
    return attach(folder, rank, attach_timeout=limit, transport=transport or "auto")


def test_a_lane_may_be_revoked_before_anybody_came(tmp_path: Path) -> None:
    """Catches a revoke that needs somebody to put out."""
    with small_channel(tmp_path, ranks=(3,)) as channel:
        channel.mailbox.revoke(7)
        with refused(AttachError, rank=7):
            attach(tmp_path, 7)
        channel.mailbox.reset()
        channel.outboxes[7] = attach(tmp_path, 7)
        carry_anew(channel)


def carry_anew(channel: SmallChannel) -> None:
    """See that the channel works in its new epoch."""
    channel.step = 0
    channel.carry()


def test_a_rank_without_a_lane_cannot_be_revoked(tmp_path: Path) -> None:
    """Catches a slip in the rank that revokes nobody, or somebody else."""
    with small_channel(tmp_path) as channel:
        with refused(ConfigError, seen="5", expected="one of 3, 7"):
            channel.mailbox.revoke(5)
        channel.carry()
        channel.mailbox.close()
        channel.mailbox.revoke(7)  # closed: there is nothing left to take away
