"""What ucx reaches between two hosts, against ucx_perftest of the same UCX, in one run.

Two network namespaces of this machine, joined by a switch, over TCP; needs root. With --rdma the
two devices of the emulated guest, over rc: tests/rdma/guest.sh .venv/bin/python bench/ucx.py
--rdma. See README.md for how.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from common import (
    MIB,
    RESULTS,
    ROOT,
    Spread,
    facts,
    quantile,
    ratio_of,
    size_text,
    spread_of,
    table,
)

sys.path.insert(0, str(ROOT / "tests"))

import ucx_roles

from rdma import wire
from support.children import Child, Children
from support.host_entry import enter
from support.hosts import Host, hosts
from tapchannel.ucx_library import choose_ucx

SIZES = (64 * 1024, MIB, 8 * MIB, 64 * MIB)
SMALL = 4096
ROUND_BYTES = 128 * MIB  # moved by each way in each round
# Both ways have them: with UCX's own, ucx_perftest reaches a fraction of it.
OVER_TCP = {"UCX_TLS": "tcp", "UCX_TCP_TX_SEG_SIZE": "256k", "UCX_TCP_RX_SEG_SIZE": "256k"}
RDMA_ROUND_BYTES = 16 * MIB  # an emulated processor takes a second for it
PINGS = 1000
LIMIT = 120.0
PORT = "13337"


class End(NamedTuple):
    """One end of the wire: its address, its host if it is not this one, what its processes need."""

    address: str
    host: Host | None
    env: dict[str, str]


@contextmanager
def two_ends(rdma: bool) -> Iterator[tuple[End, End]]:
    """Give both ends."""
    if rdma:
        pairs = zip(wire.ADDRESSES, wire.DEVICES, strict=True)
        near, far = (End(at, None, {"UCX_NET_DEVICES": f"{device}:1"}) for at, device in pairs)
        yield near, far
        return
    with hosts(2) as made:
        near, far = (End(host.address, host, dict(OVER_TCP)) for host in made)
        yield near, far


# ---- ucx_perftest


def perftest() -> tuple[str, dict[str, str]]:
    """Find the ucx_perftest of the UCX that tapchannel uses, and its environment.

    Raises:
        RuntimeError: that UCX came without it.
    """
    chosen = choose_ucx(needs_verbs=False, needs_cuda=False).chosen
    folder = Path(chosen.path or "").parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    own = folder.parent / "bin" / "ucx_perftest"
    found = str(own) if own.exists() else shutil.which("ucx_perftest")
    if chosen.origin != "system" and not own.exists():
        found = None
    if found is None:
        raise RuntimeError(f"{chosen.name} came without ucx_perftest: install ucx-utils")
    return found, environment


def _start(end: End, core: int, *arguments: str) -> subprocess.Popen[str]:
    program, environment = perftest()

    def move() -> None:
        if end.host is not None:
            enter(end.host.name)
        os.sched_setaffinity(0, {core})

    return subprocess.Popen(
        [program, "-p", PORT, *arguments],
        env=environment | end.env,
        preexec_fn=move,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def perftest_figures(near: End, far: End, test: str, size: int, count: int) -> list[float]:
    """Run a test from ``far`` to ``near``; give its last line's numbers."""
    server = _start(near, 0)
    try:
        work = ("-t", test, "-s", str(size), "-n", str(count), "-w", str(max(1, count // 10)))
        client = _start(far, 1, near.address, "-f", "-v", *work)
        out, _ = client.communicate(timeout=LIMIT)
    finally:
        server.kill()
        server.communicate()
    rows = [line.split(",") for line in out.splitlines() if line.strip()[:1].isdigit()]
    if not rows:
        raise RuntimeError(f"ucx_perftest gave no figures: {out}")
    return [float(field) for field in rows[-1]]


def perftest_seconds(near: End, far: End, size: int, count: int) -> float:
    """Put ``count`` times by ucp_put_bw; give the seconds that its overall MB/s come to."""
    figures = perftest_figures(near, far, "ucp_put_bw", size, count)
    return count * size / (figures[5] * 1e6 * 1.048576)  # ucx_perftest's MB is 2**20 B


# ---- tapchannel


@contextmanager
def channel(near: End, far: End, size: int, queue: int) -> Iterator[tuple[Child, Child]]:
    """Give the receiving and the pushing process of one size."""
    with tempfile.TemporaryDirectory(prefix="tapchannel-") as folder, Children(limit=LIMIT) as both:
        store, listen = Path(folder).as_uri(), f"tcp://{near.address}"
        receiver = both.start(
            ucx_roles.receive, store, listen, size, 0, host=near.host, env=near.env
        )
        receiver.wait_for("serving")
        pusher = both.start(ucx_roles.push, store, size, queue, 1, host=far.host, env=far.env)
        pusher.wait_for("attached")
        yield receiver, pusher
        for child in (receiver, pusher):
            child.send(None)


def channel_seconds(pair: tuple[Child, Child], count: int) -> float:
    """Push ``count`` microbatches; give the seconds from the first push to the last receipt."""
    receiver, pusher = pair
    receiver.send(count)
    receiver.wait_for("open")
    pusher.send(count)
    return (receiver.wait_for("received") - pusher.wait_for("pushed")) / 1e9


def channel_latency(near: End, far: End, size: int) -> list[float]:
    """Give half of each round trip's microseconds."""
    with tempfile.TemporaryDirectory(prefix="tapchannel-") as folder, Children(limit=LIMIT) as both:
        store = Path(folder).as_uri()
        ends = [
            both.start(
                ucx_roles.pong,
                store,
                f"tcp://{end.address}",
                size,
                PINGS,
                end is far,
                host=end.host,
                env=end.env,
            )
            for end in (near, far)
        ]
        for point in ("ready", "over"):
            for end in ends:
                end.wait_for(point)
            for end in ends:
                end.send()
        return [ns / 2e3 for ns in ends[1].result()]


# ---- what is measured


def measure_size(near: End, far: End, size: int, rounds: int) -> dict[str, Any]:
    """Measure GB/s of both ways at one size, in turns; the first round is dropped."""
    count = min(2048, max(4, (RDMA_ROUND_BYTES if near.host is None else ROUND_BYTES) // size))
    perf: list[float] = []
    mine: list[float] = []
    with channel(near, far, size, count) as pair:
        for _ in range(rounds + 1):
            perf.append(perftest_seconds(near, far, size, count))
            mine.append(channel_seconds(pair, count))
    moved = count * size / 1e9
    return {
        "size": size,
        "messages": count,
        "ucx_perftest": spread_of([moved / one for one in perf[1:]]),
        "push": spread_of([moved / one for one in mine[1:]]),
        "of ucx_perftest": ratio_of(perf[1:], mine[1:]),
    }


def measure_latency(near: End, far: End) -> dict[str, Any]:
    """Measure one way's microseconds of a small message."""
    mine = channel_latency(near, far, SMALL)
    perf = perftest_figures(near, far, "ucp_put_lat", SMALL, PINGS)
    return {
        "size": SMALL,
        "p50 us": quantile(mine, 0.5),
        "p99 us": quantile(mine, 0.99),
        "ucx_perftest average us": perf[3],
    }


def _report(sizes: list[dict[str, Any]], small: dict[str, Any]) -> str:
    rows = []
    for one in sizes:
        speeds = [one[way].text(3) for way in ("ucx_perftest", "push")]
        rows.append(
            [size_text(one["size"]), *speeds, f"{100 * one['of ucx_perftest'].median:.0f} %"]
        )
    heads = ["message", "ucx_perftest GB/s", "push GB/s", "of ucx_perftest"]
    return (
        f"{table(heads, rows)}\n\n{size_text(SMALL)}, one way: {small['p50 us']:.0f} us "
        f"(p99 {small['p99 us']:.0f}); ucx_perftest {small['ucx_perftest average us']:.0f} us\n"
    )


def main() -> None:
    """Measure, print the table, keep the results."""
    parser = argparse.ArgumentParser(description="ucx between two hosts against ucx_perftest.")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path, default=RESULTS / "ucx.jsonl")
    parser.add_argument("--rdma", action="store_true", help="between the guest's RDMA devices")
    options = parser.parse_args()
    with two_ends(options.rdma) as (near, far):
        wanted = SIZES[:-2] if options.rdma else SIZES
        sizes = [measure_size(near, far, size, options.rounds) for size in wanted]
        small = measure_latency(near, far)
    print(_report(sizes, small))
    chosen = choose_ucx(needs_verbs=False, needs_cuda=False).chosen
    record = {"facts": facts(), "ucx": f"{chosen.version} of {chosen.name}", "latency": small}
    record["sizes"] = [
        {key: asdict(value) if isinstance(value, Spread) else value for key, value in one.items()}
        for one in sizes
    ]
    with options.out.open("a", encoding="utf-8") as file:
        file.write(json.dumps(record, default=str) + "\n")


if __name__ == "__main__":
    main()
