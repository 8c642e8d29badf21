"""Fields are checked against their annotations: strict types, conditions, and what is stored."""

import dataclasses
import math
import pickle
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import pytest

from moejax.core.checked import (
    Checked,
    Must,
    Name,
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Seed,
    Share,
    check,
)
from moejax.core.errors import ConfigError, RequestError


@dataclass(frozen=True)
class Inner:
    pass


@dataclass(frozen=True)
class Section(Checked, section="part"):
    count: PositiveInt = 1
    least: NonNegativeInt = 0
    seed: Seed | None = None
    number: float = 1.0
    positive: PositiveNumber = 1.0
    weight: NonNegativeNumber = 0.0
    share: Share = 0.5
    flag: bool = True
    text: str = ""
    name: Name = "n"
    mode: Literal["fast", "slow"] = "fast"
    way: Literal[1, 2] = 1
    sizes: tuple[PositiveInt, ...] = ()
    modes: list[Literal["fast", "slow"]] = field(default_factory=list)
    either: PositiveInt | list[PositiveInt] = 1
    rising: Annotated[list[int], Must(lambda s: s == sorted(s), "a list that rises")] | None = None
    inner: Inner = field(default_factory=Inner)
    anything: Any = None


@dataclass(frozen=True)
class Request(Section, error=RequestError):
    extra: PositiveInt = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.extra > self.count:
            raise RequestError("extra exceeds count")


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        *(
            ({"count": v}, f"count must be an integer of at least 1, got {v!r}")
            for v in (0, "3", True, 1.0, None)
        ),
        ({"least": -1}, "least must be an integer of at least 0, got -1"),
        ({"seed": 2**32}, "seed must be an integer between 0 and 4294967295, got 4294967296"),
        *(({"number": v}, f"number must be a number, got {v!r}") for v in ("1", True, None, 1j)),
        *(
            ({"positive": v}, f"positive must be a positive number, got {v!r}")
            for v in (0, math.nan, math.inf)
        ),
        ({"weight": -0.5}, "weight must be a number of at least 0, got -0.5"),
        ({"share": 1.01}, "share must be a number in [0, 1], got 1.01"),
        *(({"flag": v}, f"flag must be True or False, got {v!r}") for v in (1, "true", None)),
        ({"text": 3}, "text must be a string, got 3"),
        ({"name": " "}, "name must be a string that is not empty, got ' '"),
        ({"mode": "fats"}, "mode: unknown value 'fats'; did you mean 'fast'? (known: fast, slow)"),
        ({"mode": None}, "mode: unknown value 'None' (known: fast, slow)"),
        *(({"way": v}, f"way must be 1 or 2, got {v!r}") for v in (3, True, "1")),
        ({"sizes": 3}, "sizes must be a list, each an integer of at least 1, got 3"),
        ({"sizes": "12"}, "sizes must be a list, each an integer of at least 1, got '12'"),
        ({"sizes": [1, 0]}, "sizes[1] must be an integer of at least 1, got 0"),
        (
            {"modes": ["fast", "slo"]},
            "modes[1]: unknown value 'slo'; did you mean 'slow'? (known: fast, slow)",
        ),
        (
            {"either": 0},
            "either must be an integer of at least 1 or a list, each an integer of at least 1, got 0",
        ),
        ({"either": [2, "2"]}, "either[1] must be an integer of at least 1, got '2'"),
        ({"rising": [2, 1]}, "rising must be a list that rises, got [2, 1]"),
        ({"rising": [1, 2.5]}, "rising[1] must be an integer, got 2.5"),
        ({"rising": 3}, "rising must be a list that rises, got 3"),
        ({"inner": {}}, "inner must be an Inner, got {}"),
    ],
)
def test_a_wrong_value_is_named_with_its_key(fields: dict[str, Any], says: str) -> None:
    for section, error in ((Section, ConfigError), (Request, RequestError)):
        with pytest.raises(error) as caught:
            section(**fields)
        assert str(caught.value) == f"part.{says}"


@pytest.mark.parametrize(
    ("fields", "stored"),
    [
        ({"count": np.int64(3)}, 3),
        ({"number": 2}, 2),
        ({"number": np.float32(0.5)}, 0.5),
        ({"number": math.inf}, math.inf),
        ({"text": Path("a/b")}, "a/b"),
        ({"sizes": [1, np.int32(2)]}, (1, 2)),
        ({"sizes": np.array([3, 4])}, (3, 4)),
        ({"modes": "slow"}, ["slow"]),
        ({"modes": ("slow", "fast")}, ["slow", "fast"]),
        ({"either": (1, 2)}, [1, 2]),
        ({"rising": None}, None),
        ({"seed": 7}, 7),
    ],
)
def test_a_value_is_stored_as_its_field_says(fields: dict[str, Any], stored: Any) -> None:
    [name] = fields
    value = getattr(Section(**fields), name)
    assert value == stored and type(value) is type(stored)
    if isinstance(stored, (list, tuple)):
        assert [type(item) for item in value] == [type(item) for item in stored]


def test_it_is_a_plain_frozen_dataclass() -> None:
    section = Section(count=2)
    assert [item.name for item in dataclasses.fields(section)][:2] == ["count", "least"]
    assert pickle.loads(pickle.dumps(section)) == section == dataclasses.replace(Section(), count=2)
    assert hash(Inner()) == hash(section.inner)
    with pytest.raises(dataclasses.FrozenInstanceError):
        section.count = 3  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"^part\.count must be"):
        dataclasses.replace(section, count=-1)


def test_a_subclass_checks_its_own_fields_too() -> None:
    with pytest.raises(RequestError, match=r"^part\.extra must be an integer of at least 1, got 0$"):
        Request(extra=0)
    with pytest.raises(RequestError, match=r"^extra exceeds count$"):
        Request(extra=2)


def test_check() -> None:
    check("key", 1, PositiveInt)
    with pytest.raises(ConfigError, match=r"^key must be a positive number, got 0$"):
        check("key", 0, PositiveNumber)
