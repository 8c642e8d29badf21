"""Dimensions of the models whose shapes the specs use, and routings to fill them with.

Sources: the models' published `config.json`. `wide64` is a model of 64 experts, 4096 wide, top-2, on
eight-way expert parallelism: a device holds 8 of the experts and sees the assignments that go to them.
`narrow_1024` and `narrow_4096` are models of as many small experts.
"""

from dataclasses import dataclass

import numpy as np

from pallas_kernels.groups import Activation, ClampedSwiglu


@dataclass(frozen=True)
class ModelShape:
    """Widths as one device sees them; `experts` are those it holds, of `total_experts`.

    `activation` is of gate and up; with `biased` experts have biases. With latent attention (the absorbed
    form) `head_dim` is the only key's and `latent` its value's.
    """

    name: str
    hidden: int
    expert_hidden: int
    experts: int
    total_experts: int
    top_k: int
    heads: int
    kv_heads: int
    head_dim: int
    activation: Activation = "silu"
    biased: bool = False
    latent: int | None = None


MIXTRAL = ModelShape("mixtral_8x7b", 4096, 14336, 8, 8, 2, 32, 8, 128)
QWEN3 = ModelShape("qwen3_30b_a3b", 2048, 768, 128, 128, 8, 32, 4, 128)
OLMOE = ModelShape("olmoe_1b_7b", 2048, 1024, 64, 64, 8, 16, 16, 128)
WIDE64 = ModelShape("wide64_ep8", 4096, 4096, 8, 64, 2, 32, 8, 128)
DEEPSEEK_V2_LITE = ModelShape("deepseek_v2_lite", 2048, 1408, 64, 64, 6, 16, 1, 576, latent=512)
DEEPSEEK_V3 = ModelShape("deepseek_v3", 7168, 2048, 256, 256, 8, 128, 1, 576, latent=512)

GLM = ModelShape("glm_4_5", 5120, 1536, 160, 160, 8, 96, 8, 128)
GLM_AIR = ModelShape("glm_4_5_air", 4096, 1408, 128, 128, 8, 96, 8, 128)
MINIMAX = ModelShape("minimax_m2", 3072, 1536, 256, 256, 8, 48, 8, 128)
NARROW = tuple(ModelShape(f"narrow_{E}", 2048, 128, E, E, 8, 16, 16, 128) for E in (1024, 4096))

_GPT_OSS = 4, 64, 8, 64, ClampedSwiglu(7.0, 1.702), True
GPT_OSS_20B = ModelShape("gpt_oss_20b", 2880, 2880, 32, 32, *_GPT_OSS)
GPT_OSS_120B = ModelShape("gpt_oss_120b", 2880, 2880, 128, 128, *_GPT_OSS)

MODELS = (MIXTRAL, QWEN3, OLMOE, WIDE64, GPT_OSS_20B, GPT_OSS_120B)
LATENTS = (DEEPSEEK_V2_LITE, DEEPSEEK_V3)


def expert_ids(shape: ModelShape, tokens: int, routing: str) -> np.ndarray:
    """Returns int32 `[tokens, top_k]`, distinct in a row: experts of all `total_experts`.

    "balanced" draws uniformly, "skewed" by Zipf's law with exponent 1 (a few experts take most tokens), as
    measured routers lie between the two. Drawn without replacement by the Gumbel top-k trick.
    """
    rng = np.random.default_rng(0)
    E = shape.total_experts
    weight = {"balanced": np.zeros(E), "skewed": -np.log(np.arange(1, E + 1))}[routing]
    # Hot experts stand anywhere, as they do in a model (and on any device of an expert-parallel mesh).
    logits = rng.permutation(weight) + rng.gumbel(size=(tokens, E))
    return np.argsort(-logits, axis=1)[:, : shape.top_k].astype(np.int32)
