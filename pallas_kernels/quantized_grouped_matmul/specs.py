"""Named shapes of the quantized grouped products: each model's down projection and SwiGLU, over formats."""

from pallas_kernels.group_specs import down_spec, swiglu_spec
from pallas_kernels.models import GPT_OSS_20B, GPT_OSS_120B, MIXTRAL, OLMOE, QWEN3, WIDE64
from pallas_kernels.qformats import Format

W4 = Format("w4a16", 128)
W4_G64 = Format("w4a16", 64)
W4_G64Z = Format("w4a16", 64, True)
W4_G32 = Format("w4a16", 32)
W8 = Format("w8a16")
W8_G128 = Format("w8a16", 128)
W8A8 = Format("w8a8")
FP8 = Format("fp8")
FP8_BLOCKS = Format("fp8", 128)
MXFP4 = Format("mxfp4", 32)

GPT_OSS = (
    (GPT_OSS_20B, "decode", 1, "balanced", MXFP4),
    (GPT_OSS_20B, "decode", 64, "balanced", MXFP4),
    (GPT_OSS_20B, "prefill", 2048, "balanced", MXFP4),
    (GPT_OSS_120B, "decode", 64, "skewed", MXFP4),
    (GPT_OSS_120B, "prefill", 4096, "balanced", MXFP4),
)

DOWN = (
    (MIXTRAL, "decode", 1, "balanced", W4),
    (MIXTRAL, "decode", 16, "balanced", W4_G64),
    (MIXTRAL, "decode", 64, "balanced", W4),
    (MIXTRAL, "decode", 64, "balanced", W8),
    (MIXTRAL, "decode", 64, "balanced", FP8_BLOCKS),
    (MIXTRAL, "prefill", 2048, "balanced", W4),
    (QWEN3, "decode", 16, "skewed", W4_G32),
    (QWEN3, "decode", 64, "balanced", FP8_BLOCKS),
    (QWEN3, "prefill", 2048, "balanced", FP8_BLOCKS),
    (OLMOE, "decode", 64, "balanced", W8A8),
    (WIDE64, "decode", 64, "skewed", W4_G64Z),
    *GPT_OSS,
)

SWIGLU = (
    (MIXTRAL, "decode", 1, "balanced", W4),
    (MIXTRAL, "decode", 64, "balanced", W4),
    (MIXTRAL, "prefill", 2048, "balanced", W8A8),
    (QWEN3, "decode", 16, "balanced", W4),
    (QWEN3, "decode", 64, "skewed", FP8),
    (QWEN3, "prefill", 2048, "balanced", W4_G64),
    (OLMOE, "decode", 16, "balanced", W8_G128),
    (WIDE64, "decode", 64, "balanced", W4),
    *GPT_OSS,
)

SPECS = tuple(down_spec(*case) for case in DOWN)
SWIGLU_SPECS = tuple(swiglu_spec(*case) for case in SWIGLU)
