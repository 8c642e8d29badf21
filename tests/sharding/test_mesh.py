"""Meshes and rules: which device is where, and what each of them holds."""

from typing import Any

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import ParamSpec, specs
from moejax.sharding.axes import SINGLE, Axes, all_gather, all_to_all, index, pmax, psum, reduce_scatter
from moejax.sharding.mesh import make_axes, make_mesh
from moejax.sharding.rules import make_rules, partition, shardings
from tests.engine.mesh_models import FAMILIES


def axes_of(kv: int, **fields: Any) -> Axes:
    return make_axes(ParallelConfig(**fields), kv)


def test_devices_are_numbered_tp_fastest_and_stages_slowest() -> None:
    plan = make_mesh(ParallelConfig(pp=2, ep=2, tp=2, attention="data"), 2)
    ids = [np.vectorize(lambda d: d.id)(mesh.devices).reshape(2, 2).tolist() for mesh in plan.stages]
    assert ids == [[[0, 1], [2, 3]], [[4, 5], [6, 7]]]
    assert plan.axes.expert == ("ep",) and plan.axes.tp == plan.axes.tensor == ("tp",)
    assert plan.axes.data == plan.axes.exchange == ("ep",)


def test_with_tensor_attention_heads_are_split_over_the_experts_devices_too() -> None:
    axes = axes_of(8, ep=4, tp=2)
    assert axes.tensor == axes.kv == ("ep", "tp") and axes.expert == ("ep",) and axes.tp == ("tp",)
    assert axes.data == axes.exchange == ()


@pytest.mark.parametrize(
    ("kv", "fields", "names"),
    [
        (4, {"tp": 8}, ("tp",)),
        (2, {"ep": 4, "tp": 2}, ("ep",)),
        (4, {"ep": 4, "tp": 2}, ("ep",)),
        (4, {"ep": 8, "nodes": 2}, ("node", "ep")),
        (1, {"tp": 8}, ()),
    ],
)
def test_fewer_key_value_heads_than_devices_are_copied(
    kv: int, fields: dict[str, Any], names: tuple[str, ...]
) -> None:
    axes = axes_of(kv, **fields)
    assert axes.kv == names == axes.tensor[: len(names)] and axes.size(axes.kv) == kv
    assert axes.size(axes.tensor) == ParallelConfig(**fields).tensor_size


def test_the_expert_axis_is_cut_in_node_and_local() -> None:
    axes = axes_of(2, ep=8, nodes=2, attention="data")
    assert (axes.node, axes.local, axes.expert) == (("node",), ("ep",), ("node", "ep"))
    assert axes.size(axes.node) == 2 and axes.size(axes.local) == 4
    within = axes_of(2, dp=2, ep=4, nodes=2, attention="data")
    assert within.node == () and within.data == ("dp", "ep")


def test_heads_that_fit_no_axis_are_refused() -> None:
    with pytest.raises(ConfigError, match="num_key_value_heads 4 cannot be split over 12 devices"):
        axes_of(4, ep=3, tp=4, nodes=3)


def test_too_few_devices() -> None:
    with pytest.raises(ConfigError, match="9 devices are needed and 8 are there"):
        make_mesh(ParallelConfig(ep=9), 2)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "fields", [{"tp": 8}, {"ep": 8}, {"ep": 4, "tp": 2}, {"ep": 8, "attention": "data"}, {"dp": 2, "tp": 4}]
)
def test_every_tensor_has_a_place(family: str, fields: dict[str, Any]) -> None:
    config = FAMILIES[family]
    parallel = ParallelConfig(**fields)
    plan = make_mesh(parallel, config.num_kv_heads)
    declared = specs(Decoder(config, parallel=parallel, axes=plan.axes))
    placed = shardings(declared, plan.stages[0], plan.axes)
    assert placed.keys() == declared.keys()
    for name, spec in declared.items():
        shard = placed[name].shard_shape(spec.shape)
        if ".experts." in name:
            # Biases of what tp leaves a part of the sum of are whole on each device.
            parts = fields.get("ep", 1) * (1 if name.endswith("down_bias") else fields.get("tp", 1))
            assert np.prod(spec.shape) == np.prod(shard) * parts
        of_heads = any(part in name for part in ("q_norm", "k_norm", "attention.norm"))
        if name.endswith(("router.kernel", "norm.scale")) and not of_heads:
            assert shard == spec.shape


def test_two_dimensions_over_one_axis_collide() -> None:
    axes = axes_of(8, tp=8)
    with pytest.raises(ConfigError, match="w: the axes 'heads' and 'mlp' are both split over mesh axis 'tp'"):
        partition("w", ParamSpec((8, 8), ("heads", "mlp"), np.float32), make_rules(axes), axes)


def test_a_dimension_that_does_not_divide() -> None:
    axes = axes_of(8, tp=8)
    with pytest.raises(ConfigError, match=r"w: axis 'mlp' of 12 does not divide over 8 devices \(tp\)"):
        partition("w", ParamSpec((4, 12), ("embed", "mlp"), np.float32), make_rules(axes), axes)
    spec = partition("w", ParamSpec((4, 16), ("embed", "mlp"), np.float32), make_rules(axes), axes)
    assert spec == PartitionSpec(None, ("tp",))


def test_without_axes_nothing_is_done() -> None:
    x = jax.numpy.arange(6.0)
    assert SINGLE.exchange == SINGLE.expert == () and SINGLE.size(()) == 1
    for same in (psum(x, ()), all_gather(x, ()), reduce_scatter(x, ()), all_to_all(x, ()), pmax(x, ())):
        assert same is x
    assert int(index(())) == 0
