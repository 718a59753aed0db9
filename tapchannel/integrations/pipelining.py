"""Taps of a `torch.distributed.pipelining` schedule: TapStage in place of PipelineStage, `attach`.

A schedule runs every real forward through `PipelineStage.forward_one_chunk`, which names stage and
microbatch: that is where a `TapStage` arms its taps. What else runs a stage's modules never comes
through there, and pushes nothing: torch's dry run, which learns the shapes, and the replays of
activation checkpoints in backward.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ..errors import TapChannelError, UsageError
from .opening import open_session
from .pipelining_loss import any_loss, check_trained
from .pipelining_modules import DType, Place, Tapped, find
from .pipelining_order import Schedule, microbatches_of, needs_of, stages_of
from .session import Session
from .wiring import Settings

if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack

    class Rest(TypedDict, total=False):
        """What `attach` hands on to `Settings` as it is."""

        layout: str
        copy: bool
        name: str
        timeout: float
        transport: str


class TapStage(PipelineStage):
    """A `PipelineStage` that knows which microbatch it runs; built with the same arguments.

    Without `attach` it is a PipelineStage and nothing else.
    """

    _session: Session | None = None
    _running: int | None = None  # the thread that runs this stage's forward now
    _unchecked = False  # whether its first backward is still to come

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        """Run one microbatch with the taps armed.

        Raises:
            TapChannelError: a tap could not be pushed. torch's own errors are raised as they are.
        """
        session = self._session
        if session is None:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        session.enter(self.stage_index, fwd_chunk_id)
        self._running = threading.get_ident()
        try:
            return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        except RuntimeError as error:
            # torch wraps what a forward raises, and prints all its inputs before it.
            if isinstance(error.__cause__, TapChannelError):
                raise error.__cause__ from None
            raise
        finally:
            self._running = None
            session.leave(self.stage_index)

    def forward_maybe_with_nosync(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module. What the last stage receives says how many rows `take` shall expect."""
        hidden: object = args[0] if args and not self.is_first else None
        if self._session is not None and self.is_last and isinstance(hidden, torch.Tensor):
            self._session.saw(hidden)
        return super().forward_maybe_with_nosync(*args, **kwargs)

    def _prepare_backward_infra(self, *args: Any, **kwargs: Any) -> Any:
        # The dry run calls the loss function to learn the gradients' shapes: with made-up hidden
        # states and no microbatch. There are no taps for it, and no draft should learn from it.
        if self._session is not None and kwargs.get("loss_fn") is not None:
            kwargs["loss_fn"] = any_loss
        return super()._prepare_backward_infra(*args, **kwargs)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: torch.Tensor | None = None, *args: Any, **kwargs: Any
    ) -> Any:
        """Run one microbatch's backward. The first one shows whether it will train the draft.

        Raises:
            UsageError: it will not: the schedule computes the stages' own gradients only.
        """
        if (
            self._unchecked
            and isinstance(loss, torch.Tensor)
            and not kwargs.get("full_backward", True)
        ):
            self._unchecked = False
            check_trained(loss, [*self.submod.parameters(), *self.fwd_cache[bwd_chunk_id][1]])
        return super().backward_one_chunk(bwd_chunk_id, loss, *args, **kwargs)

    @property
    def attached(self) -> bool:
        """Whether a session is told what runs."""
        return self._session is not None

    def tell(self, session: Session | None) -> None:
        """Tell this session, or nobody any more, what runs."""
        self._session, self._unchecked = session, self.is_last

    def push_tap(self, name: str, output: object) -> None:
        """Push what a tapped module has put out, if it is this stage's forward that runs it.

        Raises:
            UsageError: it is no tensor, nor a tuple that begins with one.
        """
        # A schedule may overlap this forward with another microbatch's backward, on another thread.
        if self._session is None or self._running != threading.get_ident():
            return
        many = cast("tuple[object, ...]", output if isinstance(output, tuple | list) else (output,))
        hidden = _whole(many[0]) if many else None
        if hidden is None:
            raise UsageError(
                "a stage's module puts out something else than hidden states",
                tap=name,
                stage=self.stage_index,
                seen=", ".join(type(part).__name__ for part in many),
                expected="a tensor, or a tuple that begins with one; a DTensor only if replicated",
                next_step="tap a module whose output is the whole of the hidden states",
            )
        if self.is_first and self.is_last:  # no other stage says how many rows there are
            self._session.saw(hidden)
        self._session.tap(name, hidden)


def _whole(output: object) -> torch.Tensor | None:
    """Give hidden states as a plain tensor with all rows; None if they are not that."""
    if not isinstance(output, torch.Tensor):
        return None
    placements: Sequence[Any] | None = getattr(output, "placements", None)
    if placements is None:
        return output
    replicated = all(placement.is_replicate() for placement in placements)
    return cast("Any", output).to_local() if replicated else None


def attach(
    schedule: Schedule,
    stages: TapStage | Sequence[TapStage],
    taps: Mapping[Place, str] | Sequence[str],
    *,
    max_rows: int,
    groups: Mapping[str, Sequence[str]] | None = None,
    width: int | Mapping[str, int] | None = None,
    dtype: DType | Mapping[str, DType] | None = None,
    depth: int | None = None,
    pp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
    store: object = None,
    secret: str | bytes | None = None,
    listen: str | None = None,
    **settings: Unpack[Rest],
) -> Session:
    """Connect the tapped modules of all stages with the rank of the last stage, where the draft is.

    Call it on every rank of the pipeline with the same arguments but for ``schedule`` and
    ``stages``, once the schedule is made. Then ``with session.step(): schedule.step(…)``, and in
    the loss function ``with session.take() as taps:``. Outside of `Session.step` nothing is pushed.

    A zero-bubble schedule (InterleavedZeroBubble, ZBVZeroBubble, DualPipeV) computes the gradients
    of its stages' own weights only: there the draft's backward belongs into the loss function, or
    the draft into the last stage's module. torch's dry run does not call the loss function.

    A tapped module may be compiled. Within a region that is compiled as one (a stage, say) a tap
    breaks the graph in two; with ``fullgraph=True`` torch refuses it. Under tensor parallelism the
    output has to be whole on every rank of ``tp_group``, each of which pushes its share.

    Parameters
    ----------
    schedule, stages
        The schedule, and this rank's stages as it has them.
    taps
        Names of modules in the stages, as ``named_modules()`` has them, and what each one's output
        is called: ``{"layers.3": "layer3"}``, or a list, each called by its own name. Where several
        stages have the name, ``(stage index, name)``; the name of a stage's whole module is ``""``.
    max_rows
        The most rows (tokens) of one microbatch.
    groups
        Name -> taps that `Session.take` gives side by side; all of them as ``"features"`` by
        default.
    width, dtype
        Of all taps, or by tap. By default they are read from the module, which only layers such as
        Linear, Embedding and norms say, and from its parameters.
    depth
        Slots. By default as many as the schedule can run ahead.
    pp_group, tp_group
        The pipeline's ranks, by default the group of the stages; and the ranks that share its
        tensors.
    store, secret, listen
        As of `open_session`.
    settings
        As of `Settings`.

    Blocks:     collective over ``pp_group``, and over ``tp_group``.

    Raises:
        ConfigError: on every rank, whatever is wrong on any: a stage is no `TapStage`, a tap is on
            no stage or on two, its width cannot be read.
        TapChannelError: the ranks could not be connected.
    """
    own: list[object] = list(stages) if isinstance(stages, Sequence) else [stages]
    named: Mapping[Place, str] = taps if isinstance(taps, Mapping) else {tap: tap for tap in taps}
    ran = stages_of(schedule)
    found, wrong = find(ran, named, width, dtype)
    session = open_session(
        Settings(groups or {"features": list(named.values())}, max_rows, **settings),
        {tap: tapped.shape for tap, tapped in found.items()},
        pp_group=pp_group or ran[0].group or cast("dist.ProcessGroup", dist.group.WORLD),
        tp_group=tp_group,
        consumer=ran[0].stage_index_to_group_rank[ran[0].num_stages - 1],
        device=_numbered(ran[0].device),
        depth=depth,
        needs=needs_of(schedule),
        microbatches=microbatches_of(schedule),
        refusals=_wrong_stages(ran, own) + wrong,
        store=store,
        secret=secret,
        listen=listen,
    )
    _arm(ran, found, session)
    return session


def _numbered(device: torch.device) -> torch.device:
    """Say which GPU ``cuda`` is."""
    if str(device) == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return device


def _wrong_stages(ran: Sequence[Any], own: Sequence[object]) -> list[str]:
    """Say which stages cannot be served, and what to do about it."""
    wrong = [
        f"stage {stage.stage_index} is a {type(stage).__name__}, which tells nobody what it runs: "
        "make it a tapchannel.integrations.pipelining.TapStage, with the same arguments"
        for stage in ran
        if not isinstance(stage, TapStage)
    ]
    wrong += [
        f"stage {stage.stage_index} is attached already: close that session first"
        for stage in ran
        if isinstance(stage, TapStage) and stage.attached
    ]
    if {id(stage) for stage in own} != {id(stage) for stage in ran}:
        indices = ", ".join(str(stage.stage_index) for stage in ran)
        wrong.append(f"the stages given are not those that the schedule runs here ({indices})")
    return wrong


def _arm(stages: Sequence[TapStage], found: Mapping[str, Tapped], session: Session) -> None:
    """Let the stages tell the session what they run, and their tapped modules push."""
    by_index = {stage.stage_index: stage for stage in stages}
    for stage in stages:
        stage.tell(session)
        session.on_close(partial(stage.tell, None))
    for tap, tapped in found.items():
        hook = _pusher(by_index[tapped.stage], tap)
        session.on_close(tapped.module.register_forward_hook(hook).remove)


def _pusher(stage: TapStage, tap: str) -> Callable[..., None]:
    # Not to be traced: what it does is not the model's. Around a region compiled in one piece it
    # runs outside; within one torch breaks the graph, or says that it cannot.
    def push(module: nn.Module, args: object, output: object) -> None:
        stage.push_tap(tap, output)

    return cast("Callable[..., None]", torch.compiler.disable(push))
