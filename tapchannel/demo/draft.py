"""The draft: fuses the taps of all stages, one transformer layer, a head over bytes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from .policy import SEQUENCES, TOKENS, VOCABULARY, WIDTH, Layer

LEARNING_RATE = 2e-3


class Draft(nn.Module):
    """Predicts the next byte from the taps of one microbatch."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.fuse_features = nn.Linear(layers * WIDTH, WIDTH)
        self.fuse_embedding = nn.Linear(WIDTH, WIDTH)
        self.layer = Layer()
        self.head = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))

    def forward(self, features: torch.Tensor, embedding: torch.Tensor) -> torch.Tensor:
        """Map ``[rows, layers * WIDTH]`` and ``[rows, WIDTH]`` to logits ``[rows, VOCABULARY]``."""
        fused = self.fuse_features(features) + self.fuse_embedding(embedding)
        hidden = self.layer(fused.unflatten(0, (SEQUENCES, TOKENS)))
        return self.head(hidden).flatten(0, 1)


class DraftTrainer:
    """A draft and its optimizer; one step a microbatch."""

    def __init__(self, layers: int, device: torch.device) -> None:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(layers)
            self._draft = Draft(layers)
        self._draft.to(device)
        self._optimizer = torch.optim.AdamW(self._draft.parameters(), lr=LEARNING_RATE)

    def train(
        self, features: torch.Tensor, embedding: torch.Tensor, targets: torch.Tensor
    ) -> float:
        """Take one step on views of a slot, and return the loss before it.

        Ownership: backward has run on return and its graph is gone, so nothing holds the views.
        """
        logits = self._draft(features, embedding)
        loss = functional.cross_entropy(logits, targets.flatten())
        self._optimizer.zero_grad()
        loss.backward()
        self._optimizer.step()
        return loss.item()
