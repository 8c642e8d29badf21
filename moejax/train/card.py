"""The model card: what was trained, by which command, on what, and what was measured. Its text is
`assets/model_card.md.j2`."""

import math
import platform
import textwrap
from pathlib import Path
from typing import Any

import jinja2

from moejax.core.words import one_line
from moejax.routing.analysis import load_shares
from moejax.text.corpus import MIN_REPEATED, characters
from moejax.tracking.provenance import cpu_info, device_info
from moejax.train.config import WEIGHT_DTYPE, TrainConfig
from moejax.train.evaluate import HeldOut
from moejax.train.loop import TrainResult, run_identity
from moejax.train.tokenizer import END_OF_TEXT

_TEMPLATE = Path(__file__).resolve().parents[1] / "assets" / "model_card.md.j2"


def model_card(
    config: TrainConfig, command: str, result: TrainResult, held_out: HeldOut, samples: list[tuple[str, str]]
) -> str:
    """Returns Markdown with the front matter that Hugging Face reads.

    Args:
        command: what was typed.
        held_out: of the exported, rounded weights.
        samples: (prompt, continuation) as generated.
    """
    environment = jinja2.Environment(
        undefined=jinja2.StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    filters: dict[str, Any] = {
        # Filled to 100 columns, however it is broken in the template.
        "paragraph": lambda text: textwrap.fill(
            one_line(text), 100, break_long_words=False, break_on_hyphens=False
        ),
        "millions": lambda count: f"{float(count) / 1e6:.2f} M",
        "share": lambda share, digits=2: f"{share:.{digits}%}",
        "characters": characters,
        "fenced": lambda text: text.replace("```", "'''").rstrip("\n"),  # cannot end a code block
    }
    environment.filters |= filters
    text, tokens = result.text, config.tokens_per_step * config.steps
    return environment.from_string(_TEMPLATE.read_text(encoding="utf-8")).render(
        config=config,
        shape=config.model,
        command=command,
        result=result,
        held_out=held_out,
        samples=samples,
        tokens=tokens,
        cost=_cost(result, tokens),
        weight_dtype=WEIGHT_DTYPE,
        bits_per_byte=held_out.loss * held_out.tokens / math.log(2) / len(text.sample.encode("utf-8")),
        settings=[item for item in run_identity(config).items() if not item[0].startswith("model.")],
        python=platform.python_version(),
        corpus=text.corpus,
        sample=text.sample,
        min_repeated=MIN_REPEATED,
        end_of_text=END_OF_TEXT,
        shares=load_shares(held_out.counts),
    )


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
