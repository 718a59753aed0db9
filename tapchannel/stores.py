"""Rendezvous: where a mailbox publishes its addresses and an outbox looks them up."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import urllib.parse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final, Protocol, cast

from .endpoints import parse_listen, tcp_parts
from .errors import AttachError, ConfigError
from .layout import checked_name
from .sockets import fresh_address

if TYPE_CHECKING:
    import torch.distributed

MAX_ADDRESS: Final = 512
MAX_HOSTS: Final = 16
_MAX_ENTRY: Final = 4096
_LONGEST_FILE_NAME: Final = 200


class Rendezvous(Protocol):
    """One place for one channel's addresses: this host's own first, then those of the network."""

    def publish(self, addresses: Sequence[str]) -> None:
        """Write the addresses, replacing earlier ones."""
        ...

    def lookup(self) -> tuple[str, ...] | None:
        """Give the addresses, or None while there are none. Never waits."""
        ...

    def describe(self) -> str:
        """Say where the addresses are looked for."""
        ...


class TorchStore:
    """A ``torch.distributed.Store``: the trainer's own, or a client of one."""

    def __init__(self, store: torch.distributed.Store, name: str, origin: str) -> None:
        self._store = store
        self._key = f"tapchannel/{name}"
        self._origin = origin

    def publish(self, addresses: Sequence[str]) -> None:
        """Write the addresses under the channel's key."""
        # torch's stub names str alone; bytes are what it keeps.
        self._store.set(self._key, _encode(addresses))  # pyright: ignore[reportArgumentType]

    def lookup(self) -> tuple[str, ...] | None:
        """Give the addresses, or None while the key is not set."""
        try:
            # check() first: get() would wait for the key, and hold the store's connection.
            if not self._store.check([self._key]):
                return None
            entry = bytes(self._store.get(self._key))
        except RuntimeError as error:  # torch's errors of a lost store derive from it
            raise AttachError(
                "store cannot be asked",
                seen=self.describe(),
                reason=str(error).splitlines()[0],
                next_step="the process that holds the store must outlive the channel's attach",
            ) from error
        return _decode(entry, self.describe())

    def describe(self) -> str:
        """Name the key."""
        return f"key {self._key!r} of {self._origin}"


class FileStore:
    """A folder that both sides see; one small file a channel, written whole or not at all."""

    def __init__(self, folder: Path, name: str) -> None:
        quoted = urllib.parse.quote(name, safe="")
        if len(quoted) > _LONGEST_FILE_NAME:  # quoting can make a name of few letters long
            quoted = hashlib.sha256(name.encode("utf-8")).hexdigest()
        self._path = folder / f"{quoted}.tapchannel"

    def publish(self, addresses: Sequence[str]) -> None:
        """Write the file and move it into place."""
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            handle, temporary = tempfile.mkstemp(dir=self._path.parent, prefix=".tapchannel-")
            with os.fdopen(handle, "wb") as file:
                file.write(_encode(addresses))
            Path(temporary).replace(self._path)
        except OSError as error:
            raise self._unusable(error) from error

    def lookup(self) -> tuple[str, ...] | None:
        """Give the addresses, or None while there is no file."""
        try:
            with self._path.open("rb") as file:
                return _decode(file.read(_MAX_ENTRY + 1), self.describe())
        except FileNotFoundError:
            return None
        except OSError as error:
            raise self._unusable(error) from error

    def describe(self) -> str:
        """Name the file."""
        return f"file {self._path}"

    def _unusable(self, error: OSError) -> ConfigError:
        return ConfigError(
            "store's folder cannot be used",
            seen=self.describe(),
            detail=str(error),
            next_step="name a folder that all ranks may read and write: store='file:///folder'",
        )


class DirectAddress:
    """The mailbox's own socket, named by the caller on both sides: a channel without a store.

    ::

        Mailbox(..., store=DirectAddress("tcp://*:47000"), secret=...)         # listens there
        Outbox(..., store=DirectAddress("tcp://draft-host:47000"), secret=...)

    For an outbox ``"tcp://HOST:PORT"`` or ``"unix:///path.sock"``; a mailbox listens there, unless
    its ``listen=`` says otherwise, and takes all that ``listen=`` may say. A store that is the
    plain text ``"unix:///path.sock"`` means the same; ``"tcp://host:port"`` means a TCPStore.

    Raises:
        ConfigError: it is no such address.
    """

    def __init__(self, address: str) -> None:
        if not address.startswith("unix:///"):
            parse_listen(address)
        self.address = address

    def publish(self, addresses: Sequence[str]) -> None:
        """Do nothing: whoever attaches has the address already."""

    def lookup(self) -> tuple[str, ...] | None:
        """Give the address.

        Raises:
            ConfigError: a mailbox can listen there, but nobody can dial it.
        """
        if self.address.startswith("tcp://") and tcp_parts(self.address) is None:
            raise ConfigError(
                "direct address is not that of one socket",
                seen=repr(self.address),
                expected="'tcp://HOST:PORT', with one host and one port",
            )
        return (self.address,)

    def describe(self) -> str:
        """Name the address."""
        return f"address {self.address}"


def rendezvous(store: object, name: str) -> Rendezvous:
    """Give the rendezvous for ``store``: a torch Store, a URL, or a `DirectAddress`.

    Raises:
        ConfigError: the store is none of these.
        AttachError: no TCPStore answers at a ``tcp://`` address.
    """
    checked_name("channel", name)
    if isinstance(store, str):
        return _from_url(store, name)
    if isinstance(store, DirectAddress):
        return store
    if hasattr(store, "check") and hasattr(store, "set") and hasattr(store, "get"):
        return TorchStore(store, name, type(store).__name__)  # pyright: ignore[reportArgumentType]
    raise ConfigError(
        "store is no place to meet",
        seen=type(store).__name__,
        expected="a torch.distributed.Store, 'file:///folder', 'unix:///path.sock', "
        "'tcp://host:port' of a TCPStore, or tapchannel.stores.DirectAddress",
    )


def own_address(store: object) -> str:
    """Give the address that a mailbox listens on: the caller's, or a fresh one."""
    named = store.address if isinstance(store, DirectAddress) else store
    return named if isinstance(named, str) and named.startswith("unix://") else fresh_address()


def own_listen(store: object, listen: str | None) -> str | None:
    """Give where a mailbox listens for other hosts: as it was told, or at its direct address."""
    if listen is None and isinstance(store, DirectAddress) and store.address.startswith("tcp://"):
        return store.address
    return listen


def _from_url(url: str, name: str) -> Rendezvous:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:  # a port that is no number, a bracket that is not closed
        parts, host, port = urllib.parse.urlsplit(""), None, None
    if parts.scheme in ("file", "unix") and parts.path.startswith("/") and not parts.netloc:
        path = urllib.parse.unquote(parts.path)
        return FileStore(Path(path), name) if parts.scheme == "file" else DirectAddress(url)
    if parts.scheme == "tcp" and host and port:
        return TorchStore(_tcp_client(host, port), name, f"the TCPStore at {url}")
    raise ConfigError(
        "store URL is not understood",
        seen=repr(url),
        expected="'file:///folder', 'unix:///path.sock' or 'tcp://host:port'",
    )


def _tcp_client(host: str, port: int) -> torch.distributed.Store:
    from datetime import timedelta

    import torch.distributed as dist

    try:
        return dist.TCPStore(host, port, is_master=False, timeout=timedelta(seconds=10))
    except (RuntimeError, ValueError) as error:
        raise AttachError(
            "no TCPStore answers",
            seen=f"tcp://{host}:{port}",
            reason=str(error).splitlines()[0],
            next_step="start a TCPStore there first (torchrun's, or your own), "
            "or use a file:// folder that all ranks see",
        ) from error


def _encode(addresses: Sequence[str]) -> bytes:
    local, *hosts = addresses
    return json.dumps({"version": 1, "address": local, "hosts": hosts}).encode("ascii")


def _decode(entry: bytes, where: str) -> tuple[str, ...]:
    """Read an entry as untrusted bytes (I8)."""
    problem, fields = "too long", None
    if len(entry) <= _MAX_ENTRY:
        try:
            problem, fields = "it holds no address", json.loads(entry.decode("ascii"))
        except (UnicodeDecodeError, ValueError, RecursionError):
            problem = "not JSON"
    values = cast("dict[str, object]", fields) if isinstance(fields, dict) else {}
    # An entry without hosts is of a mailbox that only its own host can reach.
    local, hosts = values.get("address"), _checked_hosts(values.get("hosts", []))
    if hosts is None:
        problem = f"its hosts are no list of at most {MAX_HOSTS} tcp:// addresses"
    elif (
        isinstance(local, str)
        and local.startswith(("unix:///", "unix://@"))
        and len(local) <= MAX_ADDRESS
    ):
        return (local, *hosts)
    raise AttachError(
        "address entry is not one of tapchannel's",
        seen=where,
        reason=problem,
        next_step="remove the entry, or use another channel name",
    )


def _checked_hosts(hosts: object) -> list[str] | None:
    if not isinstance(hosts, list) or len(cast("list[object]", hosts)) > MAX_HOSTS:
        return None
    checked = [
        host
        for host in cast("list[object]", hosts)
        if isinstance(host, str) and len(host) <= MAX_ADDRESS and tcp_parts(host) is not None
    ]
    return checked if len(checked) == len(cast("list[object]", hosts)) else None
