"""Bytes per device by arithmetic, against arrays that lie on a mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cache.pool import block_bytes
from moejax.core.config import ModelConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import specs
from moejax.perf.memory import device_memory, largest, tensor_bytes
from moejax.sharding.mesh import make_mesh
from moejax.sharding.rules import shardings
from tests.model_shapes import LATENT, LINEAR, LLAMA, SINKS
from tests.perf.models import LAYOUTS, small_model

pytestmark = pytest.mark.multidevice

MODELS = {
    "shared expert, biases": small_model(),
    "norm over the projection": small_model(family="olmoe", qk_norm="projection", dtype="bfloat16"),
    "norm of heads, tied": small_model(family="qwen3_moe", qk_norm="head", tie_word_embeddings=True),
    "a padded vocabulary": small_model(vocab_size=99),
    "a padded vocabulary, tied": small_model(vocab_size=99, tie_word_embeddings=True),
    "latent": small_model(**LATENT),
    "linear attention": small_model(**LINEAR | {"linear_layers": (True, False, True)}),
    "dense, biases": small_model(**LLAMA | {"moe_layers": (False,) * 3}),
    "sinks and biases": small_model(**SINKS, shared_expert_intermediate_size=0),
    "one key head": small_model(num_kv_heads=1, shared_expert_intermediate_size=0),
}


def decoder(model: ModelConfig, parallel: ParallelConfig) -> Decoder:
    plan = make_mesh(parallel, model.num_kv_heads)
    return Decoder(model, parallel=parallel, axes=plan.axes)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", MODELS)
def test_weights_are_what_lies_on_each_device(name: str, layout: str) -> None:
    model, parallel = MODELS[name], LAYOUTS[layout]
    declared = specs(decoder(model, parallel))
    plan = make_mesh(parallel, model.num_kv_heads)
    held = {
        path: jax.device_put(np.zeros(declared[path].shape, declared[path].dtype), sharding)
        for path, sharding in shardings(declared, plan.stages[0], plan.axes).items()
    }
    for path, array in held.items():
        sizes = {shard.data.nbytes for shard in array.addressable_shards}
        assert sizes == {tensor_bytes(path, declared[path], model, parallel)}, path
    stages = [[0], [1, 2]] if parallel.pp == 2 else [[0, 1, 2]]
    found = device_memory(model, parallel, declared, num_blocks=0, block_size=16, stages=stages)
    on_device = sum(array.addressable_shards[0].data.nbytes for array in held.values())
    twice = model.tie_word_embeddings and parallel.pp > 1
    table = held["embedding.table"].addressable_shards[0].data.nbytes if twice else 0
    assert sum(stage.weights for stage in found) == on_device + table
    experts = [array for path, array in held.items() if ".experts." in path]
    assert sum(stage.expert_weights for stage in found) == sum(
        array.addressable_shards[0].data.nbytes for array in experts
    )


def test_redundant_experts_count_even_if_not_declared() -> None:
    model, parallel = small_model(), LAYOUTS["replicas"]
    whole = specs(Decoder(model))
    assert device_memory(model, parallel, whole, num_blocks=1, block_size=1) == device_memory(
        model, parallel, specs(decoder(model, parallel)), num_blocks=1, block_size=1
    )


@pytest.mark.parametrize(("layout", "heads"), [("single", 4), ("tp8", 1), ("dp_attention_ep4_tp2", 2)])
def test_cache(layout: str, heads: int) -> None:
    model, parallel = small_model(), LAYOUTS[layout]
    (found,) = device_memory(model, parallel, {}, num_blocks=5, block_size=16, dtype="float16")
    own = model.replace(num_kv_heads=heads, num_heads=heads)
    assert found.cache == 5 * block_bytes(own, 16, jnp.float16)
    assert (found.weights, found.total) == (0, found.cache)


def test_stages() -> None:
    """The embedding is in the first, norm and output in the last; layers where they belong."""
    model, parallel = small_model(), ParallelConfig(pp=2, ep=4)
    declared = specs(decoder(model, parallel))
    stages = [range(1), range(1, 3)]
    first, last = device_memory(model, parallel, declared, num_blocks=3, block_size=16, stages=stages)
    assert (first.layers, last.layers) == ((0,), (1, 2))
    assert last.cache == 2 * first.cache and last.expert_weights == first.expert_weights

    def total(*prefixes: str) -> int:
        names = [path for path in declared if path.startswith(prefixes)]
        return sum(tensor_bytes(path, declared[path], model, parallel) for path in names)

    assert first.weights == total("embedding", "layers.0.")
    assert last.weights == total("norm", "lm_head", "layers.1.", "layers.2.")
    assert largest([first, last]) == last


def test_misfits_are_errors() -> None:
    model = small_model()
    declared = specs(Decoder(model))
    odd = specs(Decoder(model.replace(intermediate_size=90)))
    with pytest.raises(ConfigError, match=r"layers.1.mlp.*: axis 'mlp' of 90 does not divide over 8"):
        device_memory(model, LAYOUTS["tp8"], odd, num_blocks=1, block_size=1)
    with pytest.raises(ConfigError, match="do not hold the 3 layers in order"):
        device_memory(model, ParallelConfig(pp=2), declared, num_blocks=1, block_size=1)
    with pytest.raises(ConfigError, match="do not hold the 3 layers in order"):
        device_memory(model, ParallelConfig(pp=2), declared, num_blocks=1, block_size=1, stages=[[0], [2]])


@pytest.mark.parametrize(("layout", "padded"), [("tp8", 104), ("dp_attention_ep4_tp2", 100), ("single", 99)])
def test_a_vocabulary_counts_with_its_padding(layout: str, padded: int) -> None:
    """Declared with it or without."""
    model, parallel = small_model(vocab_size=99), LAYOUTS[layout]
    own, other = (
        {path: spec for path, spec in specs(each).items() if "vocab" in spec.axes}
        for each in (decoder(model, parallel), Decoder(model))
    )
    per_device = padded // parallel.tensor_size * model.hidden_size * 4
    for declared in (own, other):
        found = {path: tensor_bytes(path, spec, model, parallel) for path, spec in declared.items()}
        assert found == {"embedding.table": per_device, "lm_head.kernel": per_device}
