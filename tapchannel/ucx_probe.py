"""Looks at one UCX library from a process of its own, so that this one maps nothing of it.

A second copy of UCX in a process patches the same libc functions and registers the same memory: a
library that is only looked at must not stay. This file is both sides: `probe` starts it as a
script, and the script imports nothing but the standard library.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

SECONDS_TO_ANSWER: Final = 30.0  # the first load from a network file system is slow

UCX_FILE: Final = re.compile(r"lib(ucp|ucs|uct|ucm)(-[0-9a-f]+)?\.so[.0-9]*")
_LIBRARIES: Final = ("ucm", "ucs", "uct", "ucp")
_MODULES: Final = {"ib": "libuct_ib", "cuda_cpy": "libuct_cuda"}  # component: the file it is in
_NAME, _MD_COUNT, _MD_RESOURCES = 1, 2, 4  # fields of uct_component_attr


@dataclass(frozen=True, slots=True)
class Probe:
    """What one UCX library says of itself; ``failure`` is empty where it could be loaded."""

    failure: str = ""
    version: tuple[int, ...] = ()
    components: frozenset[str] = frozenset()
    verbs_devices: tuple[str, ...] = ()
    unloadable: dict[str, str] = field(default_factory=dict[str, str])
    mapped: dict[str, tuple[Path, ...]] = field(default_factory=dict[str, tuple[Path, ...]])


def probe(
    libraries: Sequence[str],
    environment: Mapping[str, str],
    seconds: float = SECONDS_TO_ANSWER,
) -> Probe:
    """Load the libraries, libucp last, in a short-lived process and ask what is in it.

    Blocks:     until that process has ended, for ``seconds`` at most.
    On failure: nothing is raised: the probe's ``failure`` says what went wrong.
    """
    if not sys.executable:
        return Probe("there is no Python executable to look at it with")
    command = [sys.executable, "-I", "-S", __file__, *libraries]
    try:
        ended = subprocess.run(
            command,
            env={**os.environ, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Probe(f"it did not load within {seconds:g} s")
    except OSError as error:
        return Probe(f"no process could be started to look at it: {error}")
    if ended.returncode:
        return Probe(f"a process that loads it {_end_of(ended.returncode, ended.stderr)}")
    return _told(json.loads(ended.stdout))


def _end_of(code: int, said: bytes) -> str:
    if code < 0:
        return f"ends by signal {-code}"
    lines = said.decode(errors="replace").strip().splitlines()
    return f"ends with exit code {code}: {lines[-1] if lines else 'it does not say why'}"


def _told(answer: Mapping[str, Any]) -> Probe:
    return Probe(
        failure=answer["failure"],
        version=tuple(answer["version"]),
        components=frozenset(answer["components"]),
        verbs_devices=tuple(answer["verbs_devices"]),
        unloadable=answer["unloadable"],
        mapped={name: tuple(map(Path, paths)) for name, paths in answer["mapped"].items()},
    )


def mapped_ucx(maps: str | None = None) -> dict[str, tuple[Path, ...]]:
    """Give the UCX libraries that a process has mapped, each name's files in order of address.

    A file that was replaced since keeps the ``(deleted)`` that the kernel puts behind its name.
    """
    lines = Path("/proc/self/maps").read_text() if maps is None else maps
    found: dict[str, dict[Path, None]] = {}
    for line in lines.splitlines():
        path = line.split(maxsplit=5)[5:]
        match = path and UCX_FILE.fullmatch(os.path.basename(path[0].removesuffix(" (deleted)")))
        if match:
            found.setdefault(match[1], {})[Path(path[0])] = None
    return {name: tuple(paths) for name, paths in found.items()}


class _ComponentAttr(ctypes.Structure):
    """uct_component_attr_t up to the fields that are asked for, as it has been since 1.6."""

    _fields_ = [
        ("field_mask", ctypes.c_uint64),
        ("name", ctypes.c_char * 16),
        ("md_resource_count", ctypes.c_uint),
        ("md_resources", ctypes.c_void_p),
        ("spare", ctypes.c_uint64 * 8),
    ]


def _loaded(libraries: Sequence[str]) -> ctypes.CDLL:
    """Load as the native core does: `ctypes` alone would bind the siblings' symbols at once."""
    process = ctypes.CDLL(None)
    process.dlopen.restype = ctypes.c_void_p
    process.dlerror.restype = ctypes.c_char_p
    for sibling in libraries[:-1]:
        if not process.dlopen(os.fsencode(sibling), os.RTLD_LAZY | os.RTLD_LOCAL):
            raise OSError(os.fsdecode(process.dlerror() or b"no reason given"))
    return ctypes.CDLL(libraries[-1], os.RTLD_NOW | os.RTLD_LOCAL)


def _version(ucx: ctypes.CDLL) -> list[int]:
    numbers = [ctypes.c_uint() for _ in range(3)]
    ucx.ucp_get_version(*map(ctypes.byref, numbers))
    return [number.value for number in numbers]


def _components(ucx: ctypes.CDLL) -> tuple[list[str], list[str]]:
    """Return the names of the transports' components, and the devices that verbs sees."""
    components, count = ctypes.POINTER(ctypes.c_void_p)(), ctypes.c_uint()
    if code := ucx.uct_query_components(ctypes.byref(components), ctypes.byref(count)):
        raise OSError(f"uct_query_components returned {code}")
    names: list[str] = []
    devices: list[str] = []
    for component in components[: count.value]:
        handle, attr = ctypes.c_void_p(component), _ComponentAttr(field_mask=_NAME)
        if code := ucx.uct_component_query(handle, ctypes.byref(attr)):
            raise OSError(f"uct_component_query returned {code}")
        names.append(attr.name.decode())
        if names[-1] == "ib":
            devices = _devices(ucx, handle)
    return names, devices


def _devices(ucx: ctypes.CDLL, component: ctypes.c_void_p) -> list[str]:
    attr = _ComponentAttr(field_mask=_MD_COUNT)
    if ucx.uct_component_query(component, ctypes.byref(attr)) or not attr.md_resource_count:
        return []
    names = (ctypes.c_char * 16 * attr.md_resource_count)()
    attr = _ComponentAttr(field_mask=_MD_RESOURCES, md_resources=ctypes.addressof(names))
    if ucx.uct_component_query(component, ctypes.byref(attr)):
        return []
    return [name.value.decode() for name in names]


def _unloadable(components: Sequence[str], libucs: str) -> dict[str, str]:
    """Say why each module is absent, which UCX itself passes over in silence."""
    reasons: dict[str, str] = {}
    folder = Path(libucs).parent / "ucx"
    for component, stem in _MODULES.items():
        if component in components:
            continue
        files = sorted(folder.glob(f"{stem}.so*"))
        if not files:
            reasons[component] = f"it has no {stem}"
            continue
        try:
            ctypes.CDLL(str(files[0]))
            reasons[component] = f"UCX does not use its {files[0].name}"
        except OSError as error:
            reasons[component] = f"its {files[0].name} does not load: {error}"
    return reasons


def _answer(libraries: Sequence[str]) -> dict[str, Any]:
    said: dict[str, Any] = {
        "failure": "",
        "version": [],
        "components": [],
        "verbs_devices": [],
        "unloadable": {},
        "mapped": {},
    }
    try:
        ucx = _loaded(libraries)
        said["version"] = _version(ucx)
        said["components"], said["verbs_devices"] = _components(ucx)
        said["mapped"] = {name: [*map(str, files)] for name, files in mapped_ucx().items()}
        said["unloadable"] = _unloadable(said["components"], said["mapped"]["ucs"][0])
    except (OSError, AttributeError, KeyError) as error:
        said["failure"] = f"{error}"
    return said


def _main() -> None:
    # UCX writes its log to standard output: the answer gets a descriptor of its own.
    answer = os.dup(1)
    os.dup2(2, 1)
    os.write(answer, json.dumps(_answer(sys.argv[1:])).encode())


if __name__ == "__main__":
    _main()
