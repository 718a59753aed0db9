"""One row of the first stage's embedding, on every stage: two stages of two tensor ranks."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from support.children import Children
from support.ranks import Ranks
from tapchannel.errors import ConfigError, PeerLostError, UsageError
from tapchannel.integrations.embedding_row import EmbeddingRow

WIDTH, VOCABULARY = 6, 10
MASK = 7  # on the second tensor rank, whose part begins at 5
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    """Start the four ranks once."""
    with Children(limit=110) as children:
        made = Ranks(children, tmp_path_factory.mktemp("group"), stages=2, tp=2)
        yield made
        made.dismiss()


def table(desk: SimpleNamespace) -> torch.nn.Module | None:
    """Make this rank's half of the vocabulary, as Megatron's parallel embedding holds it."""
    if desk.stage > 0:
        return None
    whole = torch.arange(VOCABULARY * WIDTH, dtype=torch.bfloat16).view(VOCABULARY, WIDTH)
    whole[MASK, 0] = -0.0
    half = torch.nn.Embedding.from_pretrained(whole[desk.tp_rank * 5 :][:5].clone(), freeze=False)
    half.vocab_start_index = desk.tp_rank * 5  # pyright: ignore[reportAttributeAccessIssue]
    return half


def make(desk: SimpleNamespace, token: int = MASK, timeout: float = 20.0) -> None:
    """Make the row's object on this rank."""
    desk.table = table(desk)
    groups = {"pp_group": desk.pp_group, "tp_group": desk.tp_group}
    desk.row = EmbeddingRow(desk.table, token, **groups, device="cpu", timeout=timeout)


def send_and_change(desk: SimpleNamespace, scale: float) -> None:
    """Begin a pass, and let the policy learn meanwhile."""
    desk.row.send()
    if desk.table is not None:
        with torch.no_grad():
            desk.table.weight.mul_(scale)


def read(desk: SimpleNamespace) -> torch.Tensor:
    """Give what this stage has."""
    desk.read = desk.row.read()
    return desk.read


def refusal(desk: SimpleNamespace, case: str) -> str:
    """Give the text with which the construction is refused."""
    own = table(desk)
    if case == "no stage":
        own = None
    if case == "two stages":
        own = torch.nn.Embedding(VOCABULARY, WIDTH)
    if case == "no table" and desk.rank == 0:
        own = torch.nn.Linear(3, 3)
        own.weight = torch.nn.Parameter(torch.zeros(3))
    token = {"outside": 10, "two tokens": desk.stage}.get(case, MASK)
    groups = {"pp_group": desk.pp_group, "tp_group": desk.tp_group}
    with pytest.raises(ConfigError) as caught:
        EmbeddingRow(own, token, **groups, device="cpu")
    return str(caught.value)


def test_every_stage_reads_the_row_as_it_was_when_the_pass_began(ranks: Ranks) -> None:
    """Catches: another rank's row, a summed one (-0.0), a stale one, one of the step after."""
    ranks.each(make)
    expected = torch.arange(MASK * WIDTH, MASK * WIDTH + WIDTH, dtype=torch.bfloat16)
    expected[0] = -0.0
    for scale in (2.0, 3.0):
        ranks.each(send_and_change, scale)
        rows = ranks.each(read)
        for row in rows:
            assert torch.equal(row.view(torch.int16), expected.view(torch.int16))
        expected = expected * scale


def kept(desk: SimpleNamespace) -> bool:
    """Say whether the row that was read before the last pass is as it was."""
    before = desk.read.clone()
    desk.row.send()
    desk.row.settle()
    return torch.equal(desk.read, before) and desk.row.read() is not desk.read


def test_a_row_that_was_read_is_never_written_again(ranks: Ranks) -> None:
    """Catches: a buffer used again while the draft's autograd still holds it."""
    ranks.each(make)
    ranks.each(send_and_change, 2.0)
    ranks.each(read)
    assert ranks.each(kept) == [True] * 4


@pytest.mark.parametrize(
    ("case", "text"),
    [
        ("no stage", "one stage of the pipeline must have the embedding — seen 0 of 2 stages"),
        ("two stages", "one stage of the pipeline must have the embedding — seen 2 of 2 stages"),
        ("no table", "embedding has no table — seen Linear"),
        ("outside", "token is not in the embedding — seen 10, expected 0 to 9"),
        ("two tokens", "stages name different tokens"),
    ],
)
def test_all_ranks_refuse_alike(ranks: Ranks, case: str, text: str) -> None:
    """Catches: one rank that raises while the others wait for it."""
    said = ranks.each(refusal, case)
    assert len(set(said)) == 1
    assert text in said[0]


def read_early(desk: SimpleNamespace) -> str:
    """Read before anything was sent."""
    make(desk)
    with pytest.raises(UsageError) as caught:
        desk.row.read()
    return str(caught.value)


def test_reading_before_a_pass_began_is_an_error(ranks: Ranks) -> None:
    """Catches: uninitialised memory handed to the draft."""
    assert all("was not sent yet" in text for text in ranks.each(read_early))


def wait_alone(desk: SimpleNamespace) -> str | None:
    """Begin a pass on the draft's stage alone."""
    make(desk, token=2, timeout=0.5)
    if desk.stage == 0:
        return None
    desk.row.send()
    with pytest.raises(PeerLostError) as caught:
        desk.row.read()
    return str(caught.value)


def test_a_row_that_does_not_come_is_an_error_in_time(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    """Catches: a wait without an end when the first stage did not begin the pass."""
    with Children(limit=60) as children:
        alone = Ranks(children, tmp_path_factory.mktemp("lost"), stages=2)
        first, second = alone.each(wait_alone)
        for worker in alone.workers:
            worker.child.kill()  # its group is beyond repair
    assert first is None
    assert "did not come from the first stage: producer rank 0 — limit 500 ms" in second
