"""Field reports of kinds K1, K2 and K12: whose memory it is, and whether a write gets there."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from field.channel import telling
from multiprocess import roles
from multiprocess.conftest import Crew
from support.channels import UCX
from support.handmade_peers import arena_fd, block_fd, impostor, offer_body, offering
from support.small_channel import LIMIT, attach, refused, small_channel
from tapchannel import Mailbox, Outbox, TapPlan, _native
from tapchannel.descriptor import Offer
from tapchannel.errors import PeerLostError, ProtocolError, TransportUnavailable
from tapchannel.transport.cuda_ipc import CudaIpc
from tapchannel.transport.shm import Shm
from tapchannel.wire import OFFER, Fields

SIZES = {"64 B": 64, "16 KiB": 16 << 10, "512 KiB": 512 << 10, "4 MiB": 4 << 20}


# ---- A1


@pytest.mark.parametrize("size", SIZES)
def test_field_a01_neighbours_in_memory_stay_apart(tmp_path: Path, size: str) -> None:
    """A1 (K1): a handle names a whole allocation, and the offset inside it got lost."""
    count = SIZES[size] // 4
    plan = TapPlan({"tap": ["tap"]}, width=count, dtype="int32", max_rows=1)
    dummies = [torch.full((1 << shift,), 7, dtype=torch.uint8) for shift in (10, 16)]
    place = f"file://{tmp_path}"
    boxes = [Mailbox(plan, {0: ["tap"]}, depth=2, store=place, name=name) for name in "AB"]
    outboxes = [Outbox(plan, 0, store=place, name=name) for name in "AB"]
    values = {}
    for microbatch in range(2):
        for number, (mailbox, outbox) in enumerate(zip(boxes, outboxes, strict=True)):
            if microbatch == 0:
                mailbox.open_pass(1, 2)
                outbox.open_pass(1, 2)
            byte = 0x11 * (1 + number + 2 * microbatch)
            values[number, microbatch] = torch.full((1, count), byte, dtype=torch.int32)
            outbox.push(microbatch, "tap", values[number, microbatch])
    for microbatch in range(2):
        for number, mailbox in enumerate(boxes):
            with mailbox.recv(microbatch) as taps:
                assert torch.equal(taps["tap"], values[number, microbatch])
    assert all(bool((dummy == 7).all()) for dummy in dummies)
    for side in (*outboxes, *boxes):
        side.close()


@pytest.mark.parametrize("missing", [1, 4096])
def test_field_a01_an_offer_beyond_the_mapped_size_is_refused(tmp_path: Path, missing: int) -> None:
    """A1 (K1): offset and length beyond what was mapped, and the attach succeeds."""
    size = int(offer_body()["arena_bytes"])  # type: ignore[call-overload]

    def handles() -> list[int]:
        return [block_fd(), arena_fd(size - missing)]

    with impostor(tmp_path, offering({}, handles)) as address:
        with refused(TransportUnavailable, rank=7):
            attach(tmp_path, 7, store=telling(address), transport="shm")


# ---- A13, A14


def test_field_a13_slots_are_no_memory_of_torchs_allocator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A13 (K1): memory of an allocator with expandable segments, which cannot be exported."""
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")
    with small_channel(tmp_path) as channel:
        with channel.open_pass(1):
            for rank, taps in ((3, ("embedding", "low")), (7, ("high",))):
                for tap in taps:
                    channel.outboxes[rank].push(0, tap, torch.ones(5, 8))
            with channel.mailbox.recv(0) as lease:
                assert "memfd:tapchannel" in mapping_of(lease["low"].data_ptr())
        channel.carry()


def mapping_of(address: int) -> str:
    """Give the line of /proc/self/maps that an address lies in."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        first, last = (int(end, 16) for end in line.split()[0].split("-"))
        if first <= address < last:
            return line
    return ""


def test_field_a14_a_device_travels_by_its_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """A14 (K1): the importing side took the peer's ordinal for its own."""
    fields = {name for name in Offer.__dataclass_fields__ if "device" in name or "ordinal" in name}
    assert fields == {"device_uuid"}
    # Two processes that number two GPUs the other way round: the same UUID is the same GPU.
    uuids = [bytes([ordinal]) * 16 for ordinal in range(2)]
    infos = [{"uuid": uuid, "stream_mem_ops_64": True} for uuid in uuids]
    asked: list[tuple[int, int]] = []

    def peer(here: int, there: int) -> bool:
        asked.append((here, there))
        return False

    monkeypatch.setattr(_native, "device_count", lambda: 2)
    monkeypatch.setattr(_native, "device_info", lambda ordinal: infos[ordinal])
    monkeypatch.setattr(_native, "can_access_peer", peer)
    from tapchannel.memory import Device
    from tapchannel.transport import cuda_ipc

    offer = Offer.parse(Fields(OFFER, {**offer_body(), "device_uuid": uuids[0].hex()}))
    assert cuda_ipc._unreachable(offer, Device(0)) is None  # it is our own GPU: no peer is asked
    assert asked == []
    refusal = cuda_ipc._unreachable(offer, Device(1))
    assert refusal is not None
    assert "cuda:0 here" in refusal
    assert asked == [(1, 0)]


# ---- A17, A18


def test_field_a17_a_consumer_that_restarts_is_another_one(crew: Crew, store: str) -> None:
    """A17 (K2): writes through a mapping of a dead life that succeed, and that nobody sees."""
    first = crew.victim()
    first.call(roles.serve, store, 2, roles.ONE)
    outbox = Outbox(roles.PLAN, 0, store=store, name=roles.NAME, attach_timeout=LIMIT)
    first.call(roles.open_for_receiving, 1, 2)
    outbox.open_pass(1, 2)
    for tap in roles.TAPS:
        outbox.push(0, tap, roles.payload(1, 0, tap))
    first.call(roles.receive, 0)
    first.child.kill()
    second = crew.worker()
    second.call(roles.serve, store, 2, roles.ONE)  # the same name and size
    second.call(roles.open_for_receiving, 1, 2)
    with pytest.raises(PeerLostError, match=f"pid {first.pid}"):
        for tap in roles.TAPS:
            outbox.push(1, tap, roles.payload(1, 1, tap))
            outbox.flush()
    outbox.close()
    with Outbox(roles.PLAN, 0, store=store, name=roles.NAME, attach_timeout=LIMIT) as again:
        with again.open_pass(1, 2):
            for microbatch in range(2):
                for tap in roles.TAPS:
                    again.push(microbatch, tap, roles.payload(1, microbatch, tap))
        for microbatch in range(2):
            second.call(roles.receive, microbatch)
        second.call(roles.end_receiving)


def test_field_a17_a_mailbox_made_again_in_its_process_is_another_one(tmp_path: Path) -> None:
    """A17 (K2): the same address, another life."""
    with small_channel(tmp_path) as old:
        old.open_next(1)
        outbox = old.outboxes[7]
        old.mailbox.close()
        with small_channel(tmp_path) as new:
            with refused(PeerLostError, rank=7):
                outbox.push(0, "high", torch.ones(5, 8))
            new.carry()


def test_field_a18_a_fresh_mailbox_loses_no_first_stamp(tmp_path: Path) -> None:
    """A18 (K4): words zeroed after they were handed out wiped the peer's first signal."""
    plan = TapPlan({"tap": ["tap"]}, width=4, dtype="float32", max_rows=2)
    for life in range(100):
        place: dict[str, Any] = {"store": f"file://{tmp_path}", "name": f"life {life}"}
        with Mailbox(plan, {0: ["tap"]}, depth=1, **place) as mailbox:
            with Outbox(plan, 0, **place) as outbox:
                mailbox.open_pass(1, 1)
                outbox.open_pass(1, 1)
                outbox.push(0, "tap", torch.full((2, 4), float(life)))
                with mailbox.recv(0, timeout=LIMIT) as taps:
                    assert bool((taps["tap"] == life).all())


def test_field_a18_memory_that_was_not_initialised_is_refused(tmp_path: Path) -> None:
    """A18 (K4): an attach to words that nobody has set yet."""

    def handles() -> list[int]:
        blank = os.memfd_create("blank", os.MFD_ALLOW_SEALING)
        os.ftruncate(blank, _native.block_bytes(2, 1))
        return [blank, arena_fd()]

    with impostor(tmp_path, offering({}, handles)) as address:
        with refused(ProtocolError, rank=7):
            attach(tmp_path, 7, store=telling(address), transport="shm")


# ---- A23


def test_field_a23_a_refused_mapping_falls_back_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A23 (K12), a: the query says yes, the handle does not open, and the start-up crashes."""

    def refuse(self: Shm, adoption: Any) -> Any:
        for fd in adoption.fds:
            os.close(fd)
        raise TransportUnavailable("cannot be mapped", refused={"shm": "the handle does not open"})

    monkeypatch.setattr(Shm, "adopt", refuse)
    assert_falls_back(tmp_path, caplog, "the handle does not open")


def test_field_a23_a_copy_that_lies_never_goes_live(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A23 (K12), b: copies report success, and bring wrong bytes."""
    honest = Shm.adopt

    def flip(self: Shm, adoption: Any) -> Any:
        adopted = honest(self, adoption)

        def probe(offset: int, octets: bytes) -> None:
            adopted.probe(offset, octets[:-1] + bytes([octets[-1] ^ 1]))

        changed = {name: getattr(adopted, name) for name in adopted.__dataclass_fields__}
        return type(adopted)(**{**changed, "probe": probe})

    monkeypatch.setattr(Shm, "adopt", flip)
    assert_falls_back(tmp_path, caplog, "did not arrive")


def assert_falls_back(folder: Path, caplog: pytest.LogCaptureFixture, reason: str) -> None:
    """See that ``auto`` takes another way, with one warning, and that the one named is refused."""
    listening = {"listen": UCX.listen, "secret": "a job's secret"}
    with small_channel(folder, ranks=(), **listening) as channel:
        secret = {"secret": "a job's secret"}
        with refused(TransportUnavailable, rank=7) as told:
            attach(folder, 7, transport="shm", **secret)
        assert reason in str(told[0])
        caplog.clear()
        caplog.set_level(logging.WARNING, "tapchannel.attach")
        for rank in (3, 7):
            channel.outboxes[rank] = attach(folder, rank, **secret)
            [warning] = [one.getMessage() for one in caplog.records if one.name.endswith("attach")]
            caplog.clear()
            assert f"rank {rank}" in warning
            assert reason in warning
            assert channel.outboxes[rank].info()["transport"] != "shm"
            assert reason in str(channel.outboxes[rank].info()["refused"])
        channel.carry()


def test_field_a23_a_gpu_without_the_means_is_refused_by_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A23 (K12), c: a slice of a GPU that has no peer copies."""
    from tapchannel.memory import Device

    monkeypatch.setattr(_native, "cuda_status", lambda: {"available": True, "refusal": ""})
    monkeypatch.setattr(_native, "device_count", lambda: 1)
    monkeypatch.setattr(_native, "device_info", lambda ordinal: {"stream_mem_ops_64": False})
    assert "stream memory operations" in str(CudaIpc().refusal(Device(0)))
