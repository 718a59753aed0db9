"""Hosts in this machine: network namespaces on one switch, and what can befall their cables.

    with hosts(2) as (near, far), Children() as children:
        consumer = children.start(serve, host=near)     # binds near.address
        producer = children.start(push_all, host=far)
        with far.silent_cut():
            ...                                         # no packet passes, and nobody is told

Each host has a network of its own, abstract Unix sockets included, and its cable to the switch. A
process inside it (see `host_entry`) also has a host name and System V shared memory of its own;
files are the same everywhere. Addresses are the same in every run, as no two runs can meet.

The namespaces carry their owner's pid in their names: leaving the block removes them, and what a
killed run has left is removed when the next one begins.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from support.host_entry import NAMESPACES

TOOLS = {"ip": "iproute2", "tc": "iproute2", "nft": "nftables"}
PREFIX = "tapchannel"
CABLE = "eth0"
WAYS = ("ingress", "egress")  # what comes from the host, and what goes to it
COMMAND_LIMIT = 10.0  # seconds for one command, which takes milliseconds
BURST = "64kb"  # what a slow cable takes at once; a segmented TCP send must fit
_PATH = f"{os.environ.get('PATH', os.defpath)}:/usr/sbin:/sbin"

_serials = itertools.count()


class Host(NamedTuple):
    """One host; its port on the switch is where its cable is cut."""

    name: str
    number: int
    switch: str

    @property
    def address(self) -> str:
        """Its IPv4 address."""
        return f"10.77.0.{self.number}"

    @property
    def address6(self) -> str:
        """Its IPv6 address."""
        return f"fd00:77::{self.number:x}"

    @property
    def port(self) -> str:
        """The switch's end of its cable."""
        return f"port{self.number}"

    @contextlib.contextmanager
    def silent_cut(self) -> Iterator[None]:
        """Drop every packet to and from this host at the switch: neither end is told."""
        table = f"netdev {self.port}"
        drop = f"device {self.port} priority 0; policy drop;"
        chains = [f"add chain {table} {hook} {{ type filter hook {hook} {drop} }}" for hook in WAYS]
        _nft(self.switch, f"add table {table}", *chains)
        try:
            yield
        finally:
            _nft(self.switch, f"delete table {table}")

    @contextlib.contextmanager
    def link_down(self) -> Iterator[None]:
        """Take this host's interface down: it has no route left, the others hear nothing."""
        _run("ip", "-n", self.name, "link", "set", CABLE, "down")
        try:
            yield
        finally:
            _run("ip", "-n", self.name, "link", "set", CABLE, "up")

    @contextlib.contextmanager
    def slow(self, mbit: int) -> Iterator[None]:
        """Let this host's cable carry so many megabits a second, each way."""
        ends = (self.name, CABLE), (self.switch, self.port)
        with contextlib.ExitStack() as limits:
            for namespace, device in ends:
                place = ("dev", device, "root")
                rate = ("tbf", "rate", f"{mbit}mbit", "burst", BURST, "latency", "100ms")
                _run("tc", "-n", namespace, "qdisc", "add", *place, *rate)
                limits.callback(_run, "tc", "-n", namespace, "qdisc", "del", *place)
            yield

    def sent_bytes(self) -> int:
        """Count what this host has sent over its cable so far."""
        text = _run(
            "ip", "netns", "exec", self.name, "cat", f"/sys/class/net/{CABLE}/statistics/tx_bytes"
        )
        return int(text)


@contextlib.contextmanager
def hosts(count: int) -> Iterator[tuple[Host, ...]]:
    """Make hosts on one switch; remove them, with all that was done to them, at the end.

    Raises:
        RuntimeError: this process may not make namespaces, or a tool is missing; it says which.
    """
    refuse_without_tools()
    remove_leftovers()
    serial = next(_serials)
    switch = f"{PREFIX}-{os.getpid()}-{serial}-switch"
    made = [
        Host(f"{PREFIX}-{os.getpid()}-{serial}-{number}", number, switch)
        for number in range(1, count + 1)
    ]
    with contextlib.ExitStack() as namespaces:
        for name in (switch, *(host.name for host in made)):
            _run("ip", "netns", "add", name)
            namespaces.callback(_run, "ip", "netns", "del", name)
        _wire(switch, made)
        yield tuple(made)


def _wire(switch: str, made: list[Host]) -> None:
    """Plug each host into the switch, and give it its addresses."""
    _batch(switch, "link add switch up type bridge mcast_snooping 0")
    for host in made:
        _batch(
            host.name,
            f"link add {CABLE} type veth peer name {host.port} netns {switch}",
            "link set lo up",
            f"link set {CABLE} up",
            f"addr add {host.address}/24 dev {CABLE}",
            f"addr add {host.address6}/64 dev {CABLE} nodad",
        )
        # Taking the link down would otherwise lose the IPv6 address for good.
        keep = f"/proc/sys/net/ipv6/conf/{CABLE}/keep_addr_on_down"
        _run("ip", "netns", "exec", host.name, "sh", "-c", f"echo 1 > {keep}")
        _batch(switch, f"link set {host.port} master switch up")


def refuse_without_tools() -> None:
    """See that hosts can be made here.

    Raises:
        RuntimeError: they cannot; it says what to do.
    """
    if os.geteuid() != 0:
        raise RuntimeError("hosts are network namespaces: run these tests as root")
    packages = {package for tool, package in TOOLS.items() if not shutil.which(tool, path=_PATH)}
    if packages:
        raise RuntimeError(f"hosts need {' and '.join(sorted(packages))}: apt-get install them")


def remove_leftovers() -> None:
    """Remove the namespaces of runs that were killed: those whose owner has gone."""
    for name in left_by_others():
        _run("ip", "netns", "del", name)


def left_by_others() -> list[str]:
    """Name the namespaces of runs that have ended."""
    found: list[str] = []
    for entry in sorted(NAMESPACES.glob(f"{PREFIX}-*")):
        owner = re.fullmatch(rf"{PREFIX}-(\d+)-\d+-\w+", entry.name)
        if owner and not Path(f"/proc/{owner[1]}").exists():
            found.append(entry.name)
    return found


def _batch(namespace: str, *lines: str) -> None:
    _run("ip", "-n", namespace, "-batch", "-", text="\n".join(lines))


def _nft(namespace: str, *lines: str) -> None:
    _run("ip", "netns", "exec", namespace, "nft", "-f", "-", text="\n".join(lines))


def _run(*command: str, text: str | None = None) -> str:
    """Run a command; return what it printed.

    Raises:
        RuntimeError: it failed; what it said stands in the text.
    """
    done = subprocess.run(
        command,
        input=text,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=COMMAND_LIMIT,
        env={**os.environ, "PATH": _PATH, "LD_PRELOAD": ""},  # no sanitizer in the tools
    )
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}\n{text or ''}\n{done.stdout}")
    return done.stdout
