"""Speed contract: what a lane was measured to do at attach, against what its link can do.

Nothing is written where anybody could read it: memory that is mapped is timed by reading it, a
link of `ucx` by puts into the lane's own self-test page.

=========== =============================== ==================================================
transport   measured                        the limit
=========== =============================== ==================================================
shm         a read of the mailbox's memory  a read of fresh memory of this process, made alike
cuda_ipc    a copy out of its GPU           the same out of fresh memory of that GPU, if it is
                                            visible here
ucx         puts of 64 KiB, then a flush    the rates of the network devices, as the kernel
                                            knows them
=========== =============================== ==================================================
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, cast

from . import _native
from .errors import ConfigError, DeviceError, TransportUnavailable

log = logging.getLogger("tapchannel.speed")
WARN, REFUSE = "warn", "refuse"
_HOST_READ: Final = 16 << 20
_DEVICE_READ: Final = 64 << 20
_READS: Final = 5
_SYSTEM: Final = Path("/sys")


@dataclass(frozen=True, slots=True)
class SpeedCheck:
    """What an outbox asks of its lane's speed: ``Outbox(speed=SpeedCheck())``.

    Below ``least_share`` of what the link can do, it warns on the log or, with ``"refuse"``, does
    not attach. Where the limit is not known, it does neither. `Outbox.info` says what was found.

    Raises:
        ConfigError: the share is not one, or the act is unknown.
    """

    least_share: float = 0.5
    act: str = WARN

    def __post_init__(self) -> None:
        share = cast("object", self.least_share)
        if isinstance(share, bool) or not isinstance(share, (int, float)) or not 0 < share <= 1:
            raise ConfigError("least_share is no share", seen=repr(share), expected="0 to 1")
        if self.act not in (WARN, REFUSE):
            raise ConfigError("act is unknown", seen=repr(self.act), expected="warn or refuse")


@dataclass(frozen=True, slots=True)
class Limit:
    """What a link can do, in GB/s; 0 where that is not known. ``source`` says whence, or why."""

    speed: float
    source: str


@dataclass(frozen=True, slots=True)
class Speed:
    """What a lane was measured to do, in GB/s, and its limit."""

    measured: float
    limit: Limit

    @property
    def share(self) -> float | None:
        """Compare the two; None where one is not known."""
        return self.measured / self.limit.speed if self.limit.speed and self.measured else None

    def facts(self) -> dict[str, object]:
        """Give them for `Outbox.info`."""
        return {
            "measured_GB_per_s": self.measured,
            "limit_GB_per_s": self.limit.speed or None,
            "limit": self.limit.source,
            "share": self.share,
        }

    def verdict(self, check: SpeedCheck) -> str:
        """Say how far a lane is below what was asked for; nothing where it is not."""
        share = self.share
        if share is None or share >= check.least_share:
            return ""
        return (
            f"measured {self.measured:.2f} GB/s, {100 * share:.0f} % of the {self.limit.speed:.2f} "
            f"GB/s that the link can do ({self.limit.source}); asked for: at least "
            f"{100 * check.least_share:.0f} %"
        )


NOT_KNOWN: Final = Limit(0.0, "by this transport nothing is measured")


def no_limit() -> Limit:
    """Give the limit of a transport whose speed is not checked."""
    return NOT_KNOWN


def checked(
    check: SpeedCheck | None,
    channel: str,
    rank: int,
    transport: str,
    measure: Callable[[], float],
    limit: Callable[[], Limit],
) -> Speed | None:
    """Measure a lane before it goes live, if that was asked for.

    Raises:
        TransportUnavailable: it is slower than was allowed.
    """
    if check is None:
        return None
    try:
        speed = Speed(measure(), limit())
    except (DeviceError, RuntimeError, OSError) as error:
        speed = Speed(0.0, Limit(0.0, f"{transport} could not be measured: {error}"))
    verdict = speed.verdict(check)
    if verdict and check.act == REFUSE:
        # Without `refused`: the next transport would be tried, and is slower still.
        raise TransportUnavailable(
            f"lane by {transport} is slower than its link",
            channel=channel,
            rank=rank,
            detail=verdict,
            next_step="look for what else uses the link, or attach with a smaller least_share",
        )
    if verdict:
        log.warning("channel %r: rank %d, lane by %s: %s", channel, rank, transport, verdict)
    return speed


# ---- memory that is mapped


def reading(arena: _native.Arena) -> float:
    """Give the GB/s at which this process reads a mapped arena."""
    size = min(arena.bytes, _HOST_READ if arena.kind == "host" else _DEVICE_READ)
    return size / arena.time_reads(size, _READS) / 1e9


def host_limit(arena: _native.Arena) -> Limit:
    """Give that of fresh memory of the host."""
    fresh = _native.Arena.create_host("tapchannel:speed", min(arena.bytes, _HOST_READ))
    return Limit(reading(fresh), "fresh memory of this host, read by this process")


def device_limit(arena: _native.Arena, own: int, theirs: int | None) -> Limit:
    """Give that of fresh memory of the mailbox's GPU, mapped for one's own as the slots are."""
    if theirs is None:
        return Limit(0.0, "the mailbox's GPU is not visible to this process")
    size = min(arena.bytes, _DEVICE_READ)
    fresh = _native.Arena.create_vmm(theirs, size)
    if theirs == own:
        return Limit(reading(fresh), f"fresh memory of cuda:{theirs}, copied by itself")
    fd = fresh.export_fd()
    try:
        mapped = _native.Arena.import_vmm(own, fd, size)
    finally:
        os.close(fd)
    return Limit(reading(mapped), f"fresh memory of cuda:{theirs}, copied to cuda:{own}")


# ---- network devices


def device_rates(lanes: Sequence[str], system: Path = _SYSTEM) -> Limit:
    """Give the sum of the rates of the devices that UCX's lanes use, such as ``tcp/eth0``."""
    devices = dict.fromkeys(tuple(lane.partition("/")[::2]) for lane in lanes)
    named = {device: _rate(transport, device, system) for transport, device in devices}
    unknown = [device for device, rate in named.items() if not rate]
    if unknown or not named:
        return Limit(0.0, f"no rate is known of {', '.join(unknown) or 'the link'}")
    return Limit(sum(named.values()), f"the rate of {', '.join(named)}")


def _rate(transport: str, device: str, system: Path) -> float:
    """Give a device's GB/s; 0 where the kernel does not say."""
    if transport == "tcp":
        text = _text(system / "class" / "net" / device / "speed")  # Mbit/s, or -1
        return max(0, int(text)) / 8e3 if re.fullmatch(r"-?[0-9]{1,9}", text) else 0.0
    name, _, port = device.partition(":")
    text = _text(system / "class" / "infiniband" / name / "ports" / (port or "1") / "rate")
    rate = re.match(r"([0-9.]{1,9}) Gb/sec", text)
    return float(rate[1]) / 8 if rate else 0.0


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except (OSError, ValueError):  # such as loopback's speed, which reads as an error
        return ""
