"""Which UCX library this process uses, and how it is loaded: chosen once, never two.

In this order: the one that ``TAPCHANNEL_UCX`` names; else the one that this process has loaded
already; else the first that has what the job needs of the system's, the libucx wheel's and the
NIXL wheel's. What was passed over keeps its reason.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .errors import TransportUnavailable
from .ucx_candidates import VARIABLE, UcxCandidate, candidates, manners


@dataclass(frozen=True, slots=True)
class UcxChoice:
    """The library that this process uses, and why not those that come before it.

    ``remark`` says what the job wants and the chosen one lacks, where the user insists on it.
    """

    chosen: UcxCandidate
    passed_over: dict[str, str]
    remark: str = ""


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """What to load: ``preload`` in order with RTLD_LAZY | RTLD_LOCAL, then ``libucp``.

    ``libucp`` takes RTLD_NOW | RTLD_LOCAL. None is ever closed: UCX has patched libc by then.
    ``environment`` is what UCX must find in the environment while it is loaded.
    """

    preload: tuple[str, ...]
    libucp: str
    environment: dict[str, str]


def choose_ucx(needs_verbs: bool, needs_cuda: bool) -> UcxChoice:
    """Choose the UCX library of this process; the first choice binds the later ones.

    Blocks:     until short-lived processes have looked at the libraries; later calls do not.

    Raises:
        TransportUnavailable: no library does for the job; the text gives each one's reason.
    """
    with _choosing:
        if not _chosen:
            _chosen.append(pick(candidates(), needs_verbs, needs_cuda))
        choice = _chosen[0]
    reason = _objection(choice.chosen, needs_verbs, needs_cuda)
    if reason:
        bound = f"{choice.chosen.name}, which this process uses already,"
        raise _unavailable({bound: reason}, needs_verbs)
    return choice


_choosing = threading.Lock()
_chosen: list[UcxChoice] = []


def pick(found: Iterator[UcxCandidate], needs_verbs: bool, needs_cuda: bool) -> UcxChoice:
    """Pick the first that does for the job; those behind it are not even looked at.

    Raises:
        TransportUnavailable: none does.
    """
    passed_over: dict[str, str] = {}
    for candidate in found:
        reason = _objection(candidate, needs_verbs, needs_cuda)
        if not reason:
            return UcxChoice(candidate, passed_over, candidate.shortfall(needs_verbs, needs_cuda))
        passed_over[candidate.name] = reason
    raise _unavailable(passed_over, needs_verbs)


def _objection(candidate: UcxCandidate, needs_verbs: bool, needs_cuda: bool) -> str:
    # Who names a library without verbs has chosen TCP; nobody can choose to do without CUDA.
    return candidate.shortfall(needs_verbs and candidate.origin != VARIABLE, needs_cuda)


def _unavailable(refused: Mapping[str, str], needs_verbs: bool) -> TransportUnavailable:
    extra = "rdma-cu12 or rdma-cu13" if needs_verbs else "ucx-cu12 or ucx-cu13"
    return TransportUnavailable(
        "no UCX library does for the job",
        refused=refused,
        next_step=f"install tapchannel's extra {extra}, or set {VARIABLE} to the folder of a "
        "libucp.so that does",
    )


def load_plan(choice: UcxChoice) -> LoadPlan:
    """Tell how to load the chosen library so that all of it is of one copy."""
    chosen = choice.chosen
    libucp = Path(chosen.path or "")
    return LoadPlan(chosen.preload, str(libucp), manners(libucp.parent))


@contextmanager
def loading(choice: UcxChoice) -> Generator[LoadPlan]:
    """Give the load plan, with its environment in force until the block ends.

    UCX reads these variables when it is loaded; later they would only reach child processes.
    """
    plan = load_plan(choice)
    os.environ.update(plan.environment)
    try:
        yield plan
    finally:
        for name in plan.environment:
            os.environ.pop(name, None)
