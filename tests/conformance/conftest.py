"""Every transport that the one suite of this folder runs on, its producers here and apart."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.channels import CUDA_IPC, CUDA_VMM, SHM, STAGED, STAGED_CPU, UCX, UCX_GPU, Maker, Wire
from support.children import Children
from support.places import Apart, Here

WIRES = [
    pytest.param(SHM, id="shm"),
    pytest.param(UCX, id="ucx", marks=pytest.mark.ucx),
    pytest.param(CUDA_VMM, id="cuda_ipc-vmm", marks=pytest.mark.gpu),
    pytest.param(CUDA_IPC, id="cuda_ipc-ipc", marks=pytest.mark.gpu),
    pytest.param(STAGED_CPU, id="host_staged-cpu"),
    pytest.param(STAGED, id="host_staged", marks=pytest.mark.gpu),
    pytest.param(UCX_GPU, id="ucx-gpu", marks=[pytest.mark.gpu, pytest.mark.ucx]),
]


# One process serves all the tests of a run: to start one for each would take minutes.
@pytest.fixture(scope="session", params=[Here.name, Apart.name])
def place(request: pytest.FixtureRequest) -> Iterator[Here | Apart]:
    """Give the process that the producers live in."""
    if request.param == Here.name:
        yield Here()
        return
    with Children() as children:
        apart = Apart(children)
        yield apart
        apart.end()


@pytest.fixture(params=WIRES)
def wire(request: pytest.FixtureRequest) -> Wire:
    """Give the transport under test."""
    return request.param


@pytest.fixture
def channel_of(wire: Wire, place: Here | Apart, tmp_path: Path) -> Iterator[Maker]:
    """Make channels on the transport under test; all are closed after the test."""
    with Maker(wire, place, tmp_path) as maker:
        yield maker
