"""What ``tapchannel doctor`` has found out, and what nobody has tried yet."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from .doctor_network import Network, went_by_rdma
from .machine import Machine
from .selftest import Exchange

OK, FAILED, NOT_HERE = "ok", "failed", "not here"


@dataclass(frozen=True, slots=True)
class Check:
    """One exchange that was run, or the reason why it was not."""

    kind: Literal["self-test", "litmus"]
    exchange: Exchange
    verdict: str
    wrong_words: int = 0
    seconds: float = 0.0
    detail: str = ""
    lanes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """All that doctor found out."""

    machine: Machine
    network: Network
    checks: list[Check] = field(default_factory=list[Check])

    @property
    def ok(self) -> bool:
        """Whether nothing failed that should work here."""
        return all(check.verdict != FAILED for check in self.checks)

    def transports(self) -> dict[str, str]:
        """Map each transport to the reason why it cannot be used here, empty where it can."""
        return {
            "shm": self._refusal("shm"),
            "cuda_ipc": self.machine.cuda_refusal or self._refusal("cuda_ipc"),
            "host_staged": self._refusal("host_staged"),
            "ucx": self.network.refusal or self._refusal("ucx"),
        }

    def _refusal(self, transport: str) -> str:
        mine = [check for check in self.checks if check.exchange.transport == transport]
        if any(check.kind == "self-test" and check.verdict == OK for check in mine):
            return ""
        return next((check.detail for check in mine if check.detail), "it was not tested")

    def unverified(self) -> list[str]:
        """List what these checks say nothing about."""
        return [*self._gaps_of_network(), *self._gaps_of_gpus()]

    def _gaps_of_network(self) -> Iterator[str]:
        yield (
            "more than one host: run `tapchannel doctor litmus --listen` on one, and on the other "
            "the command that it prints"
        )
        done = [check for check in self.checks if check.verdict == OK and check.kind == "litmus"]
        rdma = [check for check in done if went_by_rdma(check.lanes)]
        direct = {f"cuda:{at}" for at, rule in enumerate(self.network.rules) if rule.direct}
        if not any(check.exchange.consumer_device in direct for check in rdma):
            yield "an RDMA device's writes into GPU memory: no litmus went that way"
        if not any(len(went_by_rdma(check.lanes)) > 1 for check in rdma):
            yield "that no stamp overtakes its payload where UCX spreads a lane over several rails"
        yield "fabric handles: no transport uses them"

    def _gaps_of_gpus(self) -> Iterator[str]:
        done = [
            (check.kind, check.exchange.producer_device, check.exchange.consumer_device)
            for check in self.checks
            if check.verdict == OK and check.exchange.transport == "cuda_ipc"
        ]
        litmus_pairs = [(here, there) for kind, here, there in done if kind == "litmus"]
        if not done:
            yield "everything about GPUs: no cuda_ipc exchange was completed"
        elif not any(here != there for here, there in litmus_pairs):
            yield (
                "that no stamp overtakes its payload between two GPUs, where the payload goes "
                "over NVLink and the stamp over PCIe"
            )
        elif len(self.machine.gpus) > 2:
            yield "GPU pairs other than those in the table"

    def as_json(self) -> dict[str, Any]:
        """Return the report as plain data."""
        return {
            "ok": self.ok,
            **asdict(self.machine),
            "network": self.network.as_json(),
            "checks": [asdict(check) for check in self.checks],
            "transports": {
                name: {"usable": not reason, "reason": reason}
                for name, reason in self.transports().items()
            },
            "unverified": self.unverified(),
        }
