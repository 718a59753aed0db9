"""A stand-in for NeMo-RL's Megatron worker: same order of calls, small modules, its own 1F1B.

The modules have what an adapter reads of Megatron-Core's: ``decoder.layers`` with global numbers,
``embedding.word_embeddings``, ``config``. Each works on every token alone, so that a sequence shard
needs nobody.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from support.ranks import Ranks
from tapchannel.integrations import nemo_rl

WIDTH, VOCABULARY, MASK = 8, 12, 9
Shapes = Sequence[tuple[int, int]]


class Layer(nn.Module):
    """A decoder layer; like a transformer layer's, its output is a pair."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.layer_number = number
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Add the layer's share to the hidden states."""
        return hidden + torch.tanh(self.inner(hidden)), None


class Decoder(nn.Module):
    """The layers of a stage."""

    def __init__(self, numbers: Sequence[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer(number) for number in numbers])

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Run them."""
        for layer in self.layers:
            hidden, _ = layer(hidden)
        return hidden


class Embedding(nn.Module):
    """``[batch, sequence]`` of ids to ``[sequence, batch, width]``, this rank's share of it."""

    def __init__(self, share: tuple[int, int]) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(VOCABULARY, WIDTH)
        self.share = share

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Embed the ids of this rank's part of the sequence."""
        index, count = self.share
        return self.word_embeddings(ids).transpose(0, 1).chunk(count)[index].contiguous()


class Policy(nn.Module):
    """One stage of the policy; it answers with a number for each token."""

    def __init__(self, desk: SimpleNamespace, numbers: Sequence[int], sharded: bool) -> None:
        super().__init__()
        torch.manual_seed(desk.stage)  # alike on tensor ranks: each stands for the whole layer
        self.stages, self.stage = dist.get_world_size(desk.pp_group), desk.stage
        self.pre_process, self.post_process = self.stage == 0, self.stage == self.stages - 1
        self.share = (desk.tp_rank, dist.get_world_size(desk.tp_group)) if sharded else (0, 1)
        self.embedding = Embedding(self.share) if self.pre_process else None
        self.decoder = Decoder(numbers)
        self.config = SimpleNamespace(
            hidden_size=WIDTH,
            params_dtype=torch.float32,
            fp32_residual_connection=False,
            bf16=False,
            fp16=False,
            sequence_parallel=sharded,
        )

    def forward(self, ids: torch.Tensor, hidden: torch.Tensor | None) -> torch.Tensor:
        """Run the stage on ids or on what the stage before put out."""
        hidden = hidden if self.embedding is None else self.embedding(ids)
        return self.decoder(hidden)


class Records:
    """What plain hooks saw on this rank, by name and microbatch: what the draft must get."""

    def __init__(self, policy: Policy) -> None:
        self.seen: dict[str, list[torch.Tensor]] = {}
        if policy.embedding is not None:
            policy.embedding.register_forward_hook(self.keeper("embedding"))
        for layer in policy.decoder.layers:
            layer.register_forward_hook(self.keeper(f"layer{layer.layer_number}"))

    def keeper(self, name: str) -> Any:
        """Make a hook that keeps copies under this name."""

        def keep(module: nn.Module, inputs: object, output: Any) -> None:
            hidden = output[0] if isinstance(output, tuple) else output
            self.seen.setdefault(name, []).append(hidden.detach().clone())

        return keep


class Draft(nn.Module):
    """A draft whose first layer saves its input, the slot, for backward."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        torch.manual_seed(77)
        self.inner = nn.Linear(layers * WIDTH + WIDTH, WIDTH)

    def forward(
        self, hidden: torch.Tensor, embeds: torch.Tensor, mask: torch.Tensor
    ) -> torch.Tensor:
        """Answer for each token, the mask's embedding added to its own."""
        return torch.tanh(self.inner(torch.cat([hidden, embeds + mask], dim=-1)))


def set_up(desk: SimpleNamespace, layers: Sequence[Sequence[int]], sharded: bool = False) -> None:
    """Build this rank's stage and its recorder."""
    desk.policy = Policy(desk, layers[desk.stage], sharded)
    desk.records = Records(desk.policy)
    desk.optimizer = torch.optim.SGD(desk.policy.parameters(), lr=0.1)
    desk.taps = desk.draft = None


def register(
    desk: SimpleNamespace, ids: Sequence[int], max_rows: int, mask: int | None = MASK, **others: Any
) -> None:
    """Do what the worker does once its model is there."""
    groups = {"pp_group": desk.pp_group, "tp_group": desk.tp_group}
    given = {"depth": desk.policy.stages, "timeout": 20.0} | groups | others
    desk.taps = nemo_rl.register(desk.policy, ids, max_rows=max_rows, mask_token_id=mask, **given)
    desk.draft = Draft(len(ids)) if desk.policy.post_process else None


def train(desk: SimpleNamespace, shapes: Shapes, step: int) -> list[dict[str, Any]]:
    """Run one step of 1F1B, capturing if there is a draft; return the draft stage's facts."""
    desk.records.seen.clear()
    ids = [_ids(step, number, shape) for number, shape in enumerate(shapes)]
    desk.optimizer.zero_grad()
    run = OneForwardOneBackward(desk, ids)
    if desk.taps is None:
        run.all()
    else:
        with desk.taps.run_pass(len(shapes), step=step):
            run.all()
    desk.optimizer.step()
    return run.facts


def _ids(step: int, number: int, shape: tuple[int, int]) -> torch.Tensor:
    random = torch.Generator().manual_seed(100 * step + number)
    return torch.randint(VOCABULARY, shape[::-1], generator=random)


class OneForwardOneBackward:
    """The schedule of one step on one rank."""

    def __init__(self, desk: SimpleNamespace, ids: Sequence[torch.Tensor]) -> None:
        self.desk, self.policy, self.ids = desk, desk.policy, ids
        self.open: deque[tuple[torch.Tensor | None, torch.Tensor]] = deque()
        self.sends: list[Any] = []
        self.facts: list[dict[str, Any]] = []

    def all(self) -> None:
        """Run all forwards and backwards in order."""
        ahead = min(self.policy.stages - 1 - self.policy.stage, len(self.ids))
        for number in range(len(self.ids) + ahead):
            if number < len(self.ids):
                self.forward(number)
            if number >= ahead:
                self.backward()
        for work, _ in self.sends:
            work.wait()

    def forward(self, number: int) -> None:
        """Do what NeMo-RL's forward step does."""
        ids, policy, taps = self.ids[number], self.policy, self.desk.taps
        came = None if policy.pre_process else self.receive(self.like(ids), -1)
        if came is not None:
            came.requires_grad_()
        if taps is None:
            output = policy(ids, came)
        else:
            with taps.capture():
                output = policy(ids, came)
            captured = taps.get_captured_states()
        if not policy.post_process:
            self.send(output.detach(), 1)
            self.open.append((came, output))
            return
        loss = output.square().mean()
        self.facts.append({"loss": loss.item()})
        if taps is not None:
            mask = taps.mask_row
            kept = {name: getattr(captured, name) for name in ("hidden_states", "inputs_embeds")}
            self.facts[-1] |= {name: view.clone() for name, view in kept.items()} | {"mask": mask}
            loss = loss + self.desk.draft(*kept.values(), mask).square().mean()
        self.open.append((came, loss))

    def backward(self) -> None:
        """Run the oldest microbatch's backward; the draft's runs with it."""
        came, output = self.open.popleft()
        if self.policy.post_process:
            output.backward()
        else:
            output.backward(self.receive(torch.empty_like(output), 1))
        if came is not None and came.grad is not None:
            self.send(came.grad, -1)

    def like(self, ids: torch.Tensor) -> torch.Tensor:
        """Make room for one microbatch's hidden states."""
        batch, length = ids.shape
        return torch.empty(length // self.policy.share[1], batch, WIDTH)

    def receive(self, room: torch.Tensor, distance: int) -> torch.Tensor:
        """Wait for what the neighbour sends."""
        dist.recv(room, group_src=self.policy.stage + distance, group=self.desk.pp_group)
        return room

    def send(self, tensor: torch.Tensor, distance: int) -> None:
        """Send to the neighbour, who may not yet wait for it."""
        tensor = tensor.contiguous()
        place = {"group_dst": self.policy.stage + distance, "group": self.desk.pp_group}
        self.sends.append((dist.isend(tensor, **place), tensor))


def recorded(desk: SimpleNamespace) -> dict[str, list[torch.Tensor]]:
    """Give what this rank's own hooks saw in the last step."""
    return desk.records.seen


def gradients(desk: SimpleNamespace) -> list[torch.Tensor]:
    """Give the policy's gradients on this rank."""
    return [parameter.grad for parameter in desk.policy.parameters() if parameter.grad is not None]


def whole(ranks: Ranks, tp: int, sharded: bool) -> dict[str, list[torch.Tensor]]:
    """Join what all ranks recorded: a shard of the sequence from each tensor rank, or the same."""
    said = ranks.each(recorded)
    joined: dict[str, list[torch.Tensor]] = {}
    for first in range(0, len(said), tp):
        for name in said[first]:
            parts = [said[first + rank][name] for rank in range(tp if sharded else 1)]
            joined[name] = [torch.cat(shards) for shards in zip(*parts, strict=True)]
    return joined
