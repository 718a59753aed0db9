"""The process that looks at a UCX library, and what of UCX a process has mapped."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tapchannel.ucx_probe import mapped_ucx, probe

MAPS = """\
7f00-7f01 r--p 00000000 fe:00 11 /usr/lib/libucs.so.0.0.0
7f01-7f02 r-xp 00001000 fe:00 11 /usr/lib/libucs.so.0.0.0
7f02-7f03 r--p 00000000 fe:00 12 /opt/two words/libucp-b39b3ed9.so.0.0.0
7f03-7f04 r--p 00000000 fe:00 13 /usr/lib/libucp.so.0 (deleted)
7f04-7f05 r--p 00000000 fe:00 14 /usr/lib/ucx/libuct_cma.so.0
7f05-7f06 r--p 00000000 fe:00 15 /usr/lib/libucs_signal.so.0
7f06-7f07 rw-p 00000000 00:00 0
7f07-7f08 rw-p 00000000 00:00 0 [stack]
"""


def libm() -> Path:
    """Find a shared library that is surely here and is not UCX's."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split()[-1]) for line in lines if "/libm.so" in line)


def test_mapped_libraries_are_told_apart() -> None:
    """Catches a module or libucs_signal taken for a copy, and a copy that is overlooked."""
    assert mapped_ucx(MAPS) == {
        "ucs": (Path("/usr/lib/libucs.so.0.0.0"),),
        "ucp": (
            Path("/opt/two words/libucp-b39b3ed9.so.0.0.0"),
            Path("/usr/lib/libucp.so.0 (deleted)"),
        ),
    }


def test_this_process_stays_clean() -> None:
    """Catches a look at a library that maps it here."""
    before = mapped_ucx()
    probe(["libucp.so.0"], {})
    assert mapped_ucx() == before


@pytest.mark.parametrize("name", ["missing.so", "text.so"])
def test_what_does_not_load_is_told(tmp_path: Path, name: str) -> None:
    """Catches a library that cannot be loaded but is offered."""
    (tmp_path / "text.so").write_text("this is no library")
    seen = probe([str(tmp_path / name)], {})
    assert name in seen.failure
    assert seen.version == ()


def test_another_library_is_no_ucx() -> None:
    """Catches any library taken for UCX."""
    assert "ucp_get_version" in probe([str(libm())], {}).failure


def test_crash_is_told(tmp_path: Path) -> None:
    """Catches a library that kills who loads it, taken for a usable one."""
    broken = tmp_path / "broken.so"
    broken.write_bytes(libm().read_bytes()[:8192])  # mapped whole: what is beyond faults
    assert "ends by signal" in probe([str(broken)], {}).failure


def test_hang_is_told_in_time(tmp_path: Path) -> None:
    """Catches a load that never returns, as from a dead network file system."""
    pipe = tmp_path / "never.so"
    os.mkfifo(pipe)  # opening it waits for a writer
    assert probe([str(pipe)], {}, seconds=0.5).failure == "it did not load within 0.5 s"


def test_nothing_to_look_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Catches an exception where Python is embedded and has no executable."""
    monkeypatch.setattr("sys.executable", "")
    assert "no Python executable" in probe(["libucp.so.0"], {}).failure
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    assert "no process could be started" in probe(["libucp.so.0"], {}).failure
