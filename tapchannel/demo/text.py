"""The training text: the help topics that every CPython carries, and microbatches cut from them."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module

import torch

from ..errors import ConfigError

SOURCE = "pydoc_data.topics"


def load() -> torch.Tensor:
    """Return Python's own help topics as one row of bytes.

    Raises:
        ConfigError: this Python was built without them.
    """
    try:
        topics: dict[str, str] = import_module(SOURCE).topics
    except ImportError as error:
        raise ConfigError(
            "the demo has no text to train on",
            cause=f"this Python comes without its help topics ({SOURCE})",
            next_step="run the demo with a CPython from python.org, a distribution or pyenv",
        ) from error
    text = "\n".join(topics[name] for name in sorted(topics)).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)


@dataclass(frozen=True)
class Batch:
    """The tokens of one pass and, at each place, the token that follows."""

    inputs: torch.Tensor
    targets: torch.Tensor

    def microbatch(self, index: int, sequences: int) -> Batch:
        """Return one microbatch: ``sequences`` rows of the batch."""
        share = slice(index * sequences, (index + 1) * sequences)
        return Batch(self.inputs[share], self.targets[share])


def draw(text: torch.Tensor, step: int, sequences: int, tokens: int) -> Batch:
    """Cut the sequences of pass ``step``; every process that calls this gets the same ones."""
    chance = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - tokens, (sequences, 1), generator=chance)
    windows = text[starts + torch.arange(tokens + 1)].long()
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
