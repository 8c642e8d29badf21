"""Degrees of parallelism: what fits together, and errors that name the numbers."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from moejax.core.errors import ConfigError
from moejax.core.parallel import PRESETS, ParallelConfig, check_parallel
from tests.engine.mesh_models import BASE, FAMILIES


def refusal(**fields: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        ParallelConfig(**fields)
    return str(caught.value)


@pytest.mark.parametrize("name", ["dp", "pp", "ep", "tp", "nodes", "microbatches"])
@pytest.mark.parametrize("value", [0, -1, 1.0, "2", True])
def test_degrees_are_positive_integers(name: str, value: Any) -> None:
    assert refusal(**{name: value}) == f"parallel.{name} must be an integer of at least 1, got {value!r}"


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"attention": "head"}, "parallel.attention: unknown value 'head'"),
        ({"exchange": "alltoall"}, "did you mean 'all_to_all'?"),
        ({"exchange_capacity": 0.0}, "parallel.exchange_capacity must be a positive number, got 0.0"),
        ({"redundant_experts": -1}, "parallel.redundant_experts must be an integer of at least 0, got -1"),
        ({"redundant_experts": True}, "redundant_experts must be an integer of at least 0, got True"),
        ({"overlap_shared": 1}, "parallel.overlap_shared must be True or False, got 1"),
        ({"dispatch_microbatches": 3}, "parallel.dispatch_microbatches must be 1 or 2, got 3"),
        ({"pp": 2, "stage_layers": [4]}, "parallel.stage_layers must name pp=2 numbers of layers, got [4]"),
        ({"pp": 2, "stage_layers": [4, 0]}, "parallel.stage_layers[1] must be an integer of at least 1"),
        ({"ep": 6, "nodes": 4}, "parallel.nodes=4 does not divide the dp·pp·ep·tp = 1·1·6·1 = 6 devices"),
        ({"tp": 8, "nodes": 2}, "parallel.tp=8 does not fit into nodes of 4 devices evenly"),
        ({"dp": 3, "ep": 4, "nodes": 2}, "ep·tp=4 devices are neither whole nodes nor an even part of"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(fields: dict[str, Any], says: str) -> None:
    assert says in refusal(**fields)


def test_sizes() -> None:
    tensor = ParallelConfig(dp=2, pp=2, ep=4, tp=2, nodes=4)
    assert (tensor.num_devices, tensor.tensor_size, tensor.data_groups, tensor.expert_nodes) == (32, 8, 2, 1)
    data = PRESETS["cluster_4x8"]
    assert (data.num_devices, data.tensor_size, data.data_groups, data.expert_nodes) == (32, 1, 32, 4)
    assert ParallelConfig().is_single and not ParallelConfig(redundant_experts=1).is_single
    assert [ParallelConfig(tp=8).kv_split(kv) for kv in (2, 4, 8, 16)] == [2, 4, 8, 8]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"tp": 3}, "num_attention_heads 8 % tp=3 = 2"),
        ({"tp": 3}, "num_key_value_heads 2 neither divides tp=3 nor is a multiple of it"),
        ({"ep": 3}, "num_experts 16 % ep=3 = 1"),
        ({"ep": 3}, "num_attention_heads 8 % ep·tp=3 (parallel.attention=tensor) = 2"),
        ({"ep": 3}, "with parallel.attention=data only tp=1 splits heads, vocabulary and hidden dimensions"),
        ({"ep": 8, "redundant_experts": 3}, "num_experts + parallel.redundant_experts 19 % ep=8 = 3"),
        ({"ep": 5, "attention": "data"}, "num_experts 16 % ep=5 = 1"),
        ({"pp": 4}, "num_hidden_layers 3 are fewer than pp=4"),
        ({"pp": 2, "stage_layers": [1, 1]}, "parallel.stage_layers [1, 1] add up to 2 of 3 layers"),
        ({"tp": 7}, "moe_intermediate_size 16 % tp=7 = 2"),
        ({"tp": 7}, "intermediate_size 48 % tp=7 = 6"),
        ({"tp": 16}, "16 devices are needed and 8 are there"),
        ({"tp": 4, "first_device": 5}, "4 devices after the first 5 are needed and 8 are there"),
        ({"tp": 16}, "XLA_FLAGS=--xla_force_host_platform_device_count=16"),
    ],
)
def test_a_model_that_cannot_be_spread_so(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_parallel(ParallelConfig(**fields), FAMILIES["qwen3_moe"], 8)
    text = str(caught.value)
    assert text.startswith("parallel: the model cannot be spread so: ") and says in text and "\n" not in text


def test_attention_by_data_needs_no_heads_to_divide() -> None:
    odd = BASE.replace(num_heads=3, num_kv_heads=3, vocab_size=97)
    check_parallel(ParallelConfig(ep=8, attention="data"), odd, 8)
    with pytest.raises(ConfigError, match="num_attention_heads 3"):
        check_parallel(ParallelConfig(ep=8), odd, 8)


def test_the_presets_are_those_of_the_command_line() -> None:
    folder = Path(__file__).resolve().parents[2] / "configs" / "parallel"
    written = {path.stem: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    assert written.pop("auto") == {"auto": 8}  # which is none of its own
    assert {name: ParallelConfig(**fields) for name, fields in written.items()} == PRESETS


def test_replicas_need_experts() -> None:
    dense = FAMILIES["llama"]
    check_parallel(ParallelConfig(ep=2), dense, 2)
    with pytest.raises(ConfigError, match="redundant_experts=2 of a model without experts"):
        check_parallel(ParallelConfig(ep=2, redundant_experts=2), dense, 2)


def test_a_layout_that_is_to_be_chosen_is_none_yet() -> None:
    with pytest.raises(ConfigError, match="choose_layout returns a layout"):
        check_parallel(ParallelConfig(auto=8), FAMILIES["qwen3_moe"], 8)
    with pytest.raises(
        ConfigError, match=r"parallel.auto=8 chooses the degrees: leave out dp, pp, ep and tp"
    ):
        ParallelConfig(auto=8, tp=2)
