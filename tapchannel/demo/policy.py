"""The policy: a small decoder-only transformer over bytes, cut into stages, and its tap plan."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from ..plan import TapPlan

VOCABULARY = 256
WIDTH = 128
HEADS = 4
LAYERS_PER_STAGE = 2
SEQUENCES = 4  # in a microbatch
TOKENS = 128  # in a sequence
ROWS = SEQUENCES * TOKENS  # of every tap


class Layer(nn.Module):
    """One transformer layer: causal attention, then a feed-forward part, both on a residual."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(WIDTH)
        self.queries_keys_values = nn.Linear(WIDTH, 3 * WIDTH)
        self.attention_out = nn.Linear(WIDTH, WIDTH)
        self.feed_norm = nn.LayerNorm(WIDTH)
        self.feed = nn.Sequential(
            nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Map ``[sequences, tokens, WIDTH]`` to the same shape."""
        hidden = hidden + self._attend(self.attention_norm(hidden))
        return hidden + self.feed(self.feed_norm(hidden))

    def _attend(self, hidden: torch.Tensor) -> torch.Tensor:
        heads = self.queries_keys_values(hidden).unflatten(-1, (3, HEADS, WIDTH // HEADS))
        queries, keys, values = heads.permute(2, 0, 3, 1, 4)
        # One named kernel: a choice made at run time could differ between the two forwards.
        with sdpa_kernel(SDPBackend.MATH):
            mixed = functional.scaled_dot_product_attention(queries, keys, values, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).flatten(2))


class Embedding(nn.Module):
    """Byte and place embeddings, summed."""

    def __init__(self) -> None:
        super().__init__()
        self.of_byte = nn.Embedding(VOCABULARY, WIDTH)
        self.of_place = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map ``[sequences, tokens]`` to ``[sequences, tokens, WIDTH]``."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.of_byte(tokens) + self.of_place(places)


class Stage(nn.Module):
    """One stage's share of the policy.

    It computes on ``device`` and hands its output over on ``boundary``, which is the CPU where
    the pipeline's own sends cannot carry GPU tensors (gloo).
    """

    def __init__(
        self, index: int, stages: int, device: torch.device, boundary: torch.device
    ) -> None:
        super().__init__()
        self.device = device
        self.boundary = boundary
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(index)  # whoever builds this stage gets the same first weights
            self.embedding = Embedding() if index == 0 else None
            self.layers = nn.ModuleList(Layer() for _ in range(LAYERS_PER_STAGE))
            self.head = (
                nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY))
                if index == stages - 1
                else None
            )
        self.to(device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run tokens (the first stage) or hidden states through this stage."""
        hidden = hidden.to(self.device)
        if self.embedding is not None:
            hidden = self.embedding(hidden)
        for layer in self.layers:
            hidden = layer(hidden)
        if self.head is not None:
            hidden = self.head(hidden)
        return hidden.to(self.boundary)

    def tapped(self) -> list[nn.Module]:
        """Return the modules whose outputs are this stage's taps, in `taps_of` order."""
        layer = self.layers[LAYERS_PER_STAGE - 1]
        return [layer] if self.embedding is None else [self.embedding, layer]


def taps_of(stage: int) -> list[str]:
    """Return a stage's taps: the output of its last layer and, on stage 0, of the embedding."""
    layer = f"layer{(stage + 1) * LAYERS_PER_STAGE}"
    return ["embedding", layer] if stage == 0 else [layer]


def sources(stages: int) -> dict[int, list[str]]:
    """Return who pushes what; a stage's rank is its index."""
    return {stage: taps_of(stage) for stage in range(stages)}


def tap_plan(stages: int) -> TapPlan:
    """Return the plan that all stages build alike."""
    layers = [taps_of(stage)[-1] for stage in range(stages)]
    return TapPlan(
        groups={"features": layers, "embedding": ["embedding"]},
        width=WIDTH,
        dtype="float32",
        max_rows=ROWS,
    )
