"""Every invariant's tests name the mutations that they were seen to fail under, and these exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from support.mutations import MUTATIONS, TEST_FILES, Mutation

ROOT = Path(__file__).parents[2]


def named_mutations() -> dict[str, set[str]]:
    """Return, by test, the mutations that its docstring names."""
    named: dict[str, set[str]] = {}
    for file in TEST_FILES:
        for node in ast.walk(ast.parse((ROOT / file).read_text())):
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                said = re.search(r"Mutations?: ([a-z, -]+)\.", ast.get_docstring(node) or "")
                named[f"{file}::{node.name}"] = set(said[1].split(", ")) if said else set()
    return named


def test_tests_and_mutations_name_each_other() -> None:
    """Bug: a test that claims a mutation which is never run against it, or one nobody claims."""
    named = named_mutations()
    claimed = {(name, test) for test, names in named.items() for name in names}
    listed = {(mutation.name, test) for mutation in MUTATIONS for test in mutation.tests}
    assert claimed == listed


def test_names_are_unique_and_every_invariant_has_one_without_a_gpu() -> None:
    """Bug: an invariant that is broken on purpose only on machines that nobody has."""
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS)
    here = {mutation.invariant for mutation in MUTATIONS if not mutation.needs}
    assert here == {f"I{number}" for number in range(1, 10)}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_is_in_the_code_once(mutation: Mutation) -> None:
    """Bug: a mutation that a refactoring has left behind, so that `make mutants` proves less."""
    for edit in mutation.edits:
        assert (ROOT / edit.file).read_text().count(edit.old) == 1, edit.file
        assert edit.old != edit.new
