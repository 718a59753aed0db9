"""The UCX library that is here, really loaded, in a process of its own."""

from __future__ import annotations

import ctypes
import faulthandler
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from support.children import Children
from support.link import Link
from tapchannel.rdma import rdma_devices
from tapchannel.ucx_candidates import UcxCandidate, candidates
from tapchannel.ucx_library import LoadPlan, choose_ucx, loading, pick
from tapchannel.ucx_probe import mapped_ucx

pytestmark = pytest.mark.ucx

UCX_SIGNALS = (signal.SIGHUP, signal.SIGILL, signal.SIGBUS, signal.SIGFPE, signal.SIGSEGV)
# A program of UCX's smallest kind: a context, as loud as UCX gets without being asked for debug.
LOUD = """
import ctypes
from tapchannel.ucx_library import choose_ucx, loading
with loading(choose_ucx(False, False)) as plan:
    ucx = [ctypes.CDLL(file) for file in (*plan.preload, plan.libucp)][-1]
config, context, asked = ctypes.c_void_p(), ctypes.c_void_p(), (ctypes.c_uint64 * 64)(1, 2)
print(ucx.ucp_config_read(None, None, ctypes.byref(config)))
print(ucx.ucp_init_version(1, 13, asked, config, ctypes.byref(context)))
"""


def load(plan: LoadPlan) -> ctypes.CDLL:
    """Load a UCX as its plan says."""
    process = ctypes.CDLL(None)
    process.dlopen.restype = ctypes.c_void_p
    for sibling in plan.preload:
        assert process.dlopen(os.fsencode(sibling), os.RTLD_LAZY | os.RTLD_LOCAL), sibling
    return ctypes.CDLL(plan.libucp, os.RTLD_NOW | os.RTLD_LOCAL)


def caught_signals() -> set[signal.Signals]:
    """Give the signals among UCX's that some handler of this process catches."""
    status = Path("/proc/self/status").read_text()
    mask = int(status.partition("SigCgt:")[2].split()[0], 16)
    return {number for number in UCX_SIGNALS if mask >> (number - 1) & 1}


def of_origin(origin: str) -> Iterator[UcxCandidate]:
    """Give this machine's UCX of one origin, if it has it."""
    return (found for found in candidates() if found.origin == origin)


def refusal_of(link: Link, origin: str) -> str:
    """Say why this machine's UCX of one origin cannot be used, if so."""
    return next(of_origin(origin)).refusal


def load_from(link: Link, origin: str) -> dict[str, Any]:
    """Load the UCX of one origin; tell what this process looks like afterwards."""
    faulthandler.disable()
    before, environment = caught_signals(), dict(os.environ)
    choice = pick(of_origin(origin), False, False)
    with loading(choice) as plan:
        ucx = load(plan)
    components, count = ctypes.c_void_p(), ctypes.c_uint()
    assert ucx.uct_query_components(ctypes.byref(components), ctypes.byref(count)) == 0
    if origin == "libucx wheel":  # another package that uses it loads it this way
        importlib.import_module("libucx").load_library()
    return {
        "choice": choice,
        "components": count.value,
        "mapped": mapped_ucx(),
        "caught": caught_signals() - before,
        "environment": dict(os.environ) == environment,
        "later": [*candidates()],
    }


@pytest.fixture(scope="module", params=["system", "libucx wheel", "nixl wheel"])
def found(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Load the UCX of one origin in a process of its own."""
    with Children(limit=50) as children:
        # Not looked for here: a test before this one may have loaded UCX into this process.
        refusal = children.start(refusal_of, request.param, env={"TAPCHANNEL_UCX": None}).result()
        if refusal:
            pytest.skip(f"{request.param}: {refusal}")
        return children.start(load_from, request.param, env={"TAPCHANNEL_UCX": None}).result()


def test_one_copy_is_loaded(found: dict[str, Any]) -> None:
    """Catches a second copy of UCX, of another folder or another file of the same folder."""
    chosen = found["choice"].chosen
    assert sorted(found["mapped"]) == ["ucm", "ucp", "ucs", "uct"]
    assert {(len(files), files[0].parent) for files in found["mapped"].values()} == {
        (1, chosen.path.parent)
    }
    assert found["components"] == len(chosen.transports)
    assert chosen.transports >= {"self", "tcp"}
    (later,) = found["later"]
    assert (later.origin, later.path, later.refusal) == ("loaded", chosen.path, "")
    assert later.transports == chosen.transports


def test_process_keeps_its_signals_and_variables(found: dict[str, Any]) -> None:
    """Catches a UCX that takes SIGSEGV from faulthandler, or outlives its terminal's hangup."""
    assert found["caught"] == set()
    assert found["environment"]


def choose_named(link: Link) -> object:
    """Choose under TAPCHANNEL_UCX."""
    return choose_ucx(False, False).chosen


def test_named_library_is_chosen() -> None:
    """Catches a variable that is not read, for a folder and for a file."""
    chosen = pick(candidates(), False, False).chosen
    assert chosen.path is not None
    for where in (chosen.path.parent, chosen.path):
        with Children(limit=50) as children:
            named = children.start(choose_named, env={"TAPCHANNEL_UCX": str(where)}).result()
        assert named.origin == "TAPCHANNEL_UCX"
        assert named.path.parent == chosen.path.parent
        assert named.version == chosen.version


def test_log_goes_to_standard_error() -> None:
    """Catches UCX's log among a program's own output, where it would spoil JSON."""
    env = {key: value for key, value in os.environ.items() if key != "UCX_LOG_FILE"}
    ended = subprocess.run(
        [sys.executable, "-c", LOUD],
        env={**env, "UCX_LOG_LEVEL": "info"},
        capture_output=True,
        text=True,
        timeout=50,
        check=True,
    )
    assert ended.stdout.split() == ["0", "0"]
    assert "UCX" in ended.stderr


@pytest.mark.rdma
def test_verbs_find_the_devices() -> None:
    """Catches verbs that load but drive none of the devices, so that all goes over TCP."""
    usable = {device.name for device in rdma_devices() if not device.refusal}
    chosen = pick(candidates(), True, False).chosen
    assert usable
    assert set(chosen.verbs_devices) >= usable
