"""Names that are nearly right are recognised; every user error is a `MoejaxError` of one line."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.core import errors
from moejax.core.errors import MoejaxError, did_you_mean, unknown

NAMES = ("float32", "bfloat16", "float16")


@pytest.mark.parametrize(
    ("name", "near"),
    [("flaot32", "float32"), ("bfloat", "bfloat16"), ("float3", "float32"), ("Float16", "float16")],
)
def test_the_nearest_name(name: str, near: str) -> None:
    assert did_you_mean(name, NAMES) == f"; did you mean {near!r}?"


@pytest.mark.parametrize("name", ["", "xyz", "q", "coat"])
def test_nothing_is_near(name: str) -> None:
    assert did_you_mean(name, NAMES) == ""


def test_unknown_names_all_that_is_known_in_order() -> None:
    assert unknown("dtype", "flaot32", iter(NAMES)) == (
        "unknown dtype 'flaot32'; did you mean 'float32'? (known: bfloat16, float16, float32)"
    )
    assert unknown("model", "x", []) == "unknown model 'x' (known: none)"


@settings(derandomize=True, database=None)
@given(st.text(max_size=12), st.lists(st.text(max_size=8).filter(str.isprintable), max_size=5))
def test_any_name_gives_one_line(name: str, known: list[str]) -> None:
    text = unknown("thing", name, known)
    assert "\n" not in text and repr(name) in text
    if name in known:
        assert f"did you mean {name!r}?" in text or not name


def test_every_error_is_a_moejax_error_and_a_builtin_one() -> None:
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type) and kind is not MoejaxError]
    assert len(kinds) >= 6
    for kind in kinds:
        if kind.__module__ == errors.__name__:
            assert issubclass(kind, MoejaxError)
            assert issubclass(kind, (ValueError, RuntimeError, OSError))
            assert str(kind("a line")) == "a line"
