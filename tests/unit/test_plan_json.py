"""The tap plan's JSON, which a peer may have written (I8)."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tapchannel.errors import ConfigError
from tapchannel.plan import TapPlan

from .plan_examples import example, plans


def places(value: object, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    """List the path of every value inside a JSON document, the document itself first."""
    items = (
        value.items()
        if isinstance(value, dict)
        else enumerate(value if isinstance(value, list) else [])
    )
    return [path, *(place for key, item in items for place in places(item, (*path, key)))]


json_values = st.recursive(
    st.none() | st.booleans() | st.floats() | st.integers() | st.text(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@given(plans(), st.data())
def test_a_document_with_one_value_altered_is_refused_or_another_plan(
    plan: TapPlan, data: st.DataObject
) -> None:
    """Bug: a peer's field used before it is checked (I8): a crash of any other type, or a twin."""
    document = json.loads(plan.to_json())
    *parents, last = [None, *data.draw(st.sampled_from(places(document)))]
    altered = data.draw(json_values)
    if last is None:
        document = altered
    else:
        target = document
        for step in parents[1:]:
            target = target[step]
        target[last] = altered
    try:
        other = TapPlan.from_json(json.dumps(document))
    except ConfigError:
        return
    assert json.loads(other.to_json()) == document


@given(plans(), st.data())
def test_a_field_missing_or_extra_is_refused(plan: TapPlan, data: st.DataObject) -> None:
    """Bug: a field with a silent default, or one that is ignored: two readings of one text."""
    document = json.loads(plan.to_json())
    tap = document["groups"][0]["taps"][0]
    target = data.draw(st.sampled_from([document, document["groups"][0], tap]))
    if data.draw(st.booleans()):
        target.pop(data.draw(st.sampled_from(sorted(target))))
    else:
        target["extra"] = 1
    with pytest.raises(ConfigError, match="other fields"):
        TapPlan.from_json(json.dumps(document))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "[" * 10**5,
        '{"version":' + "9" * 5000 + "}",
        '{"a":1,"a":1}',
        "NaN",
        "\ud800",
        example().to_json()[:-1],
        example().to_json() + "x",
        example().to_json().replace('"version":1', '"version":2'),
        example().to_json().replace('"version":1', '"version":true'),
        example().to_json().replace('"version":1', '"version":1.0'),
        example().to_json().replace('"version":1', '"version":1,"version":1'),
        example().to_json().replace("layer17", "layer1"),
        example().to_json().replace("layer17", "layer\\u001b"),
        example().to_json().replace("bfloat16", "float31"),
        example().to_json().replace("4096", str(1 << 62)),
        example().to_json().replace("8192", "-1"),
        example().to_json().replace("8192", "0"),
        example().to_json() + " " * (16 << 20),
        example(groups={"a": ["x"], "b": ["y"]}).to_json().replace('"b"', '"a"'),
        b"{}",
        None,
    ],
    ids=lambda text: repr(text)[-24:],
)
def test_text_that_is_no_plan_is_refused(text: str) -> None:
    """Bug: a peer's text that crashes the reader, fills its memory, or is read in part."""
    with pytest.raises(ConfigError) as refusal:
        TapPlan.from_json(text)
    assert len(str(refusal.value)) < 2000
