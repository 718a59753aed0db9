"""Each error class has its cause and remedy on a page, and a test in which it happens."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tapchannel import _native, errors
from tapchannel.errors import DeviceError, TapChannelError
from tapchannel.faults import RULES

TESTS = Path(__file__).parents[1]
PAGE = (TESTS.parent / "docs" / "errors.md").read_text()
KINDS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, TapChannelError)
}
NEVER_ITSELF = {"TapChannelError", "TapTimeout"}  # only their subclasses are raised
PROVOKING = {"raises", "refused"}


def sections() -> dict[str, str]:
    """Split the page by its headings."""
    parts = re.split(r"^#{2,3} (\w+)$", PAGE, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def provoked(path: Path) -> set[str]:
    """Name the classes that a test expects to be raised."""
    found: set[str] = set()
    for call in ast.walk(ast.parse(path.read_text())):
        if not isinstance(call, ast.Call):
            continue
        called = getattr(call.func, "attr", getattr(call.func, "id", ""))
        if called not in PROVOKING:
            continue
        for argument in call.args:
            for node in ast.walk(argument):
                found.add(getattr(node, "attr", getattr(node, "id", "")))
    return found & set(KINDS)


def test_the_page_has_a_section_for_each_class() -> None:
    """Bug: an error that a user looks up in vain, or one that is no more."""
    assert set(sections()) == set(KINDS) - {"TapChannelError"}
    for name, text in sections().items():
        assert "**Cause.**" in text, name
        assert "**Remedy.**" in text, name


def test_sections_are_nested_as_the_classes_are() -> None:
    """Bug: a subclass that stands among its parents."""
    for name in sections():
        depth = KINDS[name].__mro__.index(TapChannelError)
        assert re.search(rf"^#{{{1 + depth}}} {name}$", PAGE, re.MULTILINE), name


@pytest.mark.parametrize("fault", RULES)
def test_the_page_says_what_the_text_says(fault: str) -> None:
    """Bug: a text that a user searches the page for in vain."""
    kind, what, _, _ = RULES[fault]
    assert f"*{what}*" in " ".join(sections()[kind.__name__].split())


def test_each_class_happens_in_a_test() -> None:
    """Bug: an error that is never raised, or whose raising nobody has ever seen."""
    files = [path for path in TESTS.rglob("test_*.py") if path.name != "test_errors.py"]
    seen = set().union(*map(provoked, files))
    assert set(KINDS) - seen == NEVER_ITSELF - seen


def test_a_device_that_does_not_exist_is_a_device_error() -> None:
    """Bug: a driver's refusal, or its absence, that is no error of ours."""
    with pytest.raises(DeviceError) as caught:
        _native.Arena.create_vmm(4095, 4096)
    error = caught.value
    assert error.code
    assert error.name in str(error)
    assert str(error.code) in str(error)
    assert error.meaning in str(error)
