"""Choice of an implementation by name, with the reason, decided once and recorded.

A name that was asked for runs or raises; only "auto" chooses.
"""

import jax

from moejax.core.config import KERNELS
from moejax.core.errors import ConfigError, unknown
from moejax.core.moe import LAYOUTS, PRODUCTS
from moejax.core.resolve import Resolution

GROUPED_MATMUL = PRODUCTS[1:]


def choose(requested: str, known: tuple[str, ...], auto: Resolution) -> Resolution:
    """Returns `auto` for "auto", else the name that was asked for, under the key of `auto`.

    Raises:
        ConfigError: the name is not known.
    """
    if requested == "auto":
        return auto
    if requested not in known:
        raise ConfigError(f"{auto.key}: {unknown('implementation', requested, (*known, 'auto'))}")
    return Resolution(auto.key, requested, "asked for")


def choose_grouped_matmul(
    requested: str = "auto",
    platform: str | None = None,
    block_rows: int | None = None,
    kernels: str = "xla",
) -> Resolution:
    """Chooses what runs the grouped expert products on a platform ("cpu", "gpu").

    "blocks_uniform" has blocks of one height, `block_rows` if given; "blocks_mixed" has several, each
    expert's its own. "batched" is one product over all experts of `block_rows` rows each, with blocks for
    what is left.

    Args:
        kernels: what the rest of the model runs on, see `choose_kernels`.

    Raises:
        ConfigError: the name is not known.
    """
    key = "engine.moe.grouped_matmul"
    platform = platform or jax.default_backend()
    if kernels != "xla":
        auto = Resolution(key, kernels, f"engine.kernels is {kernels}")
    elif platform != "cpu":
        auto = Resolution(key, "ragged_dot", f"XLA's grouped product on {platform}")
    elif block_rows is not None:
        auto = Resolution(key, "blocks_uniform", f"on CPU, with all blocks {block_rows} rows high as asked")
    else:
        why = "on CPU ragged_dot computes all experts; this only those that are hit, in blocks of their size"
        auto = Resolution(key, "blocks_mixed", why)
    return choose(requested, GROUPED_MATMUL, auto)


def choose_kernels(requested: str, platform: str, unsupported: str | None) -> Resolution:
    """Chooses what attention, norms and router run on: "xla" or an implementation of `pallas_kernels`.

    Args:
        unsupported: what of this model the kernels cannot do.

    Raises:
        ConfigError: kernels were asked for by name and cannot run the model.
    """
    key = "engine.kernels"
    if platform != "gpu":
        auto = Resolution(key, "xla", f"on {platform} the GPU kernels are only interpreted")
    elif unsupported is not None:
        auto = Resolution(key, "xla", f"the GPU kernels do not take {unsupported}")
    else:
        auto = Resolution(key, "pallas_triton", "GPU kernels on a GPU")
    chosen = choose(requested, KERNELS, auto)
    if chosen.value != "xla" and unsupported is not None:
        raise ConfigError(f"engine.kernels={requested} does not take {unsupported}; use engine.kernels=xla")
    return chosen


QUANTIZED_MATMUL = ("dequantize", "xla", "pallas_triton")

KERNELS_NEED = (8, 0)
"""Compute capability that the Triton kernels need: sm_80, for asynchronous copies and bfloat16 products."""


def compute_capability(platform: str) -> str | None:
    """Returns the GPUs' compute capability, "8.0"; None elsewhere, or where JAX does not say."""
    if platform != "gpu":
        return None
    return str(getattr(jax.local_devices()[0], "compute_capability", "")) or None


def choose_quantized(
    requested: str, platform: str, capability: str | None = None, unsupported: str | None = None
) -> Resolution:
    """Chooses what runs the products with quantized weights (`moejax.ops.quantized_matmul`).

    Args:
        capability: of the GPU, "8.0"; None where it is not known.
        unsupported: a weight for which the kernels have no product, and why.

    Raises:
        ConfigError: kernels were asked for by name and cannot run here.
    """
    key, cannot = "quant.implementation", unsupported
    if platform not in ("cpu", "gpu"):
        cannot = f"they are for GPUs, and this is a {platform}"
    elif capability is not None and tuple(int(n) for n in capability.split(".")) < KERNELS_NEED:
        least = ".".join(map(str, KERNELS_NEED))
        cannot = f"this GPU has compute capability {capability}, and they need {least}"
    if platform != "gpu":
        auto = Resolution(key, "xla", f"on {platform} the GPU kernels are only interpreted")
    elif cannot is not None:
        auto = Resolution(key, "xla", f"no GPU kernels: {cannot}")
    else:
        auto = Resolution(key, "pallas_triton", "GPU kernels on a GPU, which have every format here")
    chosen = choose(requested, QUANTIZED_MATMUL, auto)
    if chosen.value == "pallas_triton" and cannot is not None:
        raise ConfigError(f"{key}=pallas_triton: the kernels cannot run: {cannot}; use {key}=xla")
    return chosen


def mixed_block_heights(tokens: int, transposed: bool = False) -> tuple[int, tuple[int, ...]]:
    """Returns for "blocks_mixed" on CPU up to how many rows of an expert go one at a time, and the block
    heights.

    Single rows read transposed experts without a copy, and again from the cache: up to 16 tokens there is
    nothing else. An expert gets a row a token at most, so that few tokens need few heights; each costs a
    loop. Measured in docs/log.md, 2026-11-21.
    """
    if transposed and tokens <= 16:
        return tokens, ()
    singles, candidates = (6, (12, 32, 64, 128)) if transposed else (1, (4, 16, 32, 64, 128))
    heights: list[int] = []
    for height in candidates:
        if tokens <= max((singles, *heights)):
            break
        heights.append(min(height, tokens))
        if 2 * tokens <= 3 * height:
            break
    return singles, tuple(heights)


def block_rows_for(assignments: int, num_experts: int, transposed: bool = False) -> int:
    """Returns the rows of a block for the loop on CPU, from the mean rows an expert gets.

    Short blocks waste little on experts with few tokens; tall ones amortise reading an expert's weights.
    The steps are where the measured times cross (docs/log.md, 2026-11-21).
    """
    mean = assignments / num_experts
    if assignments <= 8 or (transposed and mean <= 3):
        return 1
    for rows, up_to in ((8, 6), (16, 12), (32, 40)) if transposed else ((4, 3), (16, 12), (32, 40)):
        if mean <= up_to:
            return rows
    return 64


def batched_rows_for(assignments: int, num_experts: int) -> int:
    """Returns the rows that each expert has in "batched": half as many again as the mean.

    Each costs its place in all experts, used or not; fewer leave too much to the blocks (docs/log.md).
    """
    return -(-3 * assignments // (2 * num_experts))


def choose_expert_layout(requested: str, platform: str, product: str = "auto") -> Resolution:
    """Chooses how an engine's experts lie in memory, see `moejax.core.moe.MoeConfig`.

    Args:
        product: what they run on.
    """
    key = "engine.moe.expert_layout"
    if product == "pallas_triton":
        auto = Resolution(key, "edf", "the order that the kernels read")
    elif platform == "cpu":
        auto = Resolution(key, "efd", "on CPU a single row's product reads transposed experts without a copy")
    else:
        auto = Resolution(key, "edf", f"the products' own order on {platform}")
    return choose(requested, LAYOUTS, auto)
