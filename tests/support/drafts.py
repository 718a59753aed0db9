"""A small draft model that reads taps in place, and ways in which autograd may hold on to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, INNER, LABELS = 24, 32, 11
TAPS = ("low", "middle", "high")

Taps = Mapping[str, torch.Tensor]
Forward = Callable[["Draft", Taps], torch.Tensor]


class Draft(nn.Module):
    """Fuses three taps, adds the embedding's, and predicts a label for every row."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(7)
        self.fuse = nn.Linear(len(TAPS) * WIDTH, INNER)
        self.embed = nn.Linear(WIDTH, INNER, bias=False)
        self.scale = nn.Parameter(torch.empty(WIDTH))
        self.head = nn.Linear(INNER, LABELS)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)

    def forward(self, features: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Return the logits."""
        mixed = self.fuse(features) + self.embed(embedding * self.scale)
        return self.head(torch.tanh(mixed))


class KeepsView(torch.autograd.Function):
    """A product whose backward reads the view itself, kept as a plain attribute of its ctx."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Return ``rows @ weight.T``."""
        ctx.rows = rows
        ctx.save_for_backward(weight)
        return rows @ weight.t()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        """Return the weight's gradient."""
        return None, gradient.t() @ ctx.rows


def plain(draft: Draft, taps: Taps) -> torch.Tensor:
    """Run the draft as it is: its first layers save their inputs."""
    return draft(taps["features"], taps["embedding"])


def column_slices(draft: Draft, taps: Taps) -> torch.Tensor:
    """Read each tap by its own view, detached."""
    joined = torch.cat([taps[name].detach() for name in TAPS], 1)
    return draft(joined, taps["embedding"].detach()[:, :])


def non_reentrant(draft: Draft, taps: Taps) -> torch.Tensor:
    """Recompute the whole draft in backward, from the views."""
    return checkpoint(draft, taps["features"], taps["embedding"], use_reentrant=False)


def reentrant(draft: Draft, taps: Taps) -> torch.Tensor:
    """Recompute the whole draft in backward, by the older way of checkpointing."""
    key = torch.zeros((), device=taps["features"].device, requires_grad=True)

    def keyed(features: torch.Tensor, embedding: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        return draft(features, embedding) + key  # without it nothing here would need a gradient

    return checkpoint(keyed, taps["features"], taps["embedding"], key, use_reentrant=True)


def kept_on_ctx(draft: Draft, taps: Taps) -> torch.Tensor:
    """Run the first layer by a custom function that keeps the view on its ctx."""
    mixed = KeepsView.apply(taps["features"], draft.fuse.weight)
    mixed = mixed + draft.fuse.bias + draft.embed(taps["embedding"] * draft.scale)
    return draft.head(torch.tanh(mixed))


FORWARDS: dict[str, Forward] = {
    forward.__name__: forward
    for forward in (plain, column_slices, non_reentrant, reentrant, kept_on_ctx)
}


def gradients(draft: Draft) -> dict[str, torch.Tensor]:
    """Return what has been accumulated, on the host."""
    return {
        name: parameter.grad.cpu()
        for name, parameter in draft.named_parameters()
        if parameter.grad is not None
    }
