"""The UCX libraries within reach: the one named, the one loaded, the system's and the wheels'."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Final, Literal

from .ucx_probe import UCX_FILE, Probe, mapped_ucx, probe

VARIABLE: Final = "TAPCHANNEL_UCX"
OLDEST: Final = (1, 13)
_NEXT_MAJOR: Final = (2,)

Origin = Literal["TAPCHANNEL_UCX", "loaded", "system", "libucx wheel", "nixl wheel"]

_LIBUCX_WHEELS: Final = ("libucx-cu12", "libucx-cu13")
_NIXL_WHEELS: Final = ("nixl-cu12", "nixl-cu13")

# What UCX would do to the process that loads it, unless the user wants it: write its log among the
# program's own output, take SIGSEGV and SIGBUS from faulthandler, and survive a hangup.
_MANNERS: Final = {
    "UCX_LOG_FILE": "stderr",
    "UCX_HANDLE_ERRORS": "none",
    "UCX_DEBUG_SIGNO": "0",
}
# A UCX that brings its own libibverbs has an EFA module linked to the system's libefa, and through
# it to a second libibverbs and libnl: where rdma-core is installed, the process crashes at its end.
_MANNERS_OF_OWN_VERBS: Final = {"UCX_MODULES": "^efa"}


@dataclass(frozen=True, slots=True)
class UcxCandidate:
    """One UCX library: where it comes from and what it has, or why it cannot be used.

    ``transports`` are UCX's components (``tcp``, ``ib``, ``cuda_cpy``), ``absent`` says why one
    that matters is not among them, ``verbs_devices`` are the RDMA devices that it can open,
    ``preload`` are its own libraries to load before libucp, lest it takes another copy's.
    """

    origin: Origin
    path: Path | None
    version: str = ""
    transports: frozenset[str] = frozenset()
    verbs_devices: tuple[str, ...] = ()
    absent: Mapping[str, str] = field(default_factory=dict[str, str])
    preload: tuple[str, ...] = ()
    refusal: str = ""

    @property
    def has_verbs(self) -> bool:
        """Whether it was built for RDMA devices, and that part of it loads."""
        return "ib" in self.transports

    @property
    def has_cuda(self) -> bool:
        """Whether it knows GPU memory, which needs the CUDA driver too."""
        return "cuda_cpy" in self.transports

    @property
    def name(self) -> str:
        """Its origin and its place, as they stand in reports."""
        return f"{self.origin} {self.path}" if self.path else self.origin

    def shortfall(self, needs_verbs: bool, needs_cuda: bool) -> str:
        """Say why it does not do for the job; empty if it does."""
        if self.refusal:
            return self.refusal
        if needs_cuda and not self.has_cuda:
            return f"no CUDA: {self.absent['cuda_cpy']}"
        if needs_verbs and not self.has_verbs:
            return f"no verbs: {self.absent['ib']}"
        if needs_verbs and not self.verbs_devices:
            return "its verbs find no RDMA device: no driver for it, or no access to it"
        return ""


def candidates() -> Iterator[UcxCandidate]:
    """Give the UCX libraries to choose from, in their order of preference.

    Blocks:     until short-lived processes have looked at the next one, once for each library.
    """
    loaded = mapped_ucx()
    named = os.environ.get(VARIABLE)
    if named:
        yield _named(Path(named).absolute(), loaded)
    elif loaded:
        yield from (_examined_loaded("loaded", path, loaded) for path in _loaded_files(loaded))
    else:
        yield _system()
        yield _libucx_wheel()
        yield from _nixl_wheels()


def manners(folder: Path | None) -> dict[str, str]:
    """Give the variables that UCX is to find while it is loaded; the user's own stay."""
    own_verbs = folder is not None and any(folder.glob("libibverbs-*.so*"))
    wanted = _MANNERS | (_MANNERS_OF_OWN_VERBS if own_verbs else {})
    return {name: value for name, value in wanted.items() if name not in os.environ}


def _named(where: Path, loaded: Mapping[str, tuple[Path, ...]]) -> UcxCandidate:
    if not where.exists():
        return UcxCandidate(VARIABLE, where, refusal="there is no such file or folder")
    path = _libucp_in(where) if where.is_dir() else Path(os.path.realpath(where))
    if path is None:
        return UcxCandidate(VARIABLE, where, refusal="there is no libucp.so in this folder")
    if not loaded:
        return _examined(VARIABLE, path)
    here = _loaded_files(loaded)
    for other in here:
        if other.parent == path.parent:
            return _examined_loaded(VARIABLE, other, loaded)
    refusal = f"this process has loaded {here[0]} already, and two copies must never meet"
    return UcxCandidate(VARIABLE, path, refusal=refusal)


def _system() -> UcxCandidate:
    """Ask the dynamic loader, which knows LD_LIBRARY_PATH, its cache and the standard folders."""
    seen = probe(["libucp.so.0"], manners(None))
    if seen.failure or not seen.mapped.get("ucp"):
        return UcxCandidate("system", None, refusal=seen.failure)
    return _examined("system", seen.mapped["ucp"][0])


def _libucx_wheel() -> UcxCandidate:
    found = {name: path for name in _LIBUCX_WHEELS for path in _files_of(name, "libucp.so")}
    if len(found) > 1:
        refusal = f"{' and '.join(found)} overwrite each other's files: uninstall both, install one"
        return UcxCandidate("libucx wheel", None, refusal=refusal)
    for path in found.values():
        return _examined("libucx wheel", path)
    return UcxCandidate("libucx wheel", None, refusal="not installed")


def _nixl_wheels() -> Iterator[UcxCandidate]:
    found = [path for name in _NIXL_WHEELS for path in _files_of(name, "libucp-*.so*")]
    yield from (_examined("nixl wheel", path) for path in found)
    if not found:
        yield UcxCandidate("nixl wheel", None, refusal="not installed")


def _files_of(wheel: str, pattern: str) -> list[Path]:
    """Give an installed wheel's files whose name fits, none if it is not installed."""
    try:
        files = metadata.distribution(wheel).files or []
    except metadata.PackageNotFoundError:
        return []
    return [Path(os.path.realpath(str(file.locate()))) for file in files if file.match(pattern)]


def _libucp_in(folder: Path) -> Path | None:
    files = [path for path in sorted(folder.iterdir()) if _library_name(path) == "ucp"]
    return Path(os.path.realpath(files[0])) if files else None


def _library_name(path: Path) -> str:
    match = UCX_FILE.fullmatch(path.name)
    return match[1] if match else ""


def _loaded_files(loaded: Mapping[str, tuple[Path, ...]]) -> Sequence[Path]:
    """Give the libucp of each copy in this process, mapped or beside what is mapped."""
    if "ucp" in loaded:
        return loaded["ucp"]
    first = next(iter(loaded.values()))[0]
    return [_libucp_in(first.parent) or first]


def _examined_loaded(
    origin: Origin, path: Path, loaded: Mapping[str, tuple[Path, ...]]
) -> UcxCandidate:
    if not path.exists():
        refusal = "its file was replaced after this process had loaded it: restart the process"
        return UcxCandidate(origin, path, refusal=refusal)
    mapped = [file for name in ("ucs", "uct") for file in loaded.get(name, ())]
    siblings = tuple(str(file) for file in mapped if file.parent == path.parent)
    # Loaded libraries are found by their names: nothing is to be loaded before libucp.
    return _judged(origin, path, (), _seen(siblings, path))


@cache
def _examined(origin: Origin, path: Path) -> UcxCandidate:
    preload = _siblings(path, ("ucs", "uct"))
    seen = _seen(preload, path)
    if _strangers(seen, path.parent):  # it was moved, and its libucs takes another libucm
        preload = _siblings(path, ("ucm", "ucs", "uct"))
        seen = _seen(preload, path)
    return _judged(origin, path, preload, seen)


@cache
def _seen(preload: tuple[str, ...], path: Path) -> Probe:
    return probe([*preload, str(path)], manners(path.parent))


def _siblings(libucp: Path, names: Sequence[str]) -> tuple[str, ...]:
    """Give libucp's own libraries, each in the file with the same ending as libucp's.

    A wheel holds each library thrice, for want of links: another ending is another copy.
    """
    ending = libucp.name.partition(".")[2]
    files = [path for path in sorted(libucp.parent.iterdir()) if path.name.endswith(f".{ending}")]
    return tuple(str(path) for name in names for path in files if _library_name(path) == name)


def _strangers(seen: Probe, folder: Path) -> list[Path]:
    """Give what was mapped from other folders than libucp's, or twice."""
    files = [file for mapped in seen.mapped.values() for file in mapped[1:]]
    return files + [mapped[0] for mapped in seen.mapped.values() if mapped[0].parent != folder]


def _judged(origin: Origin, path: Path, preload: tuple[str, ...], seen: Probe) -> UcxCandidate:
    version, refusal = ".".join(map(str, seen.version)), seen.failure
    strangers = _strangers(seen, path.parent)
    if not refusal and not OLDEST <= seen.version < _NEXT_MAJOR:
        refusal = f"its version is {version}, and 1.13 or a later 1.x is needed"
    if not refusal and strangers:
        refusal = f"it would be mixed with {strangers[0]}, which is of another copy"
    return UcxCandidate(
        origin,
        path,
        version,
        seen.components,
        seen.verbs_devices,
        seen.unloadable,
        preload,
        refusal,
    )
