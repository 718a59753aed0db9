"""The ways to move bytes that need nothing but torch, and how others are found."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import cast

from ...errors import ConfigError
from ..peer import Peer
from . import bare, channel, distributed, staging, symmetric

_HERE = (channel, bare, staging, distributed, symmetric)


def source_folder() -> Path | None:
    """Give ``bench/peers`` of the source tree that this package runs from, if it does."""
    folder = Path(__file__).parents[3] / "bench" / "peers"
    return folder if folder.is_dir() else None


def catalogue(extra: Path | None) -> dict[str, Peer]:
    """Give all peers by name: tapchannel first, then the limit, then the others.

    Raises:
        ConfigError: a file of the folder ``extra`` is not a module that defines ``PEERS``.
    """
    found: dict[str, Peer] = {}
    modules = [*_HERE, *(_loaded(path) for path in _files(extra))]
    for module in modules:
        for peer in cast("tuple[Peer, ...]", module.PEERS):
            found[peer.name] = peer
    return found


def _files(extra: Path | None) -> list[Path]:
    if extra is None:
        return []
    if not extra.is_dir():
        raise ConfigError("--extra-peers is no folder", seen=str(extra))
    return sorted(path for path in extra.glob("*.py") if not path.name.startswith("_"))


def _loaded(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"tapchannel_peer_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ConfigError("peer cannot be loaded", seen=str(path))
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ConfigError(
            "peer cannot be loaded", seen=str(path), cause=f"{type(error).__name__}: {error}"
        ) from error
    if not isinstance(getattr(module, "PEERS", None), tuple):
        raise ConfigError("peer's file defines no PEERS", seen=str(path), expected="a tuple")
    return module


__all__ = ["catalogue", "source_folder"]
