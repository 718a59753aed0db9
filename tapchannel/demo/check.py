"""The check: every tap against an unpipelined forward of the same weights, bit for bit."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from .policy import Stage, taps_of

_SAME_SIZE_INTEGER = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True)
class Difference:
    """One tap that is not what the unpipelined forward gives."""

    step: int
    microbatch: int
    tap: str
    problem: str

    def __str__(self) -> str:
        return f"pass {self.step}, microbatch {self.microbatch}, tap {self.tap!r}: {self.problem}"


def problem_of(seen: torch.Tensor, expected: torch.Tensor) -> str | None:
    """Say how ``seen`` differs from ``expected``, or return ``None`` when no bit differs.

    Compares bits, not values: a NaN equals itself and 0.0 is not -0.0. ``seen`` is read in place.
    """
    if seen.shape != expected.shape or seen.dtype != expected.dtype:
        return (
            f"{seen.dtype} {list(seen.shape)} arrived where {expected.dtype} "
            f"{list(expected.shape)} was due"
        )
    integer = _SAME_SIZE_INTEGER[seen.element_size()]
    differing = seen.view(integer) != expected.view(integer)
    if not bool(differing.any()):
        return None
    places = differing.nonzero()
    row, column = (int(place) for place in places[0])
    return (
        f"{len(places)} of {seen.numel()} values differ, first at row {row}, column {column}: "
        f"{seen[row, column].item()!r} arrived where {expected[row, column].item()!r} was due"
    )


class UnpipelinedPolicy:
    """The whole policy in one process; its taps are what the channel should have carried."""

    def __init__(self, stages: int, device: torch.device) -> None:
        self._stages = [Stage(index, stages, device, device) for index in range(stages)]
        self._taps: dict[str, torch.Tensor] = {}
        for index, stage in enumerate(self._stages):
            for name, module in zip(taps_of(index), stage.tapped(), strict=True):
                module.register_forward_hook(self._keep(name))

    def _keep(self, name: str):
        def hook(_module: nn.Module, _inputs: object, output: torch.Tensor) -> None:
            self._taps[name] = output.flatten(0, 1)

        return hook

    def weight_count(self, stage: int) -> int:
        """Return how many numbers `load` takes for ``stage``."""
        return sum(weight.numel() for weight in self._stages[stage].parameters())

    def load(self, stage: int, weights: torch.Tensor) -> None:
        """Take over the weights of one stage, as `flat_weights` gives them."""
        parameters = list(self._stages[stage].parameters())
        parts = torch.split(weights, [parameter.numel() for parameter in parameters])
        with torch.no_grad():
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))

    @torch.no_grad()
    def taps(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return every tap of one microbatch."""
        self._taps = {}
        hidden = tokens
        for stage in self._stages:
            hidden = stage(hidden)
        return self._taps


def flat_weights(module: nn.Module) -> torch.Tensor:
    """Return a copy of a module's weights as one row on the CPU."""
    return torch.cat([weight.detach().flatten() for weight in module.parameters()]).cpu()
