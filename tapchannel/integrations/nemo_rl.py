"""NeMo-RL: its draft capture under pipeline parallelism, carried by tapchannel.

NeMo-RL's Megatron worker captures the embedding and some layers' outputs in every forward and asks
for them where the draft trains. `register` gives an object that does so, under the names that the
worker needs. What changes there; at right, what its own channel (pull request 4060) calls it::

    # worker set-up, on every rank, once the model is on its device
    from tapchannel.integrations import nemo_rl
    taps = nemo_rl.register(                        # build_tap_channel(…)
        model, resolve_draft_aux_layer_ids(draft_config, num_layers),
        max_rows=tap_slot_rows(policy_cfg), mask_token_id=mask_token_id)

    # megatron_forward_backward, on every rank, if the draft trains in this call
    with taps.run_pass(num_microbatches):           # tap_channel.begin_pass(model)
        return forward_backward_func(…)

    # forward_with_post_processing_fn, on every rank
    with taps.capture():                            # get_capture_context(model, …, tap_channel)
        output_tensor = model_forward(…)
    captured_states = taps.get_captured_states()    # capture.get_captured_states()

    taps.mask_row                                   # tap_channel.mask_row
    taps.pop_wait_seconds()                         # tap_channel.pop_rendezvous_wait_s()

Other than there, what is captured lies in the slot and is not copied (see `CapturedStates`), an
interleaved schedule is served, and tensor-parallel ranks send a share of the rows each: under
sequence parallelism nobody gathers them before. Layers count from 0, as NeMo-RL's do, and must come
from the configuration that all ranks share: only the last stage has a draft to ask.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final

import torch
import torch.distributed as dist

from ..errors import ConfigError, UsageError
from .agreement import gather
from .embedding_row import EmbeddingRow
from .megatron import attach, groups_of
from .megatron_hooks import hidden_of
from .megatron_model import EMBEDDING, chunks_of, device_of
from .session import Session
from .waits import Waits

HIDDEN_STATES: Final = "hidden_states"
INPUTS_EMBEDS: Final = "inputs_embeds"


@dataclass(frozen=True, slots=True)
class CapturedStates:
    """What a forward captured, at the draft's stage; both None on the others.

    ``hidden_states`` is ``[sequence, batch, layers x width]``, layers ascending; ``inputs_embeds``
    is ``[sequence, batch, width]``.

    Ownership:  views on the slot. It goes back once they, and what autograd saved of them, are
                gone (I9); `torch.Tensor.clone` what is to be kept over later microbatches.
    """

    hidden_states: torch.Tensor | None = None
    inputs_embeds: torch.Tensor | None = None


class DraftCapture:
    """The draft capture of one rank; `register` makes it.

    Parameters
    ----------
    session
        The rank's session; its groups are ``hidden_states`` and ``inputs_embeds``.
    aux_layer_ids
        The layers that it was made for, from 0, ascending.
    device
        Where this rank computes.
    decoder
        On the draft's stage the layers of the last chunk; what they put out is
        ``[sequence, batch, width]``.
    row
        The mask token's embedding row, for a block draft.
    """

    def __init__(
        self,
        session: Session,
        aux_layer_ids: Sequence[int],
        *,
        device: torch.device | str,
        decoder: torch.nn.Module | None = None,
        row: EmbeddingRow | None = None,
    ) -> None:
        self.session = session
        self.aux_layer_ids = tuple(aux_layer_ids)
        self._row = row
        self._waits = Waits(device)
        self._batch = 0
        self._inside = self._forwarded = self._captured = False
        if decoder is not None:
            session.on_close(decoder.register_forward_hook(self._watch).remove)

    @contextmanager
    def run_pass(
        self, num_microbatches: int, *, step: int | None = None
    ) -> Generator[None, None, None]:
        """Wrap one forward-backward call, on every rank, if the draft trains in it.

        ``step`` as in `Session.step`. The mask token's row is sent as it is now, too. What runs
        outside a pass is not captured, and sends nothing.

        Blocks:     never on a GPU; see `EmbeddingRow.send`.
        On failure: an exception inside ends the pass on all ranks; the next one works (I7).

        Raises: as `Session.step`.
        """
        if self._row is not None:
            self._row.send()
        self._captured = False
        with self.session.step(num_microbatches, step=step):
            yield
        if self._row is not None:
            self._row.settle()

    @contextmanager
    def capture(self) -> Generator[DraftCapture, None, None]:
        """Wrap the forward of one microbatch; on every rank."""
        self._forwarded, self._captured, self._inside = False, False, True
        try:
            yield self
        finally:
            self._inside = False
        self._captured = True

    def get_captured_states(self) -> CapturedStates:
        """Give what the last `capture` captured, where it was the draft stage's last chunk.

        Blocks:     as `Session.take`: on a GPU the stream, and not the host.

        Raises:
            UsageError: no forward was captured since the last call.
            TapChannelError: the taps did not come.
        """
        if not self._captured:
            raise UsageError(
                "no forward was captured",
                next_step="call get_captured_states() once after each capture() block",
            )
        self._captured = False
        if not self._forwarded:
            return CapturedStates()
        with self._waits.timed(), self.session.take() as lease:
            hidden, embeds = lease[HIDDEN_STATES], lease[INPUTS_EMBEDS]
        return CapturedStates(self._by_sequence(hidden), self._by_sequence(embeds))

    @property
    def mask_row(self) -> torch.Tensor:
        """The mask token's embedding row ``[width]``, as it was when the pass began.

        Blocks, Ownership, Raises: as `EmbeddingRow.read`.
        """
        if self._row is None:
            raise UsageError(
                "no mask token was registered", next_step="give register mask_token_id="
            )
        with self._waits.timed():
            return self._row.read()

    def pop_wait_seconds(self) -> float:
        """Give how long this rank waited for taps and mask row since the last call.

        On a GPU that is how long its stream stood still; see `Waits.pop`.
        """
        return self._waits.pop()

    def close(self) -> None:
        """Close the session, and with it all hooks. Twice is fine."""
        self.session.close()

    def __enter__(self) -> DraftCapture:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.session.__exit__(kind, error, trace)

    def _watch(self, _module: torch.nn.Module, _inputs: Any, output: Any) -> None:
        """See the draft stage's last chunk forwarded, and how many sequences it worked on."""
        if self._inside:
            self._batch, self._forwarded = int(hidden_of(output).shape[-2]), True

    def _by_sequence(self, view: torch.Tensor) -> torch.Tensor:
        return view.view(-1, self._batch, view.shape[-1])


def register(
    model: torch.nn.Module | Sequence[torch.nn.Module],
    aux_layer_ids: Sequence[int],
    *,
    max_rows: int,
    mask_token_id: int | None = None,
    pp_group: dist.ProcessGroup | None = None,
    tp_group: dist.ProcessGroup | None = None,
    **settings: Any,
) -> DraftCapture:
    """Attach the policy on this rank, for a draft on the last stage.

    Collective over the pipeline and the tensor group, once the model is on its device.

    Parameters
    ----------
    model
        This rank's model chunks, in order; or the one that it has.
    aux_layer_ids
        The layers whose outputs the draft reads, from 0; equal on all ranks.
    max_rows
        The most tokens of one microbatch on one context-parallel rank, padding included.
    mask_token_id
        A block draft's mask token: its embedding row is sent at the start of each pass.
    pp_group, tp_group, settings
        As `megatron.attach` has them.

    Raises:
        ConfigError: some rank cannot be served, or ranks disagree. It is raised on every rank.
    """
    ids = sorted({int(index) for index in aux_layer_ids})
    layers = [index + 1 for index in ids]
    chunks, _ = chunks_of(model)
    groups = {HIDDEN_STATES: [f"layer{number}" for number in layers], INPUTS_EMBEDS: [EMBEDDING]}
    pipeline, tensor = groups_of(chunks, pp_group, tp_group)
    here = {"pp_group": pipeline, "tp_group": tensor}
    _agree_on_mask(mask_token_id, **here)
    session = attach(
        model, layers, embedding=True, max_rows=max_rows, groups=groups, **here, **settings
    )
    device = device_of(chunks)
    try:
        row = None
        if mask_token_id is not None:
            owned: list[Any] = [chunk.embedding for chunk in chunks if chunk.embedding is not None]
            table = owned[0].word_embeddings if owned else None
            row = EmbeddingRow(table, mask_token_id, device=device, **here)
        decoder = chunks[-1].decoder if session.is_consumer else None
        return DraftCapture(session, ids, device=device, decoder=decoder, row=row)
    except BaseException:
        session.close()
        raise


def _agree_on_mask(
    token: int | None, pp_group: dist.ProcessGroup, tp_group: dist.ProcessGroup
) -> None:
    """Refuse on all ranks if not all send the same row: some would wait for the others for ever."""
    column = [report["token"] for report in gather({"token": token}, pp_group)]
    joined = [report["column"] for report in gather({"column": column}, tp_group)]
    if any(said != [token] * len(column) for said in joined):
        raise ConfigError(
            "mask_token_id differs between ranks",
            seen=joined,
            next_step="give register the same mask_token_id on every rank",
        )
