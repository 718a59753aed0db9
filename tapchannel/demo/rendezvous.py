"""Where the stages' processes find each other: one store on loopback, held by the parent."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

# torch documents these names, but does not export them by a type checker's rules.
Store = dist.Store  # pyright: ignore[reportPrivateImportUsage]
TCPStore = dist.TCPStore  # pyright: ignore[reportPrivateImportUsage]
PrefixStore = dist.PrefixStore  # pyright: ignore[reportPrivateImportUsage]

PATIENCE = timedelta(seconds=120)
_LOOPBACK = "127.0.0.1"


def host() -> tuple[Store, int]:
    """Open the store and return it with its port; it lives as long as the returned object."""
    # Port 0: the system picks a free one, so there is nothing to guess or to race for.
    store = TCPStore(_LOOPBACK, 0, is_master=True, wait_for_workers=False, timeout=PATIENCE)
    return store, store.port


def join(port: int) -> Store:
    """Connect to the store that `host` opened."""
    return TCPStore(_LOOPBACK, port, is_master=False, timeout=PATIENCE)


def part(store: Store, name: str) -> Store:
    """Return a part of the store that shares no key with any other part."""
    return PrefixStore(name, store)
