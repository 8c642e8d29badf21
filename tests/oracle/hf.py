"""Tiny random transformers models and what they answer. Importing this file needs torch and transformers."""

from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from tests.oracle.cases import Case, hf_fields

# More threads than free cores make torch's small products wait for one another, a hundredfold slower.
torch.set_num_threads(1)
transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()

CONFIGS = {
    "mixtral": transformers.MixtralConfig,
    "qwen2_moe": transformers.Qwen2MoeConfig,
    "qwen3_moe": transformers.Qwen3MoeConfig,
    "olmoe": transformers.OlmoeConfig,
    "deepseek_v2": transformers.DeepseekV2Config,
    "deepseek_v3": transformers.DeepseekV3Config,
    "glm4_moe": transformers.Glm4MoeConfig,
    "dots1": transformers.Dots1Config,
    "minimax": transformers.MiniMaxConfig,
    "minimax_m2": transformers.MiniMaxM2Config,
    "ernie4_5_moe": transformers.Ernie4_5_MoeConfig,
    "hunyuan_v1_moe": transformers.HunYuanMoEV1Config,
    "llama": transformers.LlamaConfig,
    "qwen3": transformers.Qwen3Config,
    "gemma3_text": transformers.Gemma3TextConfig,
    "granitemoe": transformers.GraniteMoeConfig,
    "gpt_oss": transformers.GptOssConfig,
    "phimoe": transformers.PhimoeConfig,
}
TORCH_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def build(case: Case, size: str = "oracle", seed: int = 0) -> Any:
    """A model with every parameter random, in float32 but already rounded to the case's storage dtype.

    transformers starts norm scales at 1 and biases and OLMoE's, Qwen's routers at 0; a model that forgot
    them would then pass, so they are drawn here.
    """
    config = CONFIGS[case.family](**hf_fields(case, size))
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if name.endswith(("norm.weight", "layernorm.weight")):
                parameter.copy_((case.family != "gemma3_text") + 0.3 * noise)
            elif name.endswith((".bias", "_bias")):
                parameter.copy_(0.3 * noise)
            elif name.endswith(".sinks"):
                parameter.copy_(noise)
            else:
                parameter.copy_(config.initializer_range * noise)
            parameter.copy_(parameter.to(TORCH_DTYPES[case.dtype]).float())
        for name, buffer in model.named_buffers():
            if name.endswith("correction_bias"):  # float32 and no parameter; as large as scores differ
                buffer.copy_(0.2 * torch.randn(buffer.shape, generator=generator))
                buffer.copy_(buffer.to(TORCH_DTYPES[case.dtype]).float())
    return model.eval()


def feed_forward(layer: Any) -> Any:
    """A layer's MLP, or its experts with their router."""
    return layer.block_sparse_moe if hasattr(layer, "block_sparse_moe") else layer.mlp


def router(layer: Any) -> Any:
    """A layer's router; None where it has no experts."""
    block = feed_forward(layer)
    return getattr(block, "gate", None) or getattr(block, "router", None)


def save(model: Any, directory: Path, dtype: str = "float32", **options: Any) -> None:
    """As transformers writes it, weights in `dtype`, `config.json` saying so.

    In half precision `model` is not to be used any more: `to` has rounded its rotary frequencies, too.
    """
    model.to(TORCH_DTYPES[dtype]).save_pretrained(directory, **options)


def load(directory: Path, attention: str = "eager") -> Any:
    """By transformers, computing in float32."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory, dtype=torch.float32, attn_implementation=attention
    )
    for module in model.modules():
        if hasattr(module, "slope_rate"):  # stored in the weights' dtype, though no weight: as it was before
            module._buffers["slope_rate"] = slope = module.get_slope_rate()
            names = ("query_decay", "key_decay", "diagonal_decay")
            module._buffers.update(zip(names, module.decay_factors(slope), strict=True))
    return model.eval()


def random_tokens(vocab_size: int, batch: int, length: int, seed: int = 7) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, vocab_size, (batch, length), dtype=np.int32)


def forget_length(model: Any) -> None:
    """transformers keeps the base of `dynamic` rotary embedding from the longest sequence a model has seen.

    One short call resets it; the answer then depends on the call's own sequence, as it does in moejax.
    """
    with torch.no_grad():
        model(torch.zeros((1, 1), dtype=torch.long), use_cache=False)


def logits(model: Any, tokens: np.ndarray) -> np.ndarray:
    forget_length(model)
    with torch.no_grad():
        return model(torch.tensor(tokens, dtype=torch.long), use_cache=False).logits.float().numpy()


def greedy(model: Any, tokens: np.ndarray, steps: int) -> np.ndarray:
    """int `[B, steps]`: transformers' own generation, with its cache."""
    forget_length(model)
    ids = torch.tensor(tokens, dtype=torch.long)
    with torch.no_grad():
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=steps,
            min_new_tokens=steps,
            do_sample=False,
            use_cache=True,
            pad_token_id=0,
        )
    return out[:, tokens.shape[1] :].numpy().astype(np.int32)
