"""The hosts that this folder's tests lean on: what connects them, what cuts them, what is left."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from hosts import wire_roles
from support import hosts as lab
from support.children import Children
from support.host_entry import NAMESPACES
from support.hosts import Host, hosts
from support.link import Link
from support.workers import Worker

Pair = tuple[Host, Host]
Workers = tuple[Worker, Worker]

SILENCE = 0.5  # seconds in which a byte would have come, and a lost one would have been sent again
MBIT = 8
MEBIBYTE = 1 << 20
FAIR_SHARE = 0.8  # of the seconds that the rate allows: a bucket is full at first


def join(workers: Workers, address: str) -> None:
    """Connect the far worker to the near one at this address."""
    near, far = workers
    far.call(wire_roles.connect, address, near.call(wire_roles.listen, address))
    near.call(wire_roles.accept)


def test_hosts_reach_each_other(pair: Pair, workers: Workers) -> None:
    """Catches hosts that are not connected, or that appear under another's address."""
    near, far = workers
    for address, other in (
        (pair[0].address, pair[1].address),
        (pair[0].address6, pair[1].address6),
    ):
        far.call(wire_roles.connect, address, near.call(wire_roles.listen, address))
        assert near.call(wire_roles.accept) == other
        far.begin(wire_roles.send, MEBIBYTE)
        assert near.call(wire_roles.receive, MEBIBYTE)[0] == MEBIBYTE
        far.finish()


def test_more_than_two_hosts_reach_each_other() -> None:
    """Catches a switch that connects the first two only."""
    with hosts(3) as made, Children() as children:
        workers = [Worker(children, host=host) for host in made]
        port = workers[0].call(wire_roles.listen, made[0].address)
        for host, worker in zip(made[1:], workers[1:], strict=True):
            worker.call(wire_roles.connect, made[0].address, port)
            assert workers[0].call(wire_roles.accept) == host.address
        for worker in workers:
            worker.dismiss()


def test_loopback_works_in_a_host(pair: Pair, workers: Workers) -> None:
    """Catches a host whose own processes cannot talk, and a 127.0.0.1 that others reach."""
    near, far = workers
    port = near.call(wire_roles.listen, "127.0.0.1")
    near.call(wire_roles.connect, "127.0.0.1", port)
    with pytest.raises(ConnectionRefusedError):
        far.call(wire_roles.connect, "127.0.0.1", port)


def test_abstract_sockets_end_at_the_host(workers: Workers) -> None:
    """Catches two hosts that find each other as processes of one host would."""
    near, far = workers
    near.call(wire_roles.listen_by_name, "tapchannel test")
    near.call(wire_roles.connect_by_name, "tapchannel test")
    with pytest.raises(ConnectionRefusedError):
        far.call(wire_roles.connect_by_name, "tapchannel test")


def test_child_is_in_its_host_before_it_imports_anything(pair: Pair, children: Children) -> None:
    """Catches a library that looks at the network, or starts a thread, before the child moves."""
    for host in pair:
        network = (NAMESPACES / host.name).stat().st_ino
        assert children.start(wire_roles.networks, host=host).result() == (network, network)


def test_host_has_its_own_name_and_shares_no_memory(pair: Pair, workers: Workers) -> None:
    """Catches UCX going through shared memory, or not finding the host's interfaces in /sys."""
    seen = [worker.call(wire_roles.surroundings) for worker in workers]
    assert [name for name, _, _ in seen] == [host.name for host in pair]
    assert all(interfaces == {"lo", lab.CABLE} for _, interfaces, _ in seen)
    memories = {memory for _, _, memory in seen} | {os.stat("/proc/self/ns/ipc").st_ino}
    assert len(memories) == 3


def test_silent_cut_loses_everything_and_tells_nobody(pair: Pair, workers: Workers) -> None:
    """Catches a cut that lets packets by, that ends a connection, or that outlasts its block."""
    join(workers, pair[0].address)
    near, far = workers
    for cut in pair:
        with cut.silent_cut():
            near.call(wire_roles.send, 1)
            far.call(wire_roles.send, 1)
            assert near.call(wire_roles.receive, 1, SILENCE) == (0, 0.0)
            assert far.call(wire_roles.receive, 1, SILENCE) == (0, 0.0)
        assert near.call(wire_roles.receive, 1)[0] == 1
        assert far.call(wire_roles.receive, 1)[0] == 1


def test_new_connection_meets_the_cut_too(pair: Pair, workers: Workers) -> None:
    """Catches a cut that answers, so that a peer hears at once what it has to find out."""
    near, far = workers
    port = near.call(wire_roles.listen, pair[0].address)
    with pair[0].silent_cut(), pytest.raises(TimeoutError):
        far.call(wire_roles.connect, pair[0].address, port, SILENCE)
    far.call(wire_roles.connect, pair[0].address, port)


def test_link_down_is_known_on_its_own_host_only(pair: Pair, workers: Workers) -> None:
    """Catches a link that is not down, and one that comes up without its addresses."""
    near, far = workers
    ports = {address: near.call(wire_roles.listen, address) for address in addresses(pair[0])}
    port = far.call(wire_roles.listen, pair[1].address)
    with pair[0].link_down():
        with pytest.raises(OSError, match="unreachable"):
            near.call(wire_roles.connect, pair[1].address, port)
        with pytest.raises(TimeoutError):
            far.call(wire_roles.connect, pair[0].address, ports[pair[0].address], SILENCE)
    for address in addresses(pair[0]):
        near.call(wire_roles.listen, address)
        join(workers, address)


def addresses(host: Host) -> tuple[str, str]:
    """Give both addresses of a host."""
    return host.address, host.address6


@pytest.mark.parametrize("slowed", [0, 1])
def test_slow_link_is_slow_each_way(pair: Pair, workers: Workers, slowed: int) -> None:
    """Catches a limit that holds one way only, or none at all."""
    join(workers, pair[0].address)
    for source, sink in (workers, workers[::-1]):
        with pair[slowed].slow(MBIT):
            source.begin(wire_roles.send, MEBIBYTE)
            got, seconds = sink.call(wire_roles.receive, MEBIBYTE)
            source.finish()
        assert got == MEBIBYTE
        assert seconds > FAIR_SHARE * 8 * MEBIBYTE / (MBIT * 1e6)


def test_link_is_fast_again_afterwards(pair: Pair, workers: Workers) -> None:
    """Catches a limit that outlasts its block, by error or without."""
    join(workers, pair[0].address)
    near, far = workers
    with pytest.raises(ZeroDivisionError), pair[0].slow(MBIT):
        raise ZeroDivisionError
    near.begin(wire_roles.send, MEBIBYTE)
    _, seconds = far.call(wire_roles.receive, MEBIBYTE)
    near.finish()
    assert seconds < FAIR_SHARE * 8 * MEBIBYTE / (MBIT * 1e6)


def test_faults_end_with_an_error_in_their_block(pair: Pair, workers: Workers) -> None:
    """Catches a failed test whose cut confuses the next one."""
    for fault in (pair[0].silent_cut, pair[0].link_down):
        with pytest.raises(ZeroDivisionError), fault():
            raise ZeroDivisionError
        join(workers, pair[0].address)


def names() -> set[str]:
    """Name this process's namespaces."""
    return {entry.name for entry in NAMESPACES.glob(f"{lab.PREFIX}-{os.getpid()}-*")}


def test_nothing_is_left_of_hosts() -> None:
    """Catches a namespace that outlives its block: ended by an error, or with a process inside."""
    before = names()
    with pytest.raises(ZeroDivisionError), Children() as children:
        with hosts(2) as (near, _):
            Worker(children, host=near).call(wire_roles.surroundings)
            assert len(names() - before) == 3
            raise ZeroDivisionError
    assert names() == before


def make_and_stay(link: Link) -> None:
    """Make hosts and wait in their midst."""
    with hosts(2) as made:
        link.reach("made", [host.name for host in made])
        link.receive()


def test_what_a_killed_run_left_is_removed() -> None:
    """Catches namespaces that pile up, and the removal of those that another run still uses."""
    with Children() as children:
        killed, running = children.start(make_and_stay), children.start(make_and_stay)
        left, used = killed.wait_for("made"), running.wait_for("made")
        killed.kill()
        assert set(left) <= set(lab.left_by_others())
        with hosts(1):
            there = {entry.name for entry in NAMESPACES.iterdir()}
        assert not set(left) & there
        assert set(used) <= there
        running.send()


@pytest.mark.parametrize(
    ("tool", "package"), [("ip", "iproute2"), ("tc", "iproute2"), ("nft", "nftables")]
)
def test_missing_tool_is_named_with_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tool: str, package: str
) -> None:
    """Catches hosts that fail in mid-test, or are skipped, where a tool is not installed."""
    for other in lab.TOOLS.keys() - {tool}:
        (tmp_path / other).touch(mode=0o755)
    monkeypatch.setattr(lab, "_PATH", str(tmp_path))
    with pytest.raises(RuntimeError, match=f"need {package}: apt-get install"), hosts(2):
        pass


def test_other_users_are_told_to_be_root(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches a permission error that does not say what to do."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(RuntimeError, match="as root"), hosts(2):
        pass
