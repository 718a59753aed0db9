"""Rendezvous: every kind of store gives back what was published, and an entry is never believed."""

from __future__ import annotations

import contextlib
import json
import os
import urllib.parse
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.endpoints import tcp_parts
from tapchannel.errors import AttachError, ConfigError
from tapchannel.layout import MAX_NAME
from tapchannel.stores import (
    MAX_ADDRESS,
    MAX_HOSTS,
    DirectAddress,
    own_address,
    own_listen,
    rendezvous,
)

ADDRESS = "unix:///tmp/tapchannel-1/mailbox.sock"
QUICK = timedelta(seconds=5)


def hash_store(folder: Path) -> object:
    """Make a store inside this process."""
    return dist.HashStore()


def torch_file_store(folder: Path) -> object:
    """Make torch's own store over a file."""
    return dist.FileStore(str(folder / "torch"), 1)


def file_url(folder: Path) -> object:
    """Name a folder that does not exist yet."""
    return f"file://{folder}/not/yet/there"


def spaced_file_url(folder: Path) -> object:
    """Name a folder whose name a URL has to quote."""
    return f"file://{urllib.parse.quote(str(folder))}/two%20words"


MAKERS = [hash_store, torch_file_store, file_url, spaced_file_url]


@pytest.fixture
def master() -> dist.TCPStore:
    """A TCPStore such as torchrun's."""
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=QUICK)


@pytest.mark.parametrize("make", MAKERS)
def test_address_is_found_once_published(make: Callable[[Path], object], tmp_path: Path) -> None:
    """A lookup that waits, or a store that gives back something else."""
    store = make(tmp_path)
    consumer, producer = rendezvous(store, "draft"), rendezvous(store, "draft")
    assert producer.lookup() is None
    consumer.publish([ADDRESS])
    assert producer.lookup() == (ADDRESS,)
    consumer.publish([ADDRESS + "2"])
    assert producer.lookup() == (ADDRESS + "2",)


@pytest.mark.parametrize("make", MAKERS)
def test_channels_of_one_store_stay_apart(make: Callable[[Path], object], tmp_path: Path) -> None:
    """Two channels that overwrite each other's address; names that a path or a key would bend."""
    store = make(tmp_path)
    names = ["draft", "draft2", "a/b", "..", ".", "a b", "ä", "%61", "a", "x" * MAX_NAME]
    for name in names:
        rendezvous(store, name).publish([f"{ADDRESS}-{urllib.parse.quote(name)}"])
    for name in names:
        assert rendezvous(store, name).lookup() == (f"{ADDRESS}-{urllib.parse.quote(name)}",)


def test_address_crosses_a_tcp_store(master: dist.TCPStore) -> None:
    """A URL whose host or port is misread; a lookup that holds the store's connection."""
    consumer = rendezvous(master, "draft")
    producer = rendezvous(f"tcp://127.0.0.1:{master.port}", "draft")
    assert producer.lookup() is None
    consumer.publish([ADDRESS])
    assert producer.lookup() == (ADDRESS,)
    assert str(master.port) in producer.describe()


def test_longest_name_of_any_letters_fits_every_store(tmp_path: Path) -> None:
    """A name that the channel accepts and the file system does not: quoted, it grows sixfold."""
    for name in ("ü" * MAX_NAME, "渡" * MAX_NAME):
        place = rendezvous(f"file://{tmp_path}", name)
        assert place.lookup() is None
        place.publish([ADDRESS])
        assert place.lookup() == (ADDRESS,)


def test_direct_address_is_its_own_rendezvous() -> None:
    """A path that is changed on the way to the socket."""
    place = rendezvous("unix:///run/my channel.sock", "draft")
    place.publish(["unix:///elsewhere"])
    assert place.lookup() == ("unix:///run/my channel.sock",)


@pytest.mark.parametrize(
    "address", ["tcp://draft-host:47000", "tcp://10.0.0.1:1", "tcp://[fd00::1]:47000", "unix:///s"]
)
def test_direct_address_needs_no_store(address: str) -> None:
    """A tcp:// address that is taken for a TCPStore's, or changed by what a mailbox publishes."""
    place = rendezvous(DirectAddress(address), "draft")
    place.publish(["tcp://elsewhere:1"])
    assert place.lookup() == (address,)
    assert address in place.describe()


@pytest.mark.parametrize(
    "address", ["", "draft-host:47000", "tcp://", "tcp://host:0", "unix://path", "file:///folder"]
)
def test_direct_address_that_is_none(address: str) -> None:
    """An address that nobody can listen at or dial, found out when the channel is to carry."""
    with pytest.raises(ConfigError):
        DirectAddress(address)


@pytest.mark.parametrize("address", ["tcp://*:47000", "tcp://host", "tcp://host:47000-47100"])
def test_direct_address_of_many_sockets_can_be_listened_at_only(address: str) -> None:
    """An outbox that dials a wildcard or a range."""
    with pytest.raises(ConfigError, match="one port"):
        rendezvous(DirectAddress(address), "draft").lookup()
    assert own_listen(DirectAddress(address), None) == address


def test_mailbox_listens_at_its_direct_address_unless_told_otherwise() -> None:
    """A listen= that is overruled, or a mailbox without one that nobody can reach."""
    direct = DirectAddress("tcp://draft-host:47000")
    assert own_listen(direct, None) == "tcp://draft-host:47000"
    assert own_listen(direct, "tcp://*") == "tcp://*"
    assert own_listen(DirectAddress("unix:///run/a.sock"), None) is None
    assert own_listen("tcp://host:80", None) is None
    assert own_address(DirectAddress("unix:///run/a.sock")) == "unix:///run/a.sock"
    assert own_address(direct).startswith("unix://@")


def test_mailbox_listens_where_the_caller_says_or_at_an_address_of_its_own(tmp_path: Path) -> None:
    """Two mailboxes at one address, or a caller's path that is not used."""
    assert own_address("unix:///run/a.sock") == "unix:///run/a.sock"
    others = [f"file://{tmp_path}", "tcp://host:80", dist.HashStore()]
    fresh = {own_address(store) for store in (*others, *others)}
    assert len(fresh) == 6
    place = rendezvous(f"file://{tmp_path}", "draft")
    for address in fresh:
        place.publish([address])
        assert place.lookup() == (address,)


@pytest.mark.parametrize("make", MAKERS)
def test_addresses_of_the_network_come_after_the_hosts_own(
    make: Callable[[Path], object], tmp_path: Path
) -> None:
    """An order that is lost: outboxes of one host that go over the network, or none at all."""
    hosts = [f"tcp://10.0.0.{number}:47110" for number in range(MAX_HOSTS - 1)]
    published = (ADDRESS, "tcp://[fd00::2]:65535", *hosts)
    place = rendezvous(make(tmp_path), "draft")
    place.publish(published)
    assert place.lookup() == published
    place.publish(published[:1])
    assert place.lookup() == published[:1]


def test_longest_entry_is_read(tmp_path: Path) -> None:
    """A mailbox on a machine with many networks whose entry is too long for its readers."""
    place = rendezvous(f"file://{tmp_path}", "draft")
    longest = "tcp://[" + ":".join(["ffff"] * 8) + "]:65535"
    published = ("unix:///" + "x" * (MAX_ADDRESS - 8), *[longest] * MAX_HOSTS)
    place.publish(published)
    assert place.lookup() == published


def test_entry_without_hosts_is_this_hosts_own(tmp_path: Path) -> None:
    """An entry that an older mailbox wrote, and that is refused for a field it does not know."""
    place = rendezvous(f"file://{tmp_path}", "draft")
    entry = {"version": 1, "address": ADDRESS}
    (tmp_path / "draft.tapchannel").write_text(json.dumps(entry))
    assert place.lookup() == (ADDRESS,)


def test_publishing_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A temporary file that stays behind and that a later lookup could take for an entry."""
    place = rendezvous(f"file://{tmp_path}", "draft")
    for _ in range(3):
        place.publish([ADDRESS])
    assert [path.name for path in tmp_path.iterdir()] == ["draft.tapchannel"]


@pytest.mark.parametrize(
    "entry",
    [
        b"",
        b"\x80\x04\x95",
        b"unix:///tmp/x",
        b"null",
        b"[]",
        b"{}",
        b'{"address": null}',
        b'{"address": 7}',
        b'{"address": "tcp://elsewhere:1"}',
        b'{"address": "unix://relative"}',
        b'{"address": "@abstract"}',
        '{"address": "unix:///tmp/ü"}'.encode(),
        json.dumps({"address": "unix:///" + "x" * MAX_ADDRESS}).encode(),
        b'{"address": "unix:///tmp/x"}' + b" " * 5000,
        b"[" * 4000,
        *(
            json.dumps({"address": ADDRESS, "hosts": hosts}).encode()
            for hosts in (
                None,
                "tcp://10.0.0.1:1",
                {"tcp://10.0.0.1:1": 1},
                [None],
                [["tcp://10.0.0.1:1"]],
                [ADDRESS],
                ["tcp://*:1"],
                ["tcp://10.0.0.1"],
                ["tcp://10.0.0.1:1-2"],
                ["tcp://10.0.0.1:1", "tcp://10.0.0.1:70000"],
                ["tcp://user@host:1"],
                ["tcp://host:1\n"],
                ["tcp://" + "x" * MAX_ADDRESS + ":1"],
                ["tcp://10.0.0.1:1"] * (MAX_HOSTS + 1),
            )
        ),
        b'{"hosts": ["tcp://10.0.0.1:1"]}',
    ],
)
@pytest.mark.parametrize("make", [hash_store, file_url])
def test_entry_of_another_hand_is_refused(
    make: Callable[[Path], object], entry: bytes, tmp_path: Path
) -> None:
    """An entry that is believed, or that breaks its reader with an error nobody expects (I8)."""
    store = make(tmp_path)
    place = rendezvous(store, "draft")
    place.publish([ADDRESS])
    if isinstance(store, str):
        (tmp_path / "not/yet/there/draft.tapchannel").write_bytes(entry)
    else:
        store.set("tapchannel/draft", entry)  # type: ignore[attr-defined]
    with pytest.raises(AttachError) as raised:
        place.lookup()
    assert raised.value.seen == place.describe()
    assert raised.value.reason
    assert raised.value.next_step


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=40),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(max_size=8), inner),
    max_leaves=20,
)
HOSTS = st.lists(st.sampled_from(["tcp://a:1", "tcp://[::1]:2", "tcp://*:3", ADDRESS]) | JSON)
ENTRIES = st.binary(max_size=200) | st.builds(
    lambda fields: json.dumps(fields).encode(),
    JSON
    | st.fixed_dictionaries({"address": st.just(ADDRESS) | JSON}, optional={"hosts": HOSTS | JSON}),
)


@given(ENTRIES)
def test_any_entry_is_addresses_or_refused(entry: bytes) -> None:
    """Bytes in a store that come out as something else than checked addresses (I8)."""
    store = dist.HashStore()
    store.set("tapchannel/draft", entry)  # type: ignore[arg-type]
    found: tuple[str, ...] = (ADDRESS,)
    with contextlib.suppress(AttachError):
        found = rendezvous(store, "draft").lookup() or ()
    assert found[0].startswith(("unix:///", "unix://@"))
    assert len(found) <= 1 + MAX_HOSTS
    assert all(tcp_parts(host) for host in found[1:])


@pytest.mark.parametrize(
    "store",
    [
        None,
        7,
        b"file:///tmp",
        {},
        "",
        "draft",
        "file:relative",
        "file://host/folder",
        "file://",
        "unix://",
        "unix:relative",
        "unix://host/path",
        "tcp://",
        "tcp://host",
        "tcp://host:0",
        "tcp://host:port",
        "tcp://host:99999",
        "tcp://[::1:80",
        "http://host:80",
    ],
    ids=repr,
)
def test_impossible_store_is_refused(store: object) -> None:
    """A slip in the store's URL that shows up minutes later as a time-out, or as another error."""
    with pytest.raises(ConfigError) as raised:
        rendezvous(store, "draft")
    assert raised.value.seen is not None
    assert "file:///folder" in str(raised.value.expected)


@pytest.mark.parametrize(
    "name", ["", "x" * (MAX_NAME + 1), "a\nb", "a\0b", "\ud800", 7, None, b"a"]
)
def test_impossible_name_is_refused(name: object, tmp_path: Path) -> None:
    """A channel name that no store, file or error text can hold."""
    with pytest.raises(ConfigError, match="channel name"):
        rendezvous(f"file://{tmp_path}", name)  # type: ignore[arg-type]


@pytest.mark.parametrize("folder", ["/proc/tapchannel", "/dev/null"])
def test_folder_that_cannot_be_is_a_typed_error(folder: str) -> None:
    """An OSError of the file system that reaches the user without channel or next step."""
    place = rendezvous(f"file://{folder}", "draft")
    with pytest.raises((AttachError, ConfigError)) as raised:
        place.publish([ADDRESS])
    assert folder in str(raised.value)
    assert raised.value.next_step


def test_entry_that_cannot_be_read_is_a_typed_error(tmp_path: Path) -> None:
    """An OSError of the file system that reaches the user without channel or next step."""
    (tmp_path / "draft.tapchannel").mkdir()
    with pytest.raises((AttachError, ConfigError)) as raised:
        rendezvous(f"file://{tmp_path}", "draft").lookup()
    assert str(tmp_path) in str(raised.value)


def test_store_that_died_is_a_typed_error() -> None:
    """torch's own RuntimeError, with its C++ stack, in place of what the user has to do."""
    master = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=QUICK)
    place = rendezvous(f"tcp://127.0.0.1:{master.port}", "draft")
    del master
    with pytest.raises(AttachError) as raised:
        place.lookup()
    assert "tcp://" in str(raised.value)


def test_looking_up_keeps_no_descriptor(tmp_path: Path) -> None:
    """A lookup in a loop that eats the process's descriptors."""
    place = rendezvous(f"file://{tmp_path}", "draft")
    place.publish([ADDRESS])
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        place.lookup()
    assert len(os.listdir("/proc/self/fd")) == before
