"""Which implementation runs is decided by name or with a reason, never by trying."""

import numpy as np
import pytest

from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.ops.dispatch import block_rows_for, choose_expert_layout, choose_grouped_matmul


@pytest.mark.parametrize("platform, expected", [("cpu", "blocks_mixed"), ("gpu", "ragged_dot")])
def test_auto_chooses_by_platform_and_says_why(platform, expected):
    choice = choose_grouped_matmul("auto", platform)
    assert choice.value == expected and platform in choice.reason.lower()


def test_blocks_of_a_fixed_height_are_the_loops():
    choice = choose_grouped_matmul("auto", "cpu", 4)
    assert choice.value == "blocks_uniform" and "4 rows" in choice.reason
    assert choose_grouped_matmul("auto", "gpu", 4).value == "ragged_dot"


@pytest.mark.parametrize("asked", ["blocks_mixed", "blocks_uniform", "ragged_dot"])
@pytest.mark.parametrize("platform", ["cpu", "gpu"])
def test_what_is_asked_for_is_taken(asked, platform):
    assert choose_grouped_matmul(asked, platform)[1:] == (asked, "asked for")


def test_experts_run_on_what_the_rest_does():
    assert choose_grouped_matmul("auto", "gpu", kernels="pallas_triton").value == "pallas_triton"


@pytest.mark.parametrize("choose", [choose_grouped_matmul, choose_expert_layout])
def test_an_unknown_name_is_an_error(choose):
    with pytest.raises(ConfigError, match=r"'rag'.*known: auto"):
        choose("rag", "cpu")


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"execution": "group"}, "did you mean 'grouped'"),
        ({"overflow": "droop"}, "did you mean 'drop'"),
        ({"grouped_matmul": "ragged"}, "ragged_dot"),
        ({"expert_layout": "fed"}, "engine.moe.expert_layout"),
        ({"capacity_factor": 0.0}, "capacity_factor"),
        ({"block_rows": 0}, "block_rows"),
        ({"block_rows": 2.5}, "block_rows"),
        ({"block_rows": 4, "grouped_matmul": "blocks_mixed"}, "one or the other"),
    ],
)
def test_bad_execution_fields_are_named(fields, named):
    with pytest.raises(ConfigError, match=named):
        MoeConfig(**fields)


@pytest.mark.parametrize("transposed", [False, True])
def test_blocks_grow_with_the_rows_an_expert_gets(transposed):
    heights = [block_rows_for(n, 32, transposed) for n in range(1, 4096)]
    assert heights[0] == 1 and heights[-1] == 64
    assert (np.diff(heights) >= 0).all() and set(heights) <= {1, 2, 4, 8, 16, 32, 64}
