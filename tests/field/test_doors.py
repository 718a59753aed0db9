"""Field reports of kinds K9 and K10: who may knock, and where the door is."""

from __future__ import annotations

import contextlib
import os
import pickle
import socket
import subprocess
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from field.channel import telling
from support.attacks import Marker, frame
from support.channels import BRIEFLY, until
from support.children import Children
from support.handmade_peers import (
    arena_fd,
    block_fd,
    dial,
    ended,
    hello,
    impostor,
    offering,
    receive,
)
from support.hosts import hosts
from support.small_channel import LIMIT, NAME, PLAN, SOURCES, attach, refused, small_channel, states
from support.workers import Worker
from tapchannel import Mailbox, Outbox, TapPlan
from tapchannel.errors import (
    AttachError,
    AttachTimeout,
    ConfigError,
    ProtocolError,
    TransportUnavailable,
)
from tapchannel.stores import DirectAddress
from tapchannel.wire import CHALLENGE, HELLO, REFUSAL, send_frame

SECRET = "a job's own secret"


# ---- A20


def say(link: socket.socket, octets: bytes) -> None:
    """Send bytes and no more, to a service that may hang up meanwhile."""
    with contextlib.suppress(ConnectionError):
        link.sendall(octets)
    with contextlib.suppress(OSError):
        link.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("door", ["unix", "tcp"])
def test_field_a20_strangers_get_nothing_and_cost_nothing(tmp_path: Path, door: str) -> None:
    """A20 (K10): whoever reached the port of a transfer pipe could run code."""
    marker = tmp_path / "owned"
    said = {
        "a pickle": pickle.dumps(Marker(marker)),
        "a pickle in a frame": frame(HELLO, pickle.dumps(Marker(marker))),
        "random bytes": os.urandom(4096),
        "a length of 2 GiB": frame(HELLO, b"{}", length=1 << 31),
    }
    settings = {"listen": "tcp://127.0.0.1", "secret": SECRET}
    with small_channel(tmp_path / "store", ranks=(), **settings) as channel:
        [address] = [one for one in channel.mailbox.addresses if one.startswith(door)]
        with dial(address) as idle:  # says nothing at all, all the while
            tracemalloc.start()
            for octets in said.values():
                with dial(address) as link:
                    receive(link, CHALLENGE)
                    say(link, octets)
                    assert ended(link)
            _, peak = tracemalloc.get_traced_memory()
            tracemalloc.stop()
            assert peak < 32 << 20
            assert not marker.exists()
            with dial(address) as link:  # a valid frame, without the job's secret
                receive(link, CHALLENGE)
                send_frame(link, HELLO, hello())
                fields, fds = receive(link, REFUSAL)
                assert (fields.text("error", 64), fds) == ("AttachError", [])
            assert set(states(channel.mailbox).values()) == {"away"}
            for rank in SOURCES:
                channel.outboxes[rank] = attach(tmp_path / "store", rank, secret=SECRET)
            channel.carry()
            assert idle.fileno() >= 0
        refusals = channel.mailbox._service.refusals
        until(lambda: len(refusals) > len(said), LIMIT)  # noted once the stranger has been told
        assert set(channel.outboxes) == set(SOURCES)


@pytest.mark.parametrize(
    "changes",
    [{"probe_offset": 1 << 40}, {"arena_bytes": 1 << 40}, {"slot_bytes": 1 << 40}, {"depth": 99}],
    ids=str,
)
def test_field_a20_an_offer_outside_its_memory_is_refused(
    tmp_path: Path, changes: dict[str, object]
) -> None:
    """A20 (K10), e: a descriptor whose offset or length lies outside the allocation."""
    with impostor(tmp_path, offering(changes, lambda: [block_fd(), arena_fd()])) as address:
        with refused(ProtocolError, TransportUnavailable, rank=7):
            Outbox(
                PLAN, 7, store=telling(address), name=NAME, attach_timeout=LIMIT, transport="shm"
            )


def test_field_a20_nothing_listens_where_nobody_asked_for_it(tmp_path: Path) -> None:
    """A20 (K10): a side channel that listens on all interfaces, and asks for no secret."""
    with small_channel(tmp_path) as channel:
        assert [one.partition(":")[0] for one in channel.mailbox.addresses] == ["unix"]
    with refused(ConfigError, seen=..., next_step=...) as caught:
        Mailbox(PLAN, SOURCES, store=f"file://{tmp_path}", listen="tcp://*")
    assert "secret" in str(caught[0])
    with small_channel(tmp_path, listen="tcp://127.0.0.1", secret=SECRET, ranks=()) as channel:
        [network] = channel.mailbox.addresses[1:]
        assert network.startswith("tcp://127.0.0.1:")
        with refused(AttachError, rank=7):
            attach(tmp_path, 7)


# ---- A22

SMALL = TapPlan({"tap": ["tap"]}, 4, "float32", 2)


def serve_by_name(desk: SimpleNamespace, store: str, listen: str) -> tuple[str, ...]:
    """Serve on a host whose own name resolves to 127.0.1.1, as on Debian; give the addresses."""
    ask, own = socket.getaddrinfo, socket.gethostname()

    def as_on_debian(host: Any, port: Any, *rest: Any, **more: Any) -> Any:
        return ask("127.0.1.1" if host == own else host, port, *rest, **more)

    socket.getaddrinfo = as_on_debian
    desk.mailbox = Mailbox(
        SMALL, {0: ["tap"]}, store=store, listen=listen.replace("NAME", own), secret=SECRET
    )
    return desk.mailbox.addresses[1:]


def add_dead_interface(desk: SimpleNamespace) -> None:
    """Give this host a second interface, whose network leads nowhere."""
    lines = "link add dead0 type bridge", "addr add 10.99.0.1/24 dev dead0", "link set dead0 up"
    for line in lines:
        subprocess.run(["/sbin/ip", *line.split()], check=True, timeout=LIMIT)


def reach(desk: SimpleNamespace, store: Any) -> str:
    """Attach from another host, and close; give the transport."""
    with Outbox(SMALL, 0, store=store, secret=SECRET, attach_timeout=LIMIT) as outbox:
        return str(outbox.info()["transport"])


def knock_in_vain(desk: SimpleNamespace, address: str) -> tuple[float, AttachTimeout]:
    """Attach where nobody answers; give the seconds, and the error."""
    began = time.monotonic()
    try:
        Outbox(SMALL, 0, store=DirectAddress(address), secret=SECRET, attach_timeout=1.0)
    except AttachTimeout as error:
        return time.monotonic() - began, error
    raise AssertionError("somebody answered")


def close(desk: SimpleNamespace) -> None:
    """Close the mailbox."""
    desk.mailbox.close()


@pytest.mark.ucx
def test_field_a22_what_is_published_can_be_reached(tmp_path: Path) -> None:
    """A22 (K9): a worker told its peers 127.0.1.1, which its own host's name resolves to."""
    with hosts(2) as (near, far), Children(55.0) as children:
        consumer, producer = Worker(children, "consumer", near), Worker(children, "producer", far)
        consumer.call(add_dead_interface)
        for number, (listen, wanted) in enumerate(
            {
                "tcp://NAME": near.address,  # not what the name resolves to
                f"tcp://{near.address}": near.address,  # verbatim
                "tcp://eth0": near.address,  # of two interfaces the one that is named
                "tcp://*": near.address,  # of both, and the outbox finds the one that answers
            }.items()
        ):
            store = f"file://{tmp_path}/{number}"
            addresses = consumer.call(serve_by_name, store, listen)
            assert any(one.startswith(f"tcp://{wanted}:") for one in addresses), listen
            assert not any("127." in one for one in addresses)
            assert producer.call(reach, store) == "ucx"
            consumer.call(close)
        seconds, error = producer.call(knock_in_vain, f"tcp://{near.address}:1")
        assert seconds < 1.0 + BRIEFLY + 1.0
        assert f"{near.address}:1" in str(error)
        for worker in (consumer, producer):
            worker.dismiss()


def test_field_a22_an_address_of_another_host_is_refused(tmp_path: Path) -> None:
    """A22 (K9): an address that is published, and that nobody can reach."""
    place: dict[str, Any] = {"store": f"file://{tmp_path}", "secret": SECRET}
    with refused(ConfigError, seen=..., expected=..., next_step=...) as caught:
        Mailbox(SMALL, {0: ["tap"]}, listen="tcp://10.99.99.99", **place)
    assert "10.99.99.99" in str(caught[0])
