"""NeMo-RL's draft capture over tapchannel: a stand-in worker makes the calls, in its order."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from support import nemo_worker as worker
from support.children import Children
from support.ranks import Ranks
from tapchannel.errors import ConfigError, PassAborted, PeerLostError, UsageError

# Three stages: two taps on the first, none on the second, one where the draft is.
LAYERS = ((1, 2), (3, 4), (5, 6))
IDS = (0, 1, 4)
# More microbatches than slots, of other lengths and numbers of sequences.
SHAPES = ((8, 2), (16, 1), (6, 3), (12, 2), (4, 4), (16, 2), (4, 1), (2, 2))
MAX_ROWS = 32
pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start three stages once."""
    with Children(limit=170) as children:
        made = Ranks(children, tmp_path_factory.mktemp("group"), stages=3)
        yield made
        made.dismiss()


@pytest.fixture
def pipeline(ranks: Ranks) -> Iterator[Ranks]:
    """Give them a policy; take its taps off afterwards."""
    ranks.each(worker.set_up, LAYERS)
    yield ranks
    ranks.each(close)


def close(desk: SimpleNamespace) -> None:
    """Close the rank's capture, if it has one."""
    if desk.taps is not None:
        desk.taps.close()


def assert_captured(
    facts: Sequence[dict[str, Any]], seen: dict[str, list[torch.Tensor]], ids: Sequence[int]
) -> None:
    """Compare what the draft got with what the stages' own hooks saw, bit by bit."""
    assert len(facts) == len(seen["embedding"])
    for number, fact in enumerate(facts):
        hidden = torch.cat([seen[f"layer{index + 1}"][number] for index in sorted(ids)], dim=-1)
        assert torch.equal(fact["hidden_states"], hidden)
        assert torch.equal(fact["inputs_embeds"], seen["embedding"][number])


def mask_of(desk: SimpleNamespace) -> torch.Tensor | None:
    """Give the row of the mask token where the embedding is."""
    table = desk.policy.embedding
    return None if table is None else table.word_embeddings.weight[worker.MASK].detach().clone()


def test_the_draft_gets_what_the_policy_computed(pipeline: Ranks) -> None:
    """Catches: taps of another microbatch, in another order or shape; a stale mask row."""
    pipeline.each(worker.register, IDS[::-1], MAX_ROWS)
    masks = []
    for step in (1, 2):
        mask = pipeline.each(mask_of)[0]
        none, nothing, facts = pipeline.each(worker.train, SHAPES, step)
        assert none == nothing == []
        assert_captured(facts, worker.whole(pipeline, 1, False), IDS)
        assert all(torch.equal(fact["mask"], mask) for fact in facts)
        masks.append(mask)
    assert not torch.equal(*masks)  # the policy has trained it between the two passes


def draft_gradient(desk: SimpleNamespace) -> torch.Tensor | None:
    """Give the gradient of the draft's first layer."""
    return None if desk.draft is None else desk.draft.inner.weight.grad


def test_the_drafts_backward_reads_its_own_microbatch(pipeline: Ranks) -> None:
    """Catches: a slot that a later microbatch overwrites before the draft's backward (I9)."""
    pipeline.each(partial(worker.register, depth=1), IDS, MAX_ROWS)
    facts = pipeline.each(worker.train, SHAPES, 1)[-1]
    draft = worker.Draft(len(IDS))
    for fact in facts:
        draft(fact["hidden_states"], fact["inputs_embeds"], fact["mask"]).square().mean().backward()
    assert torch.equal(pipeline.each(draft_gradient)[-1], draft.inner.weight.grad)


def test_the_policy_trains_as_without_a_draft(pipeline: Ranks) -> None:
    """Catches: a gradient through a tap, or a hook that changes what it sees."""
    bare = [pipeline.each(worker.train, SHAPES, step)[-1] for step in (1, 2)]
    bare_gradients = pipeline.each(worker.gradients)
    pipeline.each(worker.set_up, LAYERS)
    pipeline.each(worker.register, IDS, MAX_ROWS)
    tapped = [pipeline.each(worker.train, SHAPES, step)[-1] for step in (1, 2)]
    assert [[fact["loss"] for fact in facts] for facts in tapped] == [
        [fact["loss"] for fact in facts] for facts in bare
    ]
    for rank, gradients in enumerate(pipeline.each(worker.gradients)):
        assert all(map(torch.equal, gradients, bare_gradients[rank]))


def evaluate(desk: SimpleNamespace) -> Any:
    """Run a forward that no pass wraps; then ask for it all the same, where the draft is."""
    outboxes = desk.taps.session.outboxes
    before = [outbox.info()["pushes"] for outbox in outboxes]
    ids, hidden = torch.ones(2, 4, dtype=torch.int64), torch.ones(4, 2, worker.WIDTH)
    with desk.taps.capture():
        desk.policy(ids, hidden)
    assert before == [outbox.info()["pushes"] for outbox in outboxes]
    if desk.draft is None:
        return desk.taps.get_captured_states().hidden_states
    return said_by(desk.taps.get_captured_states)


def test_a_forward_outside_a_pass_sends_nothing(pipeline: Ranks) -> None:
    """Catches: log-probability passes that push into the training's slots."""
    pipeline.each(worker.register, IDS, MAX_ROWS)
    pipeline.each(worker.train, SHAPES, 1)
    assert pipeline.each(evaluate)[:2] == [None, None]
    facts = pipeline.each(worker.train, SHAPES, 2)[-1]
    assert_captured(facts, worker.whole(pipeline, 1, False), IDS)


def ask_wrongly(desk: SimpleNamespace) -> list[str]:
    """Ask before a forward, without a mask token, and twice; give the errors' texts."""
    said = [said_by(desk.taps.get_captured_states), said_by(lambda: desk.taps.mask_row)]
    with desk.taps.capture():
        desk.policy(torch.ones(2, 4, dtype=torch.int64), torch.ones(4, 2, worker.WIDTH))
    with contextlib.suppress(UsageError):  # at the draft: there is no pass
        desk.taps.get_captured_states()
    return [*said, said_by(desk.taps.get_captured_states)]


def said_by(wrong: Callable[[], object]) -> str:
    """Give the text of the UsageError that a call raises."""
    with pytest.raises(UsageError) as caught:
        wrong()
    return str(caught.value)


def test_calls_in_a_wrong_order_are_errors(pipeline: Ranks) -> None:
    """Catches: the last microbatch's states handed out once more; a mask row nobody asked for."""
    pipeline.each(worker.register, IDS, MAX_ROWS, None)
    for before, mask, twice in pipeline.each(ask_wrongly):
        assert "no forward was captured" in before
        assert "no mask token was registered" in mask
        assert "no forward was captured" in twice


def wait_of(desk: SimpleNamespace) -> tuple[float, float]:
    """Ask for the wait twice."""
    return desk.taps.pop_wait_seconds(), desk.taps.pop_wait_seconds()


def test_the_wait_is_counted_where_the_draft_is(pipeline: Ranks) -> None:
    """Catches: a metric that is never reset, or that counts on stages that wait for nothing."""
    pipeline.each(worker.register, IDS, MAX_ROWS)
    pipeline.each(worker.train, SHAPES, 1)
    first, second, (waited, left) = pipeline.each(wait_of)
    assert first == second == (0.0, 0.0)
    assert waited > 0.0
    assert left == 0.0


def refused(desk: SimpleNamespace, per_stage: Any, masks: Any) -> str:
    """Register what this stage believes; give the refusal's text. No hook is left then."""
    with pytest.raises(ConfigError) as caught:
        worker.register(desk, per_stage[desk.stage], MAX_ROWS, masks[desk.stage])
    assert not desk.policy._forward_pre_hooks
    return str(caught.value)


@pytest.mark.parametrize(
    ("per_stage", "masks", "text"),
    [
        (((0, 1), (0, 1), (0, 4)), (worker.MASK,) * 3, "groups differs between ranks"),
        (((0, 9),) * 3, (worker.MASK,) * 3, "tap 'layer10' is made by no rank"),
        ((IDS,) * 3, (worker.VOCABULARY,) * 3, "token is not in the embedding"),
        ((IDS,) * 3, (worker.MASK, worker.MASK, None), "mask_token_id differs between ranks"),
    ],
)
def test_stages_that_disagree_are_refused_on_all(
    pipeline: Ranks, per_stage: Any, masks: Any, text: str
) -> None:
    """Catches: layers read from the draft's own config, which only one stage has; a leak then."""
    said = pipeline.each(refused, per_stage, masks)
    assert all(text in line for line in said)
    pipeline.each(worker.register, IDS, MAX_ROWS)  # nothing is left of the refused attempt
    facts = pipeline.each(worker.train, SHAPES, 1)[-1]
    assert_captured(facts, worker.whole(pipeline, 1, False), IDS)


def fail_in_a_pass(desk: SimpleNamespace) -> str:
    """Fail on the first stage once two microbatches are captured; wait for them elsewhere."""
    try:
        with desk.taps.run_pass(4, step=2):
            for _ in range(3 if desk.stage == 0 else 4):
                with desk.taps.capture():
                    desk.policy(torch.ones(2, 4, dtype=torch.int64), torch.ones(4, 2, worker.WIDTH))
                desk.taps.get_captured_states()
            raise RuntimeError("out of memory")
    except (RuntimeError, PassAborted, PeerLostError) as error:
        return f"{type(error).__name__}: {error}"


def test_the_step_after_a_failed_one_works(pipeline: Ranks) -> None:
    """Catches: a channel, or a mask row, that an exception in one stage leaves out of step."""
    pipeline.each(worker.register, IDS, MAX_ROWS)
    pipeline.each(worker.train, SHAPES, 1)
    said = pipeline.each(fail_in_a_pass)
    assert said[0] == "RuntimeError: out of memory"
    assert said[2].startswith("PassAborted")
    assert "out of memory" in said[2]
    facts = pipeline.each(worker.train, SHAPES, 3)[-1]
    assert_captured(facts, worker.whole(pipeline, 1, False), IDS)


def test_tensor_ranks_bring_whole_rows(tmp_path: Path) -> None:
    """Catches: a draft that sees a shard of the sequence, or its rows in another order."""
    shapes = ((8, 2), (16, 1), (4, 3), (12, 2))
    with Children(limit=110) as children:
        ranks = Ranks(children, tmp_path, stages=2, tp=2)
        for sharded in (False, True):
            ranks.each(worker.set_up, LAYERS, sharded)
            ranks.each(worker.register, (1, 2), MAX_ROWS)
            facts = ranks.each(worker.train, shapes, 1)
            seen = worker.whole(ranks, 2, sharded)
            assert facts[:2] == [[], []]
            for drafts in facts[2:]:
                assert_captured(drafts, seen, (1, 2))
            ranks.each(close)
        ranks.dismiss()
