"""The mailbox's service over TCP: the same handshake, the same secret, the same patience.

The peers are made by hand and ask for host memory, which does not cross a network: they are refused
last of all, once their secret, name and plan have been found right.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import HashStore

from support.handmade_peers import NONCE, HandmadeOutbox, dial, ended, hello, receive
from support.network import needs_ipv6, taken_ports
from support.small_channel import (
    LIMIT,
    NAME,
    PLAN,
    SOURCES,
    Footprint,
    attach,
    small_channel,
    states,
)
from tapchannel import Mailbox, interfaces, service, sockets
from tapchannel.descriptor import proof
from tapchannel.errors import ConfigError
from tapchannel.stores import rendezvous
from tapchannel.transport import ucx_context
from tapchannel.ucx_library import UcxChoice
from tapchannel.wire import CHALLENGE, HELLO, OFFER, REFUSAL, Fields, send_frame

SECRET = "correct horse battery"
WRONG = "correct horse barrery"


@contextmanager
def mailbox_at(listen: str | None, **settings: Any) -> Iterator[Mailbox]:
    """Make a mailbox that listens there."""
    place = {"store": HashStore(), "name": NAME}
    with Mailbox(PLAN, SOURCES, **{"listen": listen, "depth": 2, **place, **settings}) as made:
        yield made


def port_of(address: str) -> int:
    """Give the port of an address."""
    return int(address.rpartition(":")[2])


def knock(address: str, secret: str | None) -> Fields:
    """Say hello, proven with this secret; give the answer."""
    with HandmadeOutbox(address) as peer:
        known = {}
        if secret is not None:
            made = proof(secret.encode(), "outbox", peer.challenge, NONCE, 7)
            known = {"proof": made.hex()}
        send_frame(peer.link, HELLO, hello(**known))
        fields, fds = receive(peer.link, OFFER, REFUSAL)
        for fd in fds:
            os.close(fd)
        return fields


def is_let_in(fields: Fields) -> bool:
    """Tell whether the answer is the last refusal: the peer is right, only its transport is not."""
    return fields.kind == REFUSAL and fields.text("error", 64) == "TransportUnavailable"


# ---- the way in


@pytest.mark.parametrize(
    ("listen", "form"),
    [
        ("tcp://127.0.0.1", "tcp://127.0.0.1:{}"),
        ("tcp://127.0.0.1", "tcp://localhost:{}"),
        ("tcp://localhost", "tcp://localhost:{}"),
        ("tcp://lo", "tcp://127.0.0.1:{}"),
        pytest.param("tcp://[::1]", "tcp://[::1]:{}", marks=needs_ipv6),
        ("tcp://*", "tcp://127.0.0.1:{}"),
        pytest.param("tcp://*", "tcp://[::1]:{}", marks=needs_ipv6),
    ],
)
def test_outbox_of_the_network_gets_its_answer(listen: str, form: str) -> None:
    """A service that listens on the network and does not speak there."""
    with mailbox_at(listen, secret=SECRET) as mailbox:
        address = form.format(port_of(mailbox.addresses[1]))
        fields = knock(address, SECRET)
        assert is_let_in(fields)
        assert "rank 7" in fields.text("what", 512)


def test_every_published_address_leads_to_this_mailbox() -> None:
    """An address in the store that is another host's, or nobody's."""
    store = HashStore()
    with mailbox_at("tcp://*", secret=SECRET, store=store) as mailbox:
        published = rendezvous(store, NAME).lookup()
        assert published == mailbox.addresses
        assert mailbox.address == published[0]
        assert published[0].startswith("unix://@")
        assert mailbox.info()["address"] == published[0]
        assert mailbox.info()["addresses"] == list(published)
        own = {ip for _, ip in interfaces.addresses()}
        if not all(ip.is_loopback for ip in own):
            assert not any("127." in address for address in published[1:])
        challenges = []
        for address in published:
            with HandmadeOutbox(address) as peer:
                challenges.append(peer.challenge.mailbox_id)
        assert len(challenges) >= 2
        assert len(set(challenges)) == 1


def test_this_host_only_unless_asked_otherwise() -> None:
    """A mailbox that opens a port nobody asked for."""
    with mailbox_at(None) as mailbox:
        assert mailbox.addresses == (mailbox.address,)
        assert mailbox.address.startswith("unix://@")


def test_port_comes_from_the_range() -> None:
    """A firewall's range that is left."""
    with taken_ports(3) as taken:
        low, high = taken[0].getsockname()[1], taken[2].getsockname()[1]
        taken[1].close()
        with mailbox_at(f"tcp://127.0.0.1:{low}-{high}") as mailbox:
            assert mailbox.addresses[1] == f"tcp://127.0.0.1:{low + 1}"
            assert is_let_in(knock(mailbox.addresses[1], None))


def test_outboxes_of_this_host_attach_as_before(tmp_path: Path) -> None:
    """A mailbox on the network that its own host's outboxes cannot attach to."""
    with small_channel(tmp_path, listen="tcp://127.0.0.1") as channel:
        channel.carry()


# ---- the secret


@pytest.mark.parametrize("theirs", [WRONG, None], ids=["wrong", "none"])
def test_without_the_secret_nobody_is_let_in(theirs: str | None) -> None:
    """A stranger of the network who is shown the memory's handles, or takes a lane."""
    with mailbox_at("tcp://127.0.0.1", secret=SECRET) as mailbox:
        fields = knock(mailbox.addresses[1], theirs)
        assert fields.kind == REFUSAL
        assert fields.text("error", 64) == "AttachError"
        assert "secret" in fields.text("what", 512)
        assert states(mailbox)[7] == "away"
        assert is_let_in(knock(mailbox.addresses[1], SECRET))


def test_open_mailbox_needs_a_secret_or_a_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mailbox of all hosts that was started without a thought; one that cannot be had at all."""
    monkeypatch.delenv("TAPCHANNEL_SECRET", raising=False)
    before = Footprint.at_rest()
    with pytest.raises(ConfigError, match="secret") as raised:
        Mailbox(PLAN, SOURCES, store=HashStore(), listen="tcp://*")
    assert "allow_no_secret=True" in str(raised.value)
    assert before.grown() is None
    with mailbox_at("tcp://*", allow_no_secret=True) as mailbox:
        assert is_let_in(knock(mailbox.addresses[1], None))
    monkeypatch.setenv("TAPCHANNEL_SECRET", SECRET)
    with mailbox_at("tcp://*") as mailbox:
        assert not is_let_in(knock(mailbox.addresses[1], None))
        assert is_let_in(knock(mailbox.addresses[1], SECRET))


def test_mailbox_that_cannot_listen_leaves_nothing(tmp_path: Path) -> None:
    """Slots, sockets or an address in the store, of a mailbox that never was."""
    before = Footprint.at_rest()
    with taken_ports(1) as taken:
        place = {"store": f"file://{tmp_path}", "name": NAME}
        port = taken[0].getsockname()[1]
        with pytest.raises(ConfigError, match="port is taken"):
            Mailbox(PLAN, SOURCES, listen=f"tcp://127.0.0.1:{port}", **place)
    assert before.grown() is None
    assert list(tmp_path.iterdir()) == []


# ---- patience


def test_silent_peers_of_the_network_hold_up_nobody(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A crowd of strangers that keeps the host's own outboxes, or the patient ones, out."""
    monkeypatch.setattr(service, "HANDSHAKE_LIMIT_S", 2.5)
    with small_channel(tmp_path, ranks=(), listen="tcp://127.0.0.1") as channel:
        remote = channel.mailbox.addresses[1]
        silent = [dial(remote) for _ in range(service.MAX_HANDSHAKES // 2)]
        assert is_let_in(knock(remote, None))
        with contextlib.suppress(ConnectionError):
            while len(silent) <= 2 * service.MAX_HANDSHAKES:
                silent.append(dial(remote))
                receive(silent[-1], CHALLENGE)  # it has a place, and keeps it
        assert len(silent) <= service.MAX_HANDSHAKES + 1
        began = time.monotonic()
        attach(tmp_path, 7).close()
        assert time.monotonic() - began < 1.0
        for link in silent:
            with link:
                assert ended(link)
        assert is_let_in(knock(remote, None))


@pytest.mark.ucx
def test_library_is_looked_at_before_the_mailbox_has_to_wait(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """An outbox on a slow or busy host whose every handshake ends before it has found its UCX."""
    monkeypatch.setattr(service, "HANDSHAKE_LIMIT_S", 2.0)
    choose = ucx_context.choose

    def choose_slowly() -> UcxChoice:
        if not looked:
            looked.append(time.monotonic())
            time.sleep(2.5)  # the library takes this long
        return choose()

    looked = [0.0]
    with small_channel(tmp_path, ranks=(), transport="ucx", listen="tcp://127.0.0.1") as channel:
        looked.clear()
        monkeypatch.setattr(ucx_context, "choose", choose_slowly)
        with attach(tmp_path, 7, transport="ucx"):
            assert states(channel.mailbox)[7] == "attached"
        assert channel.mailbox._service.refusals == []  # no handshake that came to nothing
    assert len(looked) == 1


def test_close_ends_every_way_in() -> None:
    """A port that stays open, or a thread that waits on it for ever."""
    before = Footprint.at_rest()
    with mailbox_at("tcp://*", secret=SECRET) as mailbox:
        addresses = mailbox.addresses
        began = time.monotonic()
        mailbox.close()
        assert time.monotonic() - began < LIMIT / 2
        for address in addresses:
            with pytest.raises(ConnectionError):
                dial(address)
    del mailbox
    assert before.grown() is None


# ---- the wire


def other_end(link: socket.socket) -> socket.socket:
    """Find the other end of a link within this process."""
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if not re.match("socket:", os.readlink(f"/proc/self/fd/{name}")):
                continue
            found = socket.socket(fileno=os.dup(int(name)))
            with contextlib.ExitStack() as closing:
                closing.enter_context(found)
                if (
                    found.family == link.family
                    and found.getsockname() == link.getpeername()
                    and found.getpeername() == link.getsockname()
                ):
                    closing.pop_all()
                    return found
    raise AssertionError("this process does not hold the other end")


@pytest.mark.parametrize("host", ["127.0.0.1", pytest.param("[::1]", marks=needs_ipv6)])
def test_both_ends_notice_a_cut_wire(host: str) -> None:
    """A lane that stays taken by a host that lost its power: one end without keepalive."""
    with mailbox_at(f"tcp://{host}") as mailbox, dial(mailbox.addresses[1]) as link:
        receive(link, CHALLENGE)
        with other_end(link) as accepted:
            for end in (link, accepted):
                options = {
                    name: end.getsockopt(socket.IPPROTO_TCP, getattr(socket, f"TCP_{name}"))
                    for name in ("NODELAY", "KEEPIDLE", "KEEPINTVL", "KEEPCNT", "USER_TIMEOUT")
                }
                assert options == {
                    "NODELAY": 1,
                    "KEEPIDLE": sockets.KEEPALIVE_IDLE_S,
                    "KEEPINTVL": sockets.KEEPALIVE_INTERVAL_S,
                    "KEEPCNT": sockets.KEEPALIVE_PROBES,
                    "USER_TIMEOUT": sockets.USER_TIMEOUT_MS,
                }
                assert end.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
