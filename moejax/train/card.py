"""The model card: what was trained, by which command, on what, and what was measured."""

import math
import platform
import textwrap
from typing import Any

from moejax.routing.analysis import load_shares
from moejax.text.corpus import MIN_REPEATED, characters
from moejax.tracking.provenance import cpu_info, device_info
from moejax.train.config import WEIGHT_DTYPE, TrainConfig
from moejax.train.data import TrainingText
from moejax.train.evaluate import HeldOut
from moejax.train.loop import TrainResult, run_identity
from moejax.train.tokenizer import END_OF_TEXT


def model_card(
    config: TrainConfig, command: str, result: TrainResult, held_out: HeldOut, samples: list[tuple[str, str]]
) -> str:
    """Returns Markdown with the front matter that Hugging Face reads.

    Args:
        command: what was typed.
        held_out: of the exported, rounded weights.
        samples: (prompt, continuation) as generated.
    """
    front = "---\nlicense: apache-2.0\nlanguage: en\nlibrary_name: moejax\npipeline_tag: text-generation\n---"
    parts = [
        front,
        _intro(config, result, held_out),
        _training(config, command, result),
        _text(result.text),
        _load(held_out),
        _samples(samples),
    ]
    return "\n\n".join(parts) + "\n"


def _paragraph(text: str) -> str:
    """Fills text to 100 columns, however it is broken here."""
    return textwrap.fill(" ".join(text.split()), 100, break_long_words=False, break_on_hyphens=False)


def _intro(config: TrainConfig, result: TrainResult, held_out: HeldOut) -> str:
    shape, size = config.model, _millions(result.metrics["num_params"])
    num_bytes = len(result.text.sample.encode("utf-8"))
    bits_per_byte = held_out.loss * held_out.tokens / math.log(2) / num_bytes
    about = f"""A Qwen3-MoE (`Qwen3MoeForCausalLM`) of {size} parameters for experiments with inference: small
        enough to ship with the code, trained enough that its routing, its perplexity and its text mean
        something. It knows the style of Python's documentation and nothing else; do not ask it for facts. It
        has seen no conversations: its chat template is there for code that needs one."""
    rows = {
        "layers, width": f"{shape.num_hidden_layers}, {shape.hidden_size}",
        "query heads / key-value heads × size": (
            f"{shape.num_attention_heads} / {shape.num_key_value_heads} × {shape.head_dim}"
        ),
        "experts, per token, hidden width": (
            f"{shape.num_experts}, {shape.num_experts_per_tok}, {shape.moe_intermediate_size}"
        ),
        "vocabulary": f"{config.vocab_size}, byte-level BPE",
        "weights": WEIGHT_DTYPE,
        "**held-out perplexity**": f"**{held_out.perplexity:.2f}** a token, {bits_per_byte:.3f} bits a byte",
    }
    measured = f"""The perplexity is that of the weights in this folder, computed in float32 over the
        {held_out.tokens} tokens of `held_out.txt` (all but the first) in windows of {config.seq_len} without
        overlap. Before rounding to {WEIGHT_DTYPE} it was {result.held_out.perplexity:.2f}."""
    table = "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows.items())])
    title = "# A small mixture-of-experts language model"
    return "\n\n".join([title, _paragraph(about), table, _paragraph(measured)])


def _training(config: TrainConfig, command: str, result: TrainResult) -> str:
    identity = run_identity(config).items()
    settings = "\n".join(f"{name}: {value}" for name, value in identity if not name.startswith("model."))
    tokens = config.tokens_per_step * config.steps
    noise = f"{config.token_noise:.0%} of the input tokens were replaced by random ones. "
    about = f"""{config.steps} steps of {config.tokens_per_step} tokens: {_millions(tokens)} in all,
        {float(result.metrics["epochs"] or 0):.1f} times the text. The steps took {_cost(result, tokens)}.
        AdamW with warm-up and cosine decay, load-balance loss (arXiv 2101.03961), router z-loss (arXiv
        2202.08906). {noise if config.token_noise else ""}While training, an expert takes at most
        {config.capacity_factor} times its even share of a batch; the rest is dropped and counted. Evaluation
        and inference drop nothing."""
    code = f"```\n{command}\n```"
    return "\n\n".join(["## Training", code, _paragraph(about), f"```yaml\n{settings}\n```"])


def _text(text: TrainingText) -> str:
    train, held_out = text.corpus.train, text.corpus.held_out
    about = f"""The English prose that every Python installation carries: the help topics
        (`pydoc_data/topics.py`) and the standard library's docstrings and comment blocks, as of Python
        {platform.python_version()}."""
    table = f"""| | documents | characters |
|---|---|---|
| train | {len(train)} | {characters(train)} |
| held out | {len(held_out)} | {characters(held_out)} |
| of those in `held_out.txt` | {text.sample.count(END_OF_TEXT)} | {len(text.sample)} |"""
    split = f"""A hash of a document's name decides whether it is held out; no paragraph of {MIN_REPEATED}
        characters or more stands in both parts. In `held_out.txt`, `{END_OF_TEXT}` ends each document.
        Another Python version has other text and gives another model."""
    licence = """The text is Copyright © Python Software Foundation, under the PSF License Agreement version 2
        (https://docs.python.org/3/license.html), which also applies to `held_out.txt`; the weights are under
        this project's licence, Apache-2.0. Nothing else was read: no third-party packages, no downloads."""
    return "\n\n".join(["## Text", _paragraph(about), table, _paragraph(split), _paragraph(licence)])


def _load(held_out: HeldOut) -> str:
    shares = load_shares(held_out.counts)
    even = 1 / shares.shape[1]
    lines = [
        "## Expert load",
        "",
        f"Share of each layer's assignments on the held-out text; even would be {even:.2%}.",
        "",
        "| layer | least used | most used | most / even |",
        "|---|---|---|---|",
    ]
    lines += [
        f"| {i} | {row.min():.2%} (expert {row.argmin()}) | {row.max():.2%} (expert {row.argmax()})"
        f" | {row.max() / even:.2f} |"
        for i, row in enumerate(shares)
    ]
    return "\n".join(lines)


def _samples(samples: list[tuple[str, str]]) -> str:
    blocks = [f"```text\n{_fenced(prompt)}▸{_fenced(text)}\n```" for prompt, text in samples]
    head = "## Samples\n\nTemperature 0.7, one try each, not selected; the prompt ends at ▸."
    return "\n\n".join([head, *blocks])


def _fenced(text: str) -> str:
    """Returns text that cannot end a Markdown code block."""
    return text.replace("```", "'''").rstrip("\n")


def _millions(count: Any) -> str:
    return f"{float(count) / 1e6:.2f} M"


def _cost(result: TrainResult, tokens: int) -> str:
    """Returns time and the kind of machine, never its name."""
    device, cpu = device_info(), cpu_info()
    seconds = max(result.seconds, 1e-9)
    cost = f"{seconds / 60:.1f} minutes, {tokens / seconds:.0f} tokens/s"
    if device["platform"] != "cpu":
        return f"{cost}, on {device['count']} × {device['kind']}"
    # A busy machine stretches the first figure and not the second.
    used = f"{result.cpu_seconds / 60:.1f} minutes of CPU time"
    return f"{cost} ({used}), on {cpu['usable_cores']} cores of {cpu['model']}"
