"""Declarations: every tensor has one, and a fresh model depends on them and the seed alone."""

import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn import param as param_module
from moejax.nn.linear import Linear
from moejax.nn.param import ParamSpec, initialize, iter_params, num_params, specs
from moejax.sharding.mesh import make_mesh
from moejax.sharding.rules import shardings
from tests.examples import slow_but

AXES = {"vocab", "embed", "heads", "kv_heads", "head_dim", "mlp", "expert", "expert_mlp", None}

VARIANTS = {
    "plain": {},
    "dense layer, biases, tied": {
        "moe_layers": (True, False), "qkv_bias": True, "attention_out_bias": True,
        "tie_word_embeddings": True,
    },
    "shared expert, projection norm": {
        "shared_expert_intermediate_size": 12, "qk_norm": "projection", "num_kv_heads": 4,
    },
    "no norm, bfloat16": {"qk_norm": "none", "dtype": "bfloat16"},
}  # fmt: skip


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_every_parameter_matches_its_declaration(tiny_config, changes):
    config = tiny_config.replace(**changes)
    abstract, model = Decoder(config), Decoder(config, seed=0)
    declared = specs(model)
    assert declared == specs(abstract) and len(declared) > 10
    for (name, param), (_, empty) in zip(iter_params(model), iter_params(abstract), strict=True):
        spec = declared[name]
        assert isinstance(spec, ParamSpec), name
        assert isinstance(empty.get_value(), jax.ShapeDtypeStruct), "an abstract model holds no array"
        value = param[...]
        assert value.shape == spec.shape == empty.get_value().shape, name
        assert value.dtype == spec.dtype == jnp.dtype(config.dtype), name
        assert len(spec.axes) == len(spec.shape) and set(spec.axes) <= AXES, name
        named = [axis for axis in spec.axes if axis is not None]
        assert len(set(named)) == len(named), f"{name}: one mesh axis cannot shard two dimensions"
    # Nothing that is a variable escapes the declarations.
    assert len(jax.tree.leaves(nnx.state(model))) == len(declared)
    assert num_params(abstract) == sum(x.size for x in jax.tree.leaves(nnx.state(model)))


def test_initial_values_follow_the_declaration(tiny_config):
    config = tiny_config.replace(qkv_bias=True, initializer_range=0.05)
    for name, param in iter_params(Decoder(config, seed=3)):
        value = np.asarray(param[...])
        if name.endswith("bias"):
            assert not value.any(), name
        elif name.endswith("scale"):
            assert (value == 1).all(), name
        else:
            # The standard deviation of n draws is off by 1/sqrt(2n) of itself; five of those.
            assert value.std() == pytest.approx(0.05, rel=5 / np.sqrt(2 * value.size)), name


def test_seed_decides_every_value(tiny_config):
    first, again, other = (dict(iter_params(Decoder(tiny_config, seed=s))) for s in (0, 0, 1))
    for name, param in first.items():
        np.testing.assert_array_equal(param[...], again[name][...])
        if not name.endswith("scale"):
            assert not np.array_equal(param[...], other[name][...]), name
    values = [np.asarray(p[...]).tobytes() for n, p in first.items() if not n.endswith("scale")]
    assert len(set(values)) == len(values), "tensors of equal shape are drawn apart"


def test_values_do_not_depend_on_the_other_parameters():
    """Order of construction and neighbours change nothing: a value follows from seed and path."""

    class Forward(nnx.Module):
        def __init__(self):
            self.a = Linear((4, 6), ("embed", "mlp"), jnp.float32)
            self.b = Linear((6, 4), ("mlp", "embed"), jnp.float32)

    class Backward(nnx.Module):
        def __init__(self):
            self.b = Linear((6, 4), ("mlp", "embed"), jnp.float32)
            self.extra = Linear((3, 3), ("embed", "mlp"), jnp.float32)
            self.a = Linear((4, 6), ("embed", "mlp"), jnp.float32)

    forward, backward = Forward(), Backward()
    initialize(forward, 5)
    initialize(backward, 5)
    np.testing.assert_array_equal(forward.a.kernel[...], backward.a.kernel[...])
    np.testing.assert_array_equal(forward.b.kernel[...], backward.b.kernel[...])


def test_a_declaration_names_every_axis():
    with pytest.raises(AssertionError):
        ParamSpec((2, 3), ("embed",), jnp.float32)


# --- on a mesh ------------------------------------------------------------------------------------

MESHES = {
    "tp8": (ParallelConfig(tp=8), "edf"),
    "ep4_tp2": (ParallelConfig(ep=4, tp=2), "efd"),
    "dp_attention_ep8": (ParallelConfig(ep=8, attention="data"), "edf"),
    "two_nodes_ep8": (ParallelConfig(ep=8, nodes=2), "efd"),
}


@pytest.mark.multidevice
@pytest.mark.parametrize(
    "name, dtype",
    slow_but(
        [("ep4_tp2", "float32"), ("dp_attention_ep8", "float32")],
        [(name, dtype) for name in MESHES for dtype in ("float32", "bfloat16")],
    ),
)
def test_values_do_not_depend_on_the_mesh(tiny_config, name, dtype):
    """Bit for bit what one device draws, uncompiled: scale times a normal variable, rounded."""
    parallel, layout = MESHES[name]
    config = tiny_config.replace(
        num_layers=1, moe_layers=(True,), sliding_windows=(None,), num_heads=8, dtype=dtype
    )
    model = Decoder(config, moe=MoeConfig(expert_layout=layout))
    plan = make_mesh(parallel, config.num_kv_heads)
    placed = shardings(specs(model), plan.stages[0], plan.axes)
    initialize(model, 3, placed)
    for name, param in iter_params(model):
        spec = param.get_metadata("spec")
        assert param[...].sharding == placed[name] and param[...].dtype == jnp.dtype(dtype), name
        expected = jnp.ones(spec.shape, dtype)
        if spec.init == "normal":
            key = jax.random.fold_in(jax.random.key(3), zlib.crc32(name.encode()))
            expected = (spec.scale * jax.random.normal(key, spec.canonical_shape)).astype(dtype)
            expected = expected.swapaxes(-1, -2) if spec.transposed else expected
        np.testing.assert_array_equal(np.asarray(param[...]), np.asarray(expected), err_msg=name)


SLOTS = (7, 6, 5, 4, 3, 2, 1, 0, 3, 3, 1, 3, 3, 0, 3, 3)


@pytest.mark.multidevice
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("replicas", [False, True])
def test_no_device_draws_more_than_its_part(transposed, replicas):
    """Compiled memory in shards: counters, bits and values of a few, where a whole tensor is eight."""
    mesh = make_mesh(ParallelConfig(ep=4, tp=2), 8).stages[0]
    shape, names = (16, 64, 128), ("expert", "embed", "expert_mlp")
    parts = PartitionSpec("ep", None, "tp")
    if transposed:
        shape, names, parts = (16, 128, 64), ("expert", "expert_mlp", "embed"), PartitionSpec("ep", "tp")
    spec = ParamSpec(shape, names, jnp.dtype(jnp.float32), transposed=transposed)
    sharding, slots = NamedSharding(mesh, parts), SLOTS if replicas else None

    def draw(path):
        return param_module._initial_value(spec, 0, path, slots, sharding)

    compiled = jax.jit(draw, out_shardings=sharding).lower(np.uint32(5)).compile()
    shard = 16 * 64 * 128 * 4 // 8
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes == shard
    assert memory.temp_size_in_bytes <= 4 * shard + 4096
    expected = param_module._initial_value(spec, 0, np.uint32(5), slots)
    np.testing.assert_array_equal(np.asarray(compiled(np.uint32(5))), np.asarray(expected))


@pytest.mark.multidevice
@pytest.mark.parametrize("layout", ["edf", "efd"])
def test_slots_with_the_same_expert_get_the_same_values(tiny_config, layout):
    config = tiny_config.replace(num_layers=1, moe_layers=(True,), sliding_windows=(None,), num_heads=8)
    moe = MoeConfig(expert_layout=layout)
    plain = dict(iter_params(Decoder(config, moe=moe, seed=2)))
    parallel = ParallelConfig(ep=4, tp=2, redundant_experts=8)
    plan = make_mesh(parallel, config.num_kv_heads)
    model = Decoder(config, moe=moe, parallel=parallel, axes=plan.axes)
    expert_of = {name: SLOTS for name in specs(model) if ".experts." in name}
    assert len(expert_of) == 3
    for placed in (None, shardings(specs(model), plan.stages[0], plan.axes)):
        initialize(model, 2, placed, expert_of=expert_of)
        for name, param in iter_params(model):
            value = np.asarray(plain[name][...])
            value = value[list(SLOTS)] if name in expert_of else value
            np.testing.assert_array_equal(np.asarray(param[...]), value, err_msg=name)


@pytest.mark.parametrize("slots", [(0, 1, 2), (0, 1, 1, 3), (-1, 0, 1, 2), ()])
def test_slots_that_leave_an_expert_out(slots):
    class Stack(nnx.Module):
        def __init__(self):
            self.kernel = param_module.declare(ParamSpec((4, 2, 2), ("expert", "embed", "mlp"), jnp.float32))

    with pytest.raises(ConfigError, match=r"expert_of\['kernel'\] must name an expert for each of 4 slots"):
        initialize(Stack(), 0, expert_of={"kernel": slots})
