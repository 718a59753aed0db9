"""The flight recorder, read by the other side and from outside."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from multiprocess import roles
from multiprocess.conftest import Crew, MailboxMaker
from multiprocess.roles import TAPS
from support.workers import Worker
from tapchannel import Mailbox, telemetry
from tapchannel.errors import ConfigError
from tapchannel.telemetry import Event


def pushed_steps(events: Sequence[Event], step: int) -> dict[tuple[int, int], list[str]]:
    """Give what the producer did for each (microbatch, cell) of a pass, in order."""
    done: dict[tuple[int, int], list[str]] = {}
    for event in events:
        if event.side != "producer" or event.key is None or event.key.step != step:
            continue
        if event.step_name in ("announce", "put", "stamp"):
            done.setdefault((event.key.microbatch, event.cell), []).append(event.step_name)
    return done


@pytest.fixture
def halted(crew: Crew, store: str, mailbox_of: MailboxMaker) -> Worker:
    """Give a producer that stands still after it pushed one microbatch and two taps of pass 3."""
    producer = crew.worker()
    mailbox = mailbox_of()
    producer.call(roles.attach, store, 0)
    mailbox.open_pass(3, 2)
    producer.call(roles.open_pass, 3, 2)
    producer.call(roles.push, 0)
    producer.call(roles.push, 1, TAPS[:2])
    producer.child.stop()
    return producer


WANTED = {
    (microbatch, cell): ["announce", "put", "stamp"]
    for microbatch, cell in ((0, 0), (0, 1), (0, 2), (1, 0), (1, 1))
}


def test_stopped_process_is_read_from_outside(halted: Worker) -> None:
    """Catches a recorder that needs its process to answer: who hangs is whom one wants to read."""
    events = telemetry.inspect(halted.pid)
    assert pushed_steps(events, 3) == WANTED
    assert [event.time_ns for event in events] == sorted(event.time_ns for event in events)
    assert any(e.side == "consumer" and e.step_name == "grant" for e in events)
    halted.child.resume()
    halted.call(roles.push, 1, TAPS[2:])
    assert pushed_steps(telemetry.inspect(halted.pid), 3)[1, 2] == ["announce", "put", "stamp"]


def test_command_reads_a_stopped_process(halted: Worker) -> None:
    """Catches a command that shows other events than the recorder holds."""
    line = [sys.executable, "-m", "tapchannel", "inspect", str(halted.pid), "--json"]
    shown = subprocess.run(line, capture_output=True, text=True, timeout=40, check=True).stdout
    events = [json.loads(line) for line in shown.splitlines()]
    stamps = [event for event in events if event["step_name"] == "stamp"]
    assert [(event["key"]["microbatch"], event["cell"]) for event in stamps] == sorted(WANTED)


def test_process_without_a_channel_is_an_error(crew: Crew) -> None:
    """Catches an empty recording shown as if all were well."""
    worker = crew.worker()
    with pytest.raises(ConfigError, match="no open channel"):
        telemetry.inspect(worker.pid)
    with pytest.raises(ConfigError, match="cannot be inspected"):
        telemetry.inspect(1 << 30)


def test_long_channel_name_is_found(crew: Crew, tmp_path: Path) -> None:
    """Catches a name that is cut where the lane's number should follow."""
    worker = crew.worker()
    worker.call(serve_named, f"unix://{tmp_path}/socket", "ü" * 128)
    assert telemetry.inspect(worker.pid)


def serve_named(desk: SimpleNamespace, store: str, name: str) -> None:
    """Make a mailbox under a name, and open a pass."""
    desk.mailbox = Mailbox(roles.PLAN, roles.ONE, store=store, name=name)
    desk.mailbox.open_pass(0, 1)
