"""Writes docs/families.md from the registry and the configurations that are held against transformers:
python -m docs.make_families"""

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

from moejax.core.config import EngineConfig, ModelConfig
from moejax.engine.opening.resolve import unsupported_by_kernels
from moejax.models.registry import FAMILIES, config_from_hf
from tests.engine.mesh_models import FAMILIES as ON_MESHES
from tests.oracle.cases import CASES, hf_fields

PAGE = Path(__file__).with_name("families.md")
_HEAD = """\
<!-- Made by `python -m docs.make_families`: change that file. -->
# Model families

`model=checkpoint model.path=DIR` opens a Hugging Face directory of any of these; names are its
`model_type`. Each is the one decoder with a `ModelConfig`, read from `config.json` field by field: a
field that would change what is computed and is not implemented is refused by name. Each is held against
transformers (logits, routing, greedy tokens by the engine, directories written) over the configurations
of `tests/oracle/cases.py`: `make test-oracle`. `two_level_moe` is this project's own, for studies of many
experts: Qwen3-MoE with a gate of `n_group` groups, of which a token visits `topk_group`
(`experiment=many_experts`).

"""
_TAIL = """
Of attention, router and experts the table has what the tested configurations turn on between them.
*Meshes*: `yes` where `tests/engine/test_mesh.py` runs the family on every layout (tensor, expert, data
and pipeline parallelism; `make test-slow`); the others have the same parts. *Kernels*: what of the family
keeps it from the GPU kernels, which then run none of its layers (`engine.kernels=auto` says so in
`resolved`).

Weights in floating point are read as they are, in one tensor an expert or stacked; GPTQ, AWQ,
compressed-tensors, fp8 and this project's own quantized directories of every family
(docs/quantization.md); `gpt_oss` in MXFP4 as published, which the GPU kernels multiply by as it is.
Multi-token-prediction layers are passed over, with a line of the log. A
latent cache (`kv_lora_rank + qk_rope_head_dim` numbers a token and layer: 576 in DeepSeek-V3, where 128
heads' keys and values would be 40,960) is attended to in the absorbed form in decode. A chunk of a prompt
makes each head's keys and values of the latents (the plain form) where that costs less, in DeepSeek's
sizes from 256 tokens on and at a prompt's beginning; the GPU kernels, which have the absorbed form
alone, never do. A call without a cache makes them always. Under tensor parallelism every device has the
latents whole (`experiments.scaling` says what a split by tokens would save). `kv_b_proj` stays in full
precision unless a rule of `quant.rules` names it.

Layers with a sliding window keep its tokens only, in blocks and tables of their own (`engine.window_cache`):
a block that no later query sees is given up at once, so that beside its prompt's newest chunk a
sequence holds `ceil((window - 1) / block_size) + 2` of them at most, whatever its length. They are enough for
`max_num_seqs` sequences, so that none waits for one. `full` keeps all tokens and masks them, as does `auto`
where a prefix cache or swapping wants all tokens of a sequence.

Layers with linear attention (`minimax`) keep a state of fixed size a sequence and no keys and values:
float32 arrays `[max_num_seqs + 1, heads, head_dim, head_dim]` a layer beside the pages, split over the
tensor axis as heads are, donated to steps as the sampler's state is, and read and written by a row's slot.
A sequence begins with zeros, so that preemption by recomputation asks for nothing, and a fork gets its
parent's state. Blocks are counted, and memory given to them, by the other layers alone; an engine says what
the states take, and what a sequence's does, as the reason of `engine.num_blocks`. A cache in int8 or 8-bit
floats leaves them in float32. A decoding row is one update; a chunk goes tile by tile (32 tokens) in the
order of its sequence, and a call without a cache block by block (64). To share prefixes, which nothing here
does, the state at the end of a block would have to be kept with the block. Decays other than one a head,
and the delta rule of Qwen3-Next and Kimi-Linear, are not there. `rotary_dim` is MiniMax's own name for the
rotated part of a head; transformers' `minimax` rotates whole heads, so that only this is held against it.

Shapes without weights, for `load_format=dummy`: `configs/model/`; `model.num_hidden_layers=2` takes the
first layers alone, and the run's name says so.
"""

Say = Callable[[ModelConfig], str | None]


def _attention() -> Sequence[Say]:
    norms = {"none": None, "head": "norm of heads", "projection": "norm of projections"}
    return (
        lambda c: "latent" if c.latent else "grouped-query",
        lambda c: "linear layers" if c.linear_layers else None,
        lambda c: norms.get(c.qk_norm, "norm after rotation"),
        lambda c: "windows" if any(c.sliding_windows) else None,
        lambda c: "sinks" if c.attention_sinks else None,
        lambda c: "partial rotary" if not c.latent and c.rotary_dim < c.head_dim else None,
        lambda c: "interleaved rotary" if c.rope.interleaved else None,
        lambda c: "own rotary base of windows" if c.local_rope else None,
        lambda c: "biases" if c.qkv_bias or c.attention_out_bias else None,
        lambda c: "norms after" if c.post_norms else None,
        lambda c: "residuals after norms" if c.normed_residual else None,
    )


def _router() -> Sequence[Say]:
    return (
        lambda c: "gate of groups first" if c.router.group_gate else None,
        lambda c: c.router.scores if any(c.moe_layers) else None,
        lambda c: "renormalised" if c.norm_topk_prob and any(c.moe_layers) else None,
        lambda c: "groups" if c.router.groups > 1 and not c.router.group_gate else None,
        lambda c: "correction bias" if c.router.correction_bias else None,
        lambda c: "bias" if c.router.bias else None,
        lambda c: "factor" if c.router.scaling != 1 else None,
    )


def _experts() -> Sequence[Say]:
    return (
        lambda c: None if any(c.moe_layers) else "none (dense)",
        lambda c: "dense layers among them" if any(c.moe_layers) and not all(c.moe_layers) else None,
        lambda c: (
            "gated shared expert" if c.shared_expert_intermediate_size and c.shared_expert_gate else None
        ),
        lambda c: "shared expert" if c.shared_expert_intermediate_size and not c.shared_expert_gate else None,
        lambda c: "biases" if c.expert_bias else None,
        lambda c: "clamped SwiGLU" if c.expert_swiglu else None,
        lambda c: "factors" if c.residual_multiplier != 1 else None,
    )


def _cell(says: Sequence[Say], configs: Sequence[ModelConfig]) -> str:
    words = [word for say in says for word in dict.fromkeys(say(config) for config in configs) if word]
    return ", ".join(words) or "–"


def _sized(config: ModelConfig) -> ModelConfig:
    """Returns a tested configuration with latents of such widths as published models have, multiples of 8."""
    if config.latent is None:
        return config
    return config.replace(latent=dataclasses.replace(config.latent, kv_rank=16, rope_dim=8))


def page() -> str:
    """Returns the page's text."""
    heads = ("model_type", "attention", "router", "experts", "GPU kernels", "meshes")
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, family in FAMILIES.items():
        cases = [
            hf_fields(case) | {"model_type": family.name} for case in CASES if case.family == family.name
        ]
        configs = [config_from_hf(fields | {"model_type": name}) for fields in cases]
        if not configs and name in ON_MESHES:
            configs = [ON_MESHES[name]]
        if not configs:
            lines.append(f"| `{name}` | that of `gemma3_text`, beside images, which are not read | | | | |")
            continue
        reasons = {unsupported_by_kernels(_sized(c), EngineConfig()) for c in configs if c.head_dim % 8 == 0}
        kernels = "; ".join(sorted(r.split(" (")[0] for r in reasons if r)) or "yes"
        if kernels == "yes" and not all(c.router.has_kernel for c in configs):
            kernels = "but the router"
        meshes = "yes" if family.name in ON_MESHES else "–"
        cells = [_cell(says, configs) for says in (_attention(), _router(), _experts())]
        lines.append(f"| `{name}` | {' | '.join(cells)} | {kernels} | {meshes} |")
    return _HEAD + "\n".join(lines) + "\n" + _TAIL


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
