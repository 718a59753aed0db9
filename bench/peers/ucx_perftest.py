"""ucx_perftest, UCX's own benchmark: puts of one source, nobody told, nothing checked.

The one of the UCX that tapchannel loads, where that UCX came with it. Server and client poll.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

from tapchannel.benchmark.payload import Sources
from tapchannel.benchmark.peer import Meeting, Receiver, Sender, Tool
from tapchannel.benchmark.traffic import Place, Traffic
from tapchannel.errors import TransportUnavailable
from tapchannel.ucx_library import choose_ucx

_LIMIT_S = 60.0
_LOOPBACK = "127.0.0.1"
_MIB_PER_S = 5  # the column of the overall bandwidth, whose MB is 2**20 bytes
_OVERALL_US = 3  # of the overall latency


def program() -> tuple[str, dict[str, str]]:
    """Find ucx_perftest, and the environment that it needs.

    Raises:
        RuntimeError: there is none; the text says why.
    """
    try:
        chosen = choose_ucx(needs_verbs=False, needs_cuda=False).chosen
    except TransportUnavailable as error:
        raise RuntimeError(f"no UCX: {error}") from error
    folder = Path(chosen.path or "").parent
    environment = {**os.environ, "LD_LIBRARY_PATH": str(folder), "UCX_WARN_UNUSED_ENV_VARS": "n"}
    own = folder.parent / "bin" / "ucx_perftest"
    if own.exists():
        return str(own), environment
    found = shutil.which("ucx_perftest") if chosen.origin == "system" else None
    if found is None:
        raise RuntimeError(f"{chosen.name} came without ucx_perftest: install ucx-utils")
    return found, environment


def _free_port() -> int:
    """Find a port that is free now: the program takes none that the kernel picks."""
    with socket.socket() as taken:
        taken.bind((_LOOPBACK, 0))
        return int(taken.getsockname()[1])


class PerftestSender(Tool):
    """Runs server and client."""

    def __init__(self, traffic: Traffic) -> None:
        self._size = traffic.message_bytes
        self._program, self._environment = program()

    def _start(self, port: int, *arguments: str) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [self._program, "-p", str(port), *arguments],
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )

    def _figures(self, test: str, count: int) -> list[float]:
        """Run a test; give its last line's numbers."""
        port = _free_port()
        server = self._start(port)
        try:
            listening(server.pid, port)
            work = ("-t", test, "-s", str(self._size), "-n", str(count), "-w", "10")
            client = self._start(port, _LOOPBACK, "-f", "-v", *work)
            try:
                out, _ = client.communicate(timeout=_LIMIT_S)
            finally:
                client.kill()
                client.wait()
        finally:
            server.kill()
            server.communicate()
        rows = [line.split(",") for line in out.splitlines() if line.strip()[:1].isdigit()]
        if not rows:
            raise RuntimeError(f"ucx_perftest gave no figures: {out[-400:]}")
        return [float(field) for field in rows[-1]]

    def seconds(self, count: int) -> float:
        """Put; ucp_put_bw."""
        figures = self._figures("ucp_put_bw", count)
        return count * self._size / (figures[_MIB_PER_S] * 2**20)

    def latency(self, count: int) -> list[float]:
        """Give the mean of half a round trip; ucp_put_lat."""
        return [self._figures("ucp_put_lat", count)[_OVERALL_US]]


def listening(pid: int, port: int) -> None:
    """Wait until a server listens, by the kernel's own table.

    Raises:
        TimeoutError: it does not in a minute.
    """
    wanted = f":{port:04X} "
    limit = time.monotonic() + _LIMIT_S
    while time.monotonic() < limit:
        for table in ("tcp", "tcp6"):
            with contextlib.suppress(OSError):
                for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
                    if wanted in line.split(":", 1)[1] and line.split()[3] == "0A":
                        return
        time.sleep(0.002)
    raise TimeoutError("ucx_perftest's server does not listen")


class Perftest:
    """A program of its own: its row is unchecked."""

    name = "ucx_perftest"
    about = "UCX's own benchmark, ucp_put_bw and ucp_put_lat; it polls, and checks nothing"
    one_sided = unchecked = True
    blocking = False

    def absence(self, place: Place, producers: int) -> str | None:
        """Say why there is none."""
        if place.on_gpu:
            return "it is run for host memory only"
        if producers > 1:
            return "it has one client"
        try:
            program()
        except RuntimeError as error:
            return str(error)
        return None

    def receiver(self, traffic: Traffic, meeting: Meeting) -> Receiver:
        """Have none."""
        raise NotImplementedError

    def sender(self, traffic: Traffic, rank: int, meeting: Meeting, sources: Sources) -> Sender:
        """Find the program."""
        return PerftestSender(traffic)


PEERS = (Perftest(),)
