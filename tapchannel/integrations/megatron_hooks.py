"""The forward hooks that let Megatron-Core's layers push their outputs.

None of them changes what it sees, waits for the device, or lies inside a layer. A recomputed layer
calls its hook once more, in backward: the chunk's own forward is not running then, and the session
pushes only while it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from .megatron_model import EMBEDDING, Chunk, Taps
from .session import Session

Hook = Callable[..., None]


def hook_up(session: Session, chunks: Sequence[Chunk], taps: Taps) -> None:
    """Hook up a rank's chunks until the session is closed."""
    for index, chunk in enumerate(chunks):
        hooks = _ChunkHooks(session, index, chunk)
        last = session.is_consumer and index == len(chunks) - 1
        for handle in hooks.register(taps, last):
            session.on_close(handle.remove)


class _ChunkHooks:
    """The hooks of one chunk."""

    def __init__(self, session: Session, index: int, chunk: Chunk) -> None:
        self._session, self._index, self._chunk = session, index, chunk
        self._embedded = False

    def register(self, taps: Taps, last: bool) -> list[RemovableHandle]:
        """Register them; ``last`` is for the chunk whose microbatches the draft follows."""
        chunk = self._chunk
        handles = [
            chunk.model.register_forward_pre_hook(self._begin),
            chunk.model.register_forward_hook(self._end, always_call=True),
        ]
        for number, layer in chunk.layers:
            if number in taps.layers:
                handles.append(layer.register_forward_hook(self._pusher(taps.layers[number])))
        if taps.embedding and chunk.embedding is not None:
            handles.append(chunk.embedding.register_forward_hook(self._push_embedding))
        if last:
            handles.append(chunk.decoder.register_forward_hook(self._look))
        return handles

    def _begin(self, module: nn.Module, arguments: object) -> None:
        self._embedded = False
        self._session.enter(self._index, self._microbatch())

    def _microbatch(self) -> int | None:
        """Give what Megatron's schedule wrote on the layers; None if there is no layer."""
        for _, layer in self._chunk.layers:
            return cast("int | None", getattr(layer, "current_microbatch", None))
        return None

    def _end(self, module: nn.Module, arguments: object, output: object) -> None:
        self._session.leave(self._index)  # after an exception, too

    def _pusher(self, name: str) -> Hook:
        def push(module: nn.Module, arguments: object, output: Any) -> None:
            self._session.tap(name, hidden_of(output))

        return push

    def _push_embedding(self, module: nn.Module, arguments: object, output: Any) -> None:
        # Multi-token prediction embeds once more in the same forward.
        if not self._embedded:
            self._embedded = True
            self._session.tap(EMBEDDING, hidden_of(output))

    def _look(self, module: nn.Module, arguments: object, output: Any) -> None:
        self._session.saw(hidden_of(output))


def hidden_of(output: Any) -> torch.Tensor:
    """Give a layer's hidden states: transformer layers return a tuple, others the bare tensor."""
    first: Any = cast("tuple[Any, ...]", output)[0] if isinstance(output, tuple) else output
    return first
