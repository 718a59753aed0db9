"""One layout, two languages: the check at import fires, and the native offsets add up."""

from __future__ import annotations

import struct
import subprocess
import sys

import pytest

from tapchannel import _native
from tapchannel.errors import ProtocolError
from tapchannel.keys import POISON_BIT, Key
from tapchannel.layout_check import EXPECTED, check_layout
from tapchannel.telemetry import _HEADER


def test_this_build_fits() -> None:
    """A native module of another source than this package."""
    check_layout()


@pytest.mark.parametrize("name", sorted(EXPECTED))
def test_any_other_value_is_refused(name: str) -> None:
    """A constant that the check does not look at."""
    facts = _native.layout()
    for other in (facts[name] + 1, None):
        with pytest.raises(ProtocolError) as raised:
            check_layout({**facts, name: other})  # type: ignore[dict-item]
        assert name in str(raised.value)
        assert raised.value.expected == EXPECTED[name]
        assert "reinstall" in str(raised.value.next_step)


def test_missing_constant_is_refused() -> None:
    """A native module from before a constant was checked."""
    facts = _native.layout()
    facts.pop("version")
    with pytest.raises(ProtocolError, match="version"):
        check_layout(facts)


def test_check_runs_at_import() -> None:
    """A package that imports with a module it does not fit, and then misreads shared memory."""
    program = (
        "import importlib, tapchannel\n"
        "from tapchannel import layout_check\n"
        "layout_check.EXPECTED['version'] = 999\n"
        "try:\n"
        "    importlib.reload(tapchannel)\n"
        "except tapchannel.ProtocolError as error:\n"
        "    print(error)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=30
    )
    assert "version differs" in told.stdout


def test_offsets_add_up() -> None:
    """Words of different sides on one cache line, or regions that overlap."""
    facts = _native.layout()
    line, depth, cells = 64, 3, 5
    stamps = -(-depth * cells * 8 // line) * line
    ring = line + facts["ring_entries"] * facts["event_bytes"]
    announces = depth * cells * facts["announce_bytes"]
    assert facts["stamps_3_5"] % line == 0
    assert facts["announces_3_5"] == facts["stamps_3_5"] + stamps
    end = facts["announces_3_5"] + announces + 2 * ring
    assert facts["block_bytes_3_5"] == -(-end // 4096) * 4096


def test_stamp_arithmetic_is_the_same() -> None:
    """Two implementations of one word that drift apart."""
    facts = _native.layout()
    assert facts["stamp_1_2_3"] == Key(epoch=1, step=2, microbatch=2).stamp()
    assert facts["poison_bit"] == POISON_BIT


def test_header_is_what_inspect_reads() -> None:
    """A reader of another process's block that takes its fields from the wrong places."""
    facts = _native.layout()
    assert facts["header_bytes"] == 64
    assert struct.calcsize(_HEADER.format) <= facts["header_bytes"]
