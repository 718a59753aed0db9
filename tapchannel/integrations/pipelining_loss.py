"""What the loss function of a torch schedule may not be left to find out by itself."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, cast

import torch

from ..errors import UsageError


def any_loss(output: object, *_: object, **__: object) -> torch.Tensor:
    """Stand in for the loss function in torch's dry run: every output takes part, densely."""
    outputs = cast("tuple[object, ...]", output if isinstance(output, tuple | list) else (output,))
    floats = [out for out in outputs if isinstance(out, torch.Tensor) and out.is_floating_point()]
    return torch.stack([out.square().mean().float() for out in floats]).sum()


def check_trained(loss: torch.Tensor, known: Iterable[torch.Tensor]) -> None:
    """Refuse a loss that hangs from weights whose gradients a zero-bubble backward leaves out.

    Such a backward computes the gradients of the stage's inputs, later those of the stage's own
    weights; ``known`` are both. A draft's would stay ``None``, and nobody would say so.

    Raises:
        UsageError: there are such weights.
    """
    ids = {id(tensor) for tensor in known}
    strange = [weight for weight in _leaves(loss) if id(weight) not in ids]
    if strange:
        shapes = ", ".join(str(tuple(weight.shape)) for weight in strange[:4])
        raise UsageError(
            "the draft would not be trained",
            seen=f"a loss with {len(strange)} weights from outside of the last stage ({shapes})",
            expected="the policy's loss alone: this schedule computes the gradients of its stages' "
            "inputs and weights, and no others",
            next_step="call backward() on the draft's loss in the loss function and return the "
            "policy's, or make the draft a submodule of the last stage's module",
        )


def _leaves(loss: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yield the tensors that a backward from here would accumulate gradients into."""
    todo: list[Any] = [loss.grad_fn]
    seen: set[Any] = set()
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if hasattr(node, "variable"):
            yield node.variable
        todo.extend(next_node for next_node, _ in node.next_functions)
