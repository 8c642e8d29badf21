"""Declarations: every tensor has one, and a fresh model depends on them and the seed alone."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.models.decoder import Decoder
from moejax.nn.linear import Linear
from moejax.nn.param import ParamSpec, initialize, iter_params, num_params, specs

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
