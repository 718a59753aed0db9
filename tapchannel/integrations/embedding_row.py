"""One row of the policy's embedding on every stage, as it is when a pass begins.

A block draft embeds its masked positions with the policy's own row of the mask token. In a pipeline
that row lies on the first stage, under tensor parallelism on one rank of it.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, TypeAlias, cast

import torch
import torch.distributed as dist

from ..errors import ConfigError, PeerLostError, UsageError
from .agreement import gather

# What a stage's tensor ranks have of the table, and the token whose row they are asked for.
Stage: TypeAlias = "dict[str, Any]"


class EmbeddingRow:
    """The row of one token, sent from the stage that has the embedding once a pass.

    Constructing it is collective over ``pp_group`` and ``tp_group``; so is `send`.

    Parameters
    ----------
    embedding
        The embedding module (``weight`` of ``[vocabulary, width]``, or this rank's part of it with
        ``vocab_start_index``, as Megatron's has); None on stages without one.
    token
        The id whose row is wanted.
    device
        Where this rank computes.
    timeout
        Seconds that a row may take in host memory; on a GPU the process group's own limit holds.

    Raises:
        ConfigError: no stage has the embedding, or several have, or none has the token. All ranks
            raise it alike.
    """

    def __init__(
        self,
        embedding: torch.nn.Module | None,
        token: int,
        *,
        pp_group: dist.ProcessGroup,
        tp_group: dist.ProcessGroup | None = None,
        device: torch.device | str,
        timeout: float = 120.0,
    ) -> None:
        self._token, self._pp, self._tp = token, pp_group, tp_group
        self._device, self._timeout = torch.device(device), timeout
        self._weight = _weight_of(embedding)
        self._begin = int(getattr(embedding, "vocab_start_index", 0))
        said = _said(embedding, self._weight, self._begin)
        report = {"token": token, "parts": gather(said, tp_group)}
        stages = cast("list[Stage]", gather(report, pp_group))
        self._stage, self._owner = _found(stages)
        whole = stages[self._stage]["parts"][self._owner]
        self._width, self._dtype = int(whole["width"]), getattr(torch, whole["dtype"])
        self._sent: tuple[torch.Tensor, Any] | None = None
        self._settled = True

    def send(self) -> None:
        """Begin to send the row as it is now on this stream; before the schedule runs.

        Blocks:     never on a GPU. In host memory the ranks of the first stage, for each other.
        Ordering:   what is queued afterwards may change the embedding.
        """
        self.settle()
        row = torch.empty(self._width, dtype=self._dtype, device=self._device)
        place = self._token - self._begin
        if self._weight is not None and 0 <= place < self._weight.shape[0]:
            row.copy_(self._weight[place].detach())
        if dist.get_rank(self._pp) == self._stage and self._tp is not None:
            owner = dist.get_global_rank(self._tp, self._owner)
            dist.broadcast(row, src=owner, group=self._tp)
        source = dist.get_global_rank(self._pp, self._stage)
        work = cast("Any", dist.broadcast(row, src=source, group=self._pp, async_op=True))
        self._sent, self._settled = (row, work), False

    def read(self) -> torch.Tensor:
        """Give the row ``[width]`` that the last `send` brought.

        Blocks:     in host memory until it is here; on a GPU the current stream, never the host.
        Ownership:  a tensor of its own, which no later `send` writes to.

        Raises:
            UsageError: nothing was sent yet.
            PeerLostError: it did not come.
        """
        if self._sent is None:
            raise UsageError(
                "embedding row was not sent yet", next_step="call send() as each pass begins"
            )
        self.settle()
        return self._sent[0]

    def settle(self) -> None:
        """End what `send` began, on ranks that do not read the row too.

        Blocks:     as `read` does.

        Raises:
            PeerLostError: the row did not come.
        """
        if self._settled or self._sent is None:
            return
        work = self._sent[1]
        self._settled = True
        try:
            if self._device.type == "cpu":
                work.wait(timedelta(seconds=self._timeout))
            else:  # with a limit the host would wait, too
                work.wait()
        except RuntimeError as error:
            self._sent = None
            raise PeerLostError(
                "embedding row did not come from the first stage",
                rank=dist.get_global_rank(self._pp, self._stage),
                limit=self._timeout,
                detail=str(error).splitlines()[0],
                next_step="see why that rank, or one between, did not begin this pass",
            ) from error


def _weight_of(embedding: torch.nn.Module | None) -> torch.Tensor | None:
    weight = getattr(embedding, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


def _said(
    embedding: torch.nn.Module | None, weight: torch.Tensor | None, begin: int
) -> dict[str, Any]:
    """Say which rows of the table this rank has; what is wrong with it, all ranks shall hear."""
    if weight is None:
        return {"rows": 0, "odd": None if embedding is None else type(embedding).__name__}
    rows, width = weight.shape
    dtype = str(weight.dtype).removeprefix("torch.")
    return {"begin": begin, "rows": rows, "width": width, "dtype": dtype, "odd": None}


def _found(stages: list[Stage]) -> tuple[int, int]:
    """Give the position of the stage that has the embedding, and of its rank that has the token."""
    odd = [part["odd"] for stage in stages for part in stage["parts"] if part["odd"]]
    if odd:
        raise ConfigError(
            "embedding has no table", seen=odd[0], expected="a weight of [vocabulary, width]"
        )
    tokens = [stage["token"] for stage in stages]
    if len(set(tokens)) > 1:
        raise ConfigError(
            "stages name different tokens for the embedding row",
            seen=", ".join(f"stage {place}: {token}" for place, token in enumerate(tokens)),
        )
    having = [
        place for place, stage in enumerate(stages) if any(part["rows"] for part in stage["parts"])
    ]
    if len(having) != 1:
        raise ConfigError(
            "one stage of the pipeline must have the embedding",
            seen=f"{len(having)} of {len(stages)} stages have it",
            expected="1",
            next_step="give it on the first stage, and None on every other, tied copies included",
        )
    return having[0], _owner_of(tokens[0], stages[having[0]]["parts"])


def _owner_of(token: int, parts: list[dict[str, Any]]) -> int:
    for owner, part in enumerate(parts):
        if part["rows"] and part["begin"] <= token < part["begin"] + part["rows"]:
            return owner
    last = max(part["begin"] + part["rows"] for part in parts if part["rows"]) - 1
    raise ConfigError("token is not in the embedding", seen=token, expected=f"0 to {last}")
