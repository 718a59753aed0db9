"""The command ``tapchannel doctor litmus``: one on each of two hosts."""

from __future__ import annotations

import argparse
import json
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from typing import Any, Final

from .doctor_network import size, went_by_rdma
from .endpoints import parse_listen, tcp_parts
from .error_text import aligned, printable
from .errors import ConfigError, TapChannelError
from .litmus import MOST_MESSAGES, ROW_BYTES, Result, Settings, consume, produce
from .memory import Device
from .settings import checked_seconds

MESSAGES: Final = 1000
LISTEN_LIMIT: Final = 300.0  # for a person to type a command on another host
PEER_LIMIT: Final = 30.0  # for a mailbox that listens already
_SECRET: Final = "TAPCHANNEL_SECRET"


def main(argv: Sequence[str]) -> int:
    """Run one side; 0 where the exchange went through without a violation."""
    parser = _parser()
    options = parser.parse_args(argv)
    try:
        settings = _settings(options)
    except ConfigError as error:
        parser.error(str(error))
    say = _nobody if options.json else _everybody
    listens = options.peer is None
    try:
        result = _listen(settings, say) if listens else produce(settings)
    except (TapChannelError, RuntimeError, OSError) as error:
        print(f"tapchannel doctor litmus: {error}", file=sys.stderr)
        return 1
    if options.json:
        print(json.dumps(_as_json(result)))
    else:
        print("\n".join(_lines(result, listens)))
    return 1 if result.violations else 0


def _nobody(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _everybody(text: str) -> None:
    print(text, flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="tapchannel doctor litmus",
        description="Push random words from one host to another and count those that are wrong "
        "though their stamp stands: the order of payload and stamp, put to the test.",
        epilog=f"Both sides need the same job secret in {_SECRET}; without one the listening side "
        "makes one up and prints it.",
    )
    side = parser.add_mutually_exclusive_group(required=True)
    side.add_argument(
        "--listen",
        nargs="?",
        const="tcp://*",
        metavar="ADDRESS",
        help="be the consumer: wait for one peer at HOST, HOST:PORT or an interface; all of this "
        "host's addresses and a free port by default",
    )
    side.add_argument(
        "--peer", metavar="ADDRESS", help="be the producer: push to the consumer at HOST:PORT"
    )
    _add_settings(parser)
    return parser


def _add_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        metavar="cpu|cuda:N",
        help="where this side's memory lies (the consumer's: cpu, the producer's: as the consumer "
        "needs it)",
    )
    parser.add_argument(
        "--messages",
        type=int,
        default=MESSAGES,
        metavar="N",
        help="messages of each size, the same number on both sides (default %(default)s)",
    )
    parser.add_argument(
        "--limit",
        type=float,
        metavar="SECONDS",
        help=f"how long to wait for the other side (default {LISTEN_LIMIT:.0f} s for a peer, "
        f"{PEER_LIMIT:.0f} s for a consumer)",
    )
    parser.add_argument("--json", action="store_true", help="print the result as JSON")


def _settings(options: argparse.Namespace) -> Settings:
    """Check what was given.

    Raises:
        ConfigError: an address, number or device is impossible.
    """
    listens: bool = options.peer is None
    given: str = options.listen if listens else options.peer
    address = given if given.startswith("tcp://") else f"tcp://{given}"
    if listens:
        parse_listen(address)
    elif tcp_parts(address) is None:
        raise ConfigError(
            "--peer is no address of one port", seen=repr(given), expected="HOST:PORT"
        )
    if not 1 <= options.messages <= MOST_MESSAGES:
        raise ConfigError(
            "--messages is out of range",
            seen=options.messages,
            expected=f"1 to {MOST_MESSAGES}",
        )
    default = LISTEN_LIMIT if listens else PEER_LIMIT
    limit = checked_seconds("--limit", default if options.limit is None else options.limit)
    if options.device is not None:
        Device.parse(options.device)
    secret = os.environ.get(_SECRET) or (secrets.token_hex(16) if listens else None)
    if secret is None:
        raise ConfigError(
            f"{_SECRET} is not set", next_step="take it from what the listening side has printed"
        )
    return Settings(address, options.messages, limit, options.device, secret)


def _listen(settings: Settings, say: Callable[[str], None]) -> Result:
    def ready(addresses: tuple[str, ...]) -> None:
        made_up = not os.environ.get(_SECRET)
        given = f"{_SECRET}={settings.secret} " if made_up else ""
        number = "" if settings.messages == MESSAGES else f" --messages {settings.messages}"
        say(f"on the other host, within {settings.limit:.0f} s:")
        for index, address in enumerate(addresses):
            way = "" if index == 0 else "or: "
            say(f"  {way}{given}tapchannel doctor litmus --peer {address}{number}")
        if not made_up:
            say(f"with the {_SECRET} that is set here")

    return consume(settings, ready)


def _lines(result: Result, listens: bool) -> Iterator[str]:
    there, way = printable(result.host), "from" if listens else "to"
    yield f"litmus {way} host {there}, {result.device} here"
    rows = [("payload", "messages", "violations", "wrong words", "GB/s")]
    for tally in result.tallies:
        numbers = str(result.messages), str(tally.violations), str(tally.wrong_words)
        rows.append((size(tally.rows * ROW_BYTES), *numbers, f"{tally.gb_per_s:.2f}"))
    yield from aligned(rows)
    yield f"lanes: {', '.join(map(printable, result.lanes))}"
    yield f"ordering: {printable(result.ordering)}"
    if result.violations:
        yield f"VIOLATED: {result.violations} messages had a stamp before all of their payload"
    else:
        yield "no violation: no stamp stood before its payload"
    for gap in _gaps(result, listens):
        yield f"not verified by this: {gap}"


def _gaps(result: Result, listens: bool) -> Iterator[str]:
    rails = went_by_rdma(result.lanes)
    if not rails:
        yield "RDMA: the lanes are not of an RDMA device"
    by_host = result.device == "cpu" or "by the host" in result.ordering
    if listens and (by_host or not rails):
        yield "an RDMA device's writes into GPU memory"
    if len(rails) < 2:
        yield "the order over several rails"


def _as_json(result: Result) -> dict[str, Any]:
    return {
        "ok": result.violations == 0,
        "violations": result.violations,
        **asdict(result),
    }
