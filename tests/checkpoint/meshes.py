"""Small models of every family whose dimensions divide by eight, and the ways to spread them."""

from collections.abc import Callable, Mapping

import jax
import numpy as np
from jax.sharding import Sharding

from moejax.core.config import ModelConfig
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, iter_params
from moejax.sharding.mesh import make_mesh
from moejax.sharding.rules import shardings
from tests.model_shapes import SINKS, TWO_LAYERS

PRESETS = {
    "tp8": ParallelConfig(tp=8),
    "ep8": ParallelConfig(ep=8),
    "ep4_tp2": ParallelConfig(ep=4, tp=2),
    "dp_attention_ep8": ParallelConfig(ep=8, attention="data"),
    "two_nodes_ep8": ParallelConfig(ep=8, nodes=2),
}

_BASE = TWO_LAYERS.replace(num_heads=8, head_dim=4, intermediate_size=16)

FAMILIES = {
    "qwen3_moe": _BASE,
    "mixtral": _BASE.replace(family="mixtral", num_kv_heads=8, qk_norm="none"),
    "olmoe": _BASE.replace(family="olmoe", num_kv_heads=8, num_experts=16, qk_norm="projection"),
    "qwen2_moe": _BASE.replace(
        family="qwen2_moe", num_experts=16, qk_norm="none", qkv_bias=True, shared_expert_intermediate_size=24,
        moe_layers=(False, True),
    ),
    "gpt_oss": _BASE.replace(**SINKS, num_experts=16),
}  # fmt: skip

Placement = Callable[[Mapping[str, ParamSpec]], Mapping[str, Sharding]]


def placement(parallel: ParallelConfig, config: ModelConfig) -> Placement:
    """What `load_pretrained` takes as `shardings`."""
    plan = make_mesh(parallel, config.num_kv_heads)
    return lambda declared: shardings(declared, plan.stages[0], plan.axes)


def values_of(model: Decoder) -> dict[str, np.ndarray]:
    return {name: np.asarray(param[...]) for name, param in iter_params(model)}


def spread(model: Decoder, placed: Mapping[str, Sharding]) -> None:
    """Moves a model's weights onto a mesh, in place."""
    for name, param in iter_params(model):
        param.set_value(jax.device_put(param[...], placed[name]))


def assert_placed(model: Decoder, placed: Mapping[str, Sharding], expected: Mapping[str, np.ndarray]) -> None:
    """Every parameter lies where it should and has these values, bit for bit."""
    found = dict(iter_params(model))
    assert found.keys() == expected.keys()
    for name, param in found.items():
        assert param[...].sharding == placed[name] and param[...].dtype == expected[name].dtype, name
        for shard in param[...].addressable_shards:
            part = expected[name][shard.index]
            np.testing.assert_array_equal(np.asarray(shard.data), part, err_msg=name)


REPLICAS = (
    (0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 0, 7, 6, 6, 5, 0),
    (7, 6, 5, 4, 3, 2, 1, 0, 3, 3, 3, 3, 3, 3, 3, 3),
)
"""For each layer, which of eight experts each of sixteen slots holds."""


def replicated(parallel: ParallelConfig) -> Callable[[ModelConfig], Decoder]:
    """Builds an abstract model whose layers have sixteen slots."""
    plan = ParallelConfig(**(vars(parallel) | {"redundant_experts": 8}))
    return lambda config: Decoder(config, parallel=plan, axes=make_mesh(plan, config.num_kv_heads).axes)


def slots_by_path(model: Decoder) -> dict[str, tuple[int, ...]]:
    """`expert_of` for `REPLICAS`."""
    experts = [name for name, _ in iter_params(model) if ".experts." in name]
    return {name: REPLICAS[int(name.split(".")[1])] for name in experts}
