"""What ``tapchannel doctor`` knows of the network: the UCX, RDMA devices, the way into a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Final

from .errors import TransportUnavailable
from .machine import Machine
from .rdma import GpuDirect, RdmaDevice, gpu_direct, memlock_limit, rdma_devices
from .transport.ucx_context import foresee, why_by_host
from .ucx_library import UcxChoice

# Four slots of 8192 tokens by four taps of 4096 bf16 values: a usual mailbox.
USUAL_MAILBOX: Final = 1 << 30
_ORDERS: Final = {0: "none", 100: "owner", 200: "all devices"}
_RDMA_LANES: Final = ("rc_", "dc_", "ud_", "gga_")
_SHARING_LANES: Final = ("cuda_ipc/", "posix/", "sysv/", "cma/", "knem/", "xpmem/")
_WITH_VERBS: Final = "the extra rdma-cu12 or rdma-cu13 brings a UCX with verbs"
_WITH_CUDA: Final = "the extra ucx-cu12 or ucx-cu13 brings a UCX with CUDA"


@dataclass(frozen=True, slots=True)
class GpuRule:
    """The order that a GPU keeps of an RDMA device's writes, and the rule that follows from it."""

    order: str
    direct: bool
    rule: str


@dataclass(frozen=True, slots=True)
class Network:
    """What is here for transport ``ucx``; ``refusal`` says why no UCX does where none is chosen.

    ``rules`` are the GPUs', in their order.
    """

    choice: UcxChoice | None
    refusal: str
    devices: list[RdmaDevice]
    memlock: int | None
    gpu_direct: GpuDirect
    rules: list[GpuRule] = field(default_factory=list[GpuRule])

    def usable_devices(self) -> list[RdmaDevice]:
        """Give the RDMA devices that this process can use."""
        return [device for device in self.devices if not device.refusal]

    def advice(self) -> list[str]:
        """Say what to install or to set, and for what."""
        return [*self._to_install(), *self._to_set()]

    def _to_install(self) -> Iterator[str]:
        if self.choice is None:
            return  # the refusal says it
        chosen = self.choice.chosen
        if not chosen.has_verbs:
            wheel = " (no libucx wheel of PyPI has any)" if chosen.origin == "libucx wheel" else ""
            yield f"this UCX has no verbs{wheel}, so no RDMA: {_WITH_VERBS}"
        if self.rules and not chosen.has_cuda:
            yield f"this UCX has no CUDA, so GPUs are reached through host memory: {_WITH_CUDA}"
        if self.choice.remark:
            yield f"it was named by hand, in spite of this: {self.choice.remark}"

    def _to_set(self) -> Iterator[str]:
        if not self.devices or self.memlock is None or self.memlock >= USUAL_MAILBOX:
            return
        yield (
            f"the memlock limit of {size(self.memlock)} is too small: over RDMA a mailbox pins all "
            f"its slots, {size(USUAL_MAILBOX)} being usual. Raise it (ulimit -l unlimited, "
            "LimitMEMLOCK=infinity, docker run --ulimit memlock=-1), unless this process has "
            "CAP_IPC_LOCK"
        )

    def as_json(self) -> dict[str, Any]:
        """Return the facts as plain data."""
        return {
            "ucx": None if self.choice is None else _ucx_facts(self.choice),
            "refusal": self.refusal,
            "rdma_devices": [asdict(device) for device in self.devices],
            "memlock_bytes": self.memlock,
            "gpu_direct": {
                **asdict(self.gpu_direct),
                "gpus": [
                    {"ordinal": ordinal, **asdict(rule)} for ordinal, rule in enumerate(self.rules)
                ],
            },
            "advice": self.advice(),
        }


def examine_network(machine: Machine) -> Network:
    """Look at what is here for the network. Loads no UCX and makes no CUDA context.

    Blocks:     until short-lived processes have looked at the UCX libraries.
    """
    choice, refusal = None, ""
    try:
        choice = foresee()
    except TransportUnavailable as error:
        refusal = str(error)
    rules = [_rule(choice, gpu) for gpu in machine.gpus]
    return Network(choice, refusal, rdma_devices(), memlock_limit(), gpu_direct(), rules)


def went_by_rdma(lanes: Sequence[str]) -> list[str]:
    """Give the RDMA devices that carried the payload over these lanes of UCX, as far as is certain.

    Within a host UCX has lanes through shared memory beside, which it prefers.
    """
    if any(lane.startswith(_SHARING_LANES) for lane in lanes):
        return []
    rdma = [lane for lane in lanes if lane.startswith(_RDMA_LANES)]
    return list(dict.fromkeys(lane.partition("/")[2] for lane in rdma))


def size(count: int | None) -> str:
    """Write a number of bytes, None for any."""
    if count is None:
        return "unlimited"
    unit, word = next(
        ((unit, word) for unit, word in ((1 << 30, "GiB"), (1 << 20, "MiB")) if count >= unit),
        (1 << 10, "KiB"),
    )
    return f"{count / unit:.4g} {word}"


def network_lines(network: Network) -> Iterator[str]:
    """Give what is known, as lines of text."""
    if network.choice is None:
        yield f"UCX: {network.refusal}"
    else:
        yield from _ucx_lines(network.choice)
    if not network.devices:
        yield "RDMA devices: none"
    for device in network.devices:
        driver = f", driver {device.driver}" if device.driver else ""
        state = f"{device.state or 'no state'}, {device.link_layer}{driver}"
        verdict = f"not usable: {device.refusal}" if device.refusal else "usable"
        yield f"RDMA device {device.name} port {device.port}: {state}: {verdict}"
    yield f"memory that may be pinned (ulimit -l): {size(network.memlock)}"
    direct = network.gpu_direct
    peermem = "loaded" if direct.nvidia_peermem else "not loaded"
    dmabuf = "can hand out" if direct.kernel_has_dmabuf else "is too old for"
    yield f"GPUDirect: nvidia_peermem is {peermem}; kernel {direct.kernel} {dmabuf} dma-bufs"
    for ordinal, rule in enumerate(network.rules):
        yield f"GPU {ordinal}: keeps the order of RDMA writes for: {rule.order}; {rule.rule}"
    for text in network.advice():
        yield f"note: {text}"


def _ucx_lines(choice: UcxChoice) -> Iterator[str]:
    chosen = choice.chosen
    found = ", ".join(chosen.verbs_devices) or "no device"
    verbs = f"yes ({found})" if chosen.has_verbs else "no"
    cuda = "yes" if chosen.has_cuda else "no"
    yield f"UCX: {chosen.version}, {chosen.name}; verbs: {verbs}; CUDA: {cuda}"
    yield f"its components: {', '.join(sorted(chosen.transports))}"
    for name, reason in choice.passed_over.items():
        yield f"passed over: {name}: {reason}"


def _ucx_facts(choice: UcxChoice) -> dict[str, Any]:
    chosen = choice.chosen
    return {
        "version": chosen.version,
        "origin": chosen.origin,
        "path": None if chosen.path is None else str(chosen.path),
        "components": sorted(chosen.transports),
        "verbs": chosen.has_verbs,
        "verbs_devices": list(chosen.verbs_devices),
        "cuda": chosen.has_cuda,
        "absent": dict(chosen.absent),
        "passed_over": dict(choice.passed_over),
        "remark": choice.remark,
    }


def _rule(choice: UcxChoice | None, gpu: Mapping[str, Any]) -> GpuRule:
    ordering = gpu["gpu_direct_rdma_writes_ordering"]
    order = _ORDERS.get(ordering, str(ordering))
    if choice is None:
        return GpuRule(order, False, "no UCX does, so no rule is in force")
    why = why_by_host(choice.chosen, f"cuda:{gpu['ordinal']}", ordering)
    if why:
        rule = f"by the host, since {why}: the gate copies into the slot, then stamps"
        return GpuRule(order, False, rule)
    return GpuRule(order, True, "direct: streams wait on the stamp itself")
