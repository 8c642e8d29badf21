"""Named shapes of `flash_attention`: each model's prefill, windows, and a chunk with ragged lengths."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.models import MIXTRAL, MODELS, OLMOE, QWEN3, ModelShape
from pallas_kernels.op import Cost, Spec, make_problem


def _spec(
    model: ModelShape,
    B: int,
    Tk: int,
    *,
    Tq: int | None = None,
    window: int | None = None,
    sinks: bool = False,
    lengths: tuple[int, ...] | None = None,
    suffix: str = "",
) -> Spec:
    H, K, Dh, dtype = model.heads, model.kv_heads, model.head_dim, jnp.bfloat16
    Tq = Tq or Tk

    def make(key: jax.Array) -> dict[str, jax.Array]:
        a, b, c, d = jax.random.split(key, 4)
        arrays = {
            "q": jax.random.normal(a, (B, Tq, H, Dh), dtype),
            "k": jax.random.normal(b, (B, Tk, K, Dh), dtype),
            "v": jax.random.normal(c, (B, Tk, K, Dh), dtype),
        }
        if sinks:
            arrays["sinks"] = jax.random.normal(d, (H,), jnp.float32)
        return arrays | ({} if lengths is None else {"lengths": jnp.asarray(lengths, jnp.int32)})

    # Queries and keys that are no padding, and pairs of them that see each other.
    position = np.arange(Tk - Tq, Tk, dtype=np.int64)
    queries = keys = pairs = 0
    for end in lengths or (Tk,) * B:
        seen = position[position < end]
        queries, keys = queries + len(seen), keys + end
        pairs += int(np.minimum(seen + 1, window or Tk).sum())
    sizes = {"B": B, "Tq": Tq, "Tk": Tk, "H": H, "K": K, "Dh": Dh}
    masks = {"causal": True, "window": window is not None, "lengths": lengths is not None}
    moved = 2 * (queries + B * Tq) * H * Dh + 2 * 2 * keys * K * Dh
    return Spec(
        name=f"{model.name}/prefill_{B}x{Tq}{suffix}",
        make=make,
        static={"scale": Dh**-0.5, **({} if window is None else {"window": window})},
        problem=make_problem(**sizes, dtype=dtype, **masks, soft_cap=False, sinks=sinks),
        cost=Cost(flops=4.0 * pairs * H * Dh, bytes=float(moved)),
        tags=frozenset({model.name, "prefill"}),
    )


_SIZES = (512, 2048, 8192)

SPECS = (
    *(_spec(model, 1, T) for model in MODELS for T in _SIZES),
    # wide64 has Mixtral's heads.
    *(_spec(model, 4, T) for model in (MIXTRAL, QWEN3, OLMOE) for T in _SIZES),
    _spec(MIXTRAL, 1, 8192, window=4096, suffix="/window_4096"),
    _spec(QWEN3, 4, 8192, Tq=512, lengths=(8192, 8000, 7936, 7700), suffix="/chunk_of_8192"),
    _spec(QWEN3, 1, 2048, window=128, sinks=True, suffix="/window_128_sinks"),
)
