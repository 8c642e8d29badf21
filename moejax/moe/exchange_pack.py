"""Several arrays in one message: their bits side by side, as unsigned words.

One collective instead of three. Words rather than floats, because XLA:CPU widens collectives on bfloat16 to
float32: as words the message has the same bytes on every platform, and no bit pattern is touched.
"""

from typing import Any

import jax
import jax.numpy as jnp

_WORDS = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


def pack(*arrays: jax.Array) -> jax.Array:
    """Packs arrays `[…, n_i]`, any dtypes, to words `[…, W]`. A word is as wide as the first array's element,
    but at most 4 bytes; W is the sum of n_i · itemsize_i / (bytes of a word).

    Raises:
        ValueError: an array's elements are not whole words.
    """
    word = _WORDS[min(arrays[0].dtype.itemsize, 4)]
    return jnp.concatenate([_to_words(array, word) for array in arrays], axis=-1)


def unpack(words: jax.Array, *parts: tuple[int, Any]) -> list[jax.Array]:
    """Words `[…, W]` and (n_i, dtype_i) of each array → the arrays `[…, n_i]` that were packed."""
    arrays, at = [], 0
    for size, dtype in parts:
        width = size * jnp.dtype(dtype).itemsize // words.dtype.itemsize
        arrays.append(_from_words(words[..., at : at + width], size, dtype))
        at += width
    return arrays


def _to_words(array: jax.Array, word: Any) -> jax.Array:
    if array.dtype.itemsize % jnp.dtype(word).itemsize:
        raise ValueError(f"elements of {array.dtype} are not whole words of {jnp.dtype(word)}")
    words = jax.lax.bitcast_convert_type(array, word)
    return words.reshape(*array.shape[:-1], -1)


def _from_words(words: jax.Array, size: int, dtype: Any) -> jax.Array:
    each = jnp.dtype(dtype).itemsize // words.dtype.itemsize
    if each > 1:
        words = words.reshape(*words.shape[:-1], size, each)
    return jax.lax.bitcast_convert_type(words, dtype)
