"""Keys and values in 8 and 4 bits: how far they come back from what they were, and what they take."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.cache.pool import block_bytes
from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import cache_dtype, unsupported_by_kernels
from moejax.engine.opening.start import cache_blocks
from moejax.perf.memory import device_memory
from moejax.perf.sizes import kv_vector_bytes
from moejax.quantization.kv import (
    KV_FORMATS,
    bits_dtype,
    dequantize_kv,
    from_bits,
    is_quantized,
    quantize_kv,
    round_trip,
    to_bits,
)
from tests.engine.tiny import main_config, small_config
from tests.model_shapes import LATENT
from tests.numerics import UNIT_ROUNDOFF
from tests.perf.steps import decode_step_cost

# Half the distance between neighbours: of all codes, relative to a value, and below the least normal one in
# units of the scale.
HALF_STEP = {
    "int8": (0.0, 0.5),
    "int4": (0.0, 0.5),
    "float8_e4m3fn": (2.0**-4, 2.0**-10),
    "float8_e5m2": (2.0**-3, 2.0**-17),
}
LARGEST = {"int4": 7.0, "int8": 127.0, "float8_e4m3fn": 448.0, "float8_e5m2": 57344.0}


def rows(seed: int = 0) -> np.ndarray:
    """`[64, 3, 16]`: sizes from 1e-6 to 1e6, outliers, and a head of zeros."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(64, 3, 16)) * 10.0 ** rng.uniform(-6, 6, (64, 3, 1))
    x[::5, :, 3] *= 50
    x[7] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("dtype", KV_FORMATS)
def test_errors_are_half_a_step(dtype: str) -> None:
    """Every number within half the distance of its code's neighbours, the largest of a head exact."""
    x = rows()
    codes, scale = quantize_kv(jnp.asarray(x), jnp.dtype(dtype))
    assert codes.dtype == jnp.dtype(dtype) and scale.dtype == jnp.float32 and scale.shape == x.shape[:-1]
    back = np.asarray(dequantize_kv(codes, scale), np.float64)
    relative, absolute = HALF_STEP[dtype]
    # Scale, quotient and product are each rounded once.
    slack = 4 * UNIT_ROUNDOFF["float32"] * np.abs(x).max(axis=-1, keepdims=True)
    limit = np.maximum(relative * np.abs(x), absolute * np.asarray(scale)[..., None]) + slack
    assert (np.abs(back - x) <= limit).all()
    assert (back[7] == 0).all() and np.isfinite(back).all()
    largest = np.abs(x).max(axis=-1)
    np.testing.assert_allclose(np.abs(back).max(axis=-1), largest, rtol=4 * UNIT_ROUNDOFF["float32"])
    assert np.abs(np.asarray(codes, np.float32)).max() == LARGEST[dtype]


@pytest.mark.parametrize("dtype", KV_FORMATS)
def test_a_round_trip_stays(dtype: str) -> None:
    """Rounding what has been rounded changes a code no more: a preempted sequence is computed anew."""
    once = round_trip(jnp.asarray(rows()), dtype)
    twice = round_trip(once, dtype)
    np.testing.assert_allclose(np.asarray(twice), np.asarray(once), rtol=4 * UNIT_ROUNDOFF["float32"])
    assert round_trip(once, "bfloat16") is once and not is_quantized(jnp.bfloat16)


@pytest.mark.parametrize("dtype", KV_FORMATS)
def test_every_code_survives_as_bits(dtype: str) -> None:
    if dtype == "int4":  # two in a byte, each pair of them
        pairs = np.indices((16, 16)).reshape(2, 256).T - 8
        held = to_bits(jnp.asarray(pairs, jnp.int4))
        assert held.shape == (256, 1) and held.dtype == bits_dtype(dtype) == jnp.int8
        assert len(np.unique(np.asarray(held))) == 256
        np.testing.assert_array_equal(np.asarray(from_bits(held, dtype)), pairs)
        np.testing.assert_array_equal(np.asarray(from_bits(held.T, dtype, 0)), pairs.T)
        return
    every = jax.lax.bitcast_convert_type(jnp.arange(256, dtype=jnp.uint8), jnp.dtype(dtype))
    held = to_bits(every)
    assert held.dtype == bits_dtype(dtype) and jnp.issubdtype(held.dtype, jnp.integer)
    back = jax.lax.bitcast_convert_type(from_bits(held, dtype), jnp.uint8)
    np.testing.assert_array_equal(np.asarray(back), np.arange(256))


# -- bytes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", KV_FORMATS)
def test_bytes_count_codes_and_scales(dtype: str) -> None:
    """The same in the pool's blocks, in the memory of a device, and in what a step reads."""
    model = main_config()
    Dh, K, L = model.head_dim, model.num_kv_heads, model.num_layers
    held_bytes = 4 + (Dh // 2 if dtype == "int4" else Dh)
    assert kv_vector_bytes(Dh, dtype) == held_bytes and kv_vector_bytes(Dh, "bfloat16") == 2 * Dh
    assert block_bytes(model, 16, dtype) == L * 16 * 2 * K * held_bytes
    assert block_bytes(model, 16, dtype, 2) == block_bytes(model, 16, dtype) // 2
    (stage,) = device_memory(model, ParallelConfig(), {}, num_blocks=5, block_size=16, dtype=dtype)
    assert stage.cache == 5 * block_bytes(model, 16, dtype)
    hits = np.ones(L)
    plain = decode_step_cost(model, 3, 20.0, hits)
    held = decode_step_cost(model, 3, 20.0, hits, kv_dtype=dtype)
    assert held.cache_bytes == 3 * 20 * L * 2 * K * held_bytes
    assert plain.cache_bytes / held.cache_bytes == 4 * Dh / held_bytes
    assert (held.weight_bytes, held.flops) == (plain.weight_bytes, plain.flops)


def test_as_many_blocks_as_fit() -> None:
    """Memory for 100 float32 blocks holds 100 · 32 / 12 of 8 codes and a scale."""
    model = main_config()
    engine = EngineConfig(
        block_size=4, max_num_seqs=64, kv_cache_memory_gb=100 * block_bytes(model, 4, "float32") / 1e9
    )
    found = [int(cache_blocks(engine, model, 64, ParallelConfig(), d).value) for d in (None, "int8")]
    assert found == [100, 266]


def test_what_is_decided_is_recorded() -> None:
    found = cache_dtype("int8", main_config())
    assert (found.key, found.value) == ("quant.kv_cache", "int8")
    assert "12 bytes a token and head, scale included, instead of 32 in float32" in found.reason
    assert cache_dtype("auto", main_config(dtype="bfloat16")).value == "bfloat16"


def test_what_cannot_run_is_an_error() -> None:
    model = main_config()
    with pytest.raises(ConfigError, match=r"quant.kv_cache: unknown value 'int3'"):
        QuantConfig(kv_cache="int3")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"quant\.kv_cache=int4 does not go with latents, .*; use int8"):
        cache_dtype("int4", small_config(**LATENT))
    kernels = EngineConfig(kernels="pallas_triton", block_size=8)
    with pytest.raises(ConfigError, match=r"kernels=pallas_triton does not take quant\.kv_cache=int4"):
        LLM(model, engine=kernels, load_format="dummy", quant=QuantConfig(kv_cache="int4"), fill=False)
    # 64 tokens of 2 heads of 8: 2^21 blocks are 2^31 codes.
    engine = EngineConfig(block_size=64, num_blocks=2**21 + 1)
    for kernels, dtype in (("xla", "int8"), ("pallas_triton", None)):
        assert cache_blocks(engine, model, 64, ParallelConfig(), dtype, kernels).value == str(2**21 + 1)
    with pytest.raises(ConfigError, match=r"num_blocks=2097153: the GPU kernels take .* at most 2097152 or"):
        cache_blocks(engine, model, 64, ParallelConfig(), "int8", "pallas_triton")
    asked = {"max_num_seqs": 2**21 + 1, "max_num_batched_tokens": 2**21 + 1}
    room = EngineConfig(block_size=64, kv_cache_memory_gb=1e4, **asked)
    found = cache_blocks(room, model, 64, ParallelConfig(), "int8", "pallas_triton")
    assert (found.value, "the most that the GPU kernels take" in found.reason) == (str(2**21), True)
    why = unsupported_by_kernels(model, EngineConfig(), "7.5")
    assert why == "a GPU of compute capability 7.5 (at least 8.0)"
    assert unsupported_by_kernels(model, EngineConfig(), "8.0") is None
