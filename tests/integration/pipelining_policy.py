"""A small policy in stages for torch's pipeline schedules, and the same policy in one piece.

Both are made and trained by the same rules, so that what a stage computes in any schedule can be
held against what the whole computes for that microbatch, bit by bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.checkpoint import checkpoint

WIDTH, ROWS, SEQUENCES = 16, 3, 2  # a microbatch is [SEQUENCES, ROWS, WIDTH]
MAX_ROWS = ROWS * SEQUENCES
LAYERS_A_STAGE = 2
RATE = 0.1


class Layer(nn.Module):
    """A residual block; its weights follow from its number alone."""

    def __init__(self, number: int) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(number)
            self.inner = nn.Linear(WIDTH, 2 * WIDTH)
            self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Add the block's share to the hidden states."""
        return hidden + self.outer(torch.nn.functional.gelu(self.inner(hidden)))


class Part(nn.Module):
    """The policy's layers on one stage, named as in the whole policy."""

    def __init__(self, numbers: Sequence[int], replayed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({str(number): Layer(number) for number in numbers})
        self.replayed = replayed

    def _run(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layers.values():
            hidden = layer(hidden)
        return hidden

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run the layers, in a checkpoint that replays them all in backward if asked to."""
        if self.replayed:
            return checkpoint(self._run, hidden, use_reentrant=False)
        return self._run(hidden)


def part(stage: int, replayed: bool = False) -> Part:
    """Make the policy's part of a stage."""
    first = stage * LAYERS_A_STAGE
    return Part(range(first, first + LAYERS_A_STAGE), replayed)


def data(step: int, microbatches: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Give the inputs and targets of a step, the same in every process."""
    generator = torch.Generator().manual_seed(step)
    size = (microbatches * SEQUENCES, ROWS, WIDTH)
    return torch.randn(size, generator=generator), torch.randn(size, generator=generator)


def train(module: nn.Module) -> dict[str, torch.Tensor]:
    """Take one step down the gradients; give them, and forget them. A draft is not meant."""
    gradients: dict[str, torch.Tensor] = {}
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if name.startswith("draft"):
                continue
            gradients[name.replace("_orig_mod.", "")] = weight.grad.clone()
            weight -= RATE * weight.grad
            weight.grad = None
    return gradients


class Whole:
    """The policy in one piece."""

    def __init__(self, stages: int, microbatches: int) -> None:
        self._module = Part(range(stages * LAYERS_A_STAGE))
        self._microbatches = microbatches

    def hidden(self, step: int) -> list[dict[str, torch.Tensor]]:
        """Give every layer's output for each microbatch of a step."""
        inputs, _ = data(step, self._microbatches)
        return [dict(self._outputs(chunk)) for chunk in inputs.chunk(self._microbatches)]

    def _outputs(self, hidden: torch.Tensor) -> Iterator[tuple[str, torch.Tensor]]:
        with torch.no_grad():
            for name, layer in self._module.layers.items():
                hidden = layer(hidden)
                yield f"layers.{name}", hidden.reshape(-1, WIDTH)

    def train(self, step: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        """Train on a step, microbatch by microbatch; give the losses and the gradients."""
        inputs, targets = data(step, self._microbatches)
        losses: list[torch.Tensor] = []
        pieces = zip(
            inputs.chunk(self._microbatches), targets.chunk(self._microbatches), strict=True
        )
        for given, wanted in pieces:
            loss = mse_loss(self._module(given), wanted)
            loss.backward()
            losses.append(loss.detach())
        for weight in self._module.parameters():
            weight.grad /= self._microbatches
        return losses, train(self._module)
