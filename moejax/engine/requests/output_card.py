"""The card that a notebook shows of a request's output. No JAX here."""

from typing import TYPE_CHECKING

from moejax.core import html
from moejax.core.words import cut

if TYPE_CHECKING:
    from moejax.engine.requests.api import RequestOutput

_SHOWN = 1200  # characters of a text in a cell
_MOST_TOKENS = 24  # of a prompt or an output without text


def output_card(output: "RequestOutput") -> str:
    """Writes HTML: the prompt, every sample's text or tokens, and the request's latencies."""
    prompt = output.prompt
    if prompt is None:
        prompt = f"{len(output.prompt_token_ids)} tokens: {_tokens(output.prompt_token_ids)}"
    rows = [
        [
            cut(sample.text or _tokens(sample.token_ids), _SHOWN),
            len(sample.token_ids),
            sample.finish_reason or "running",
        ]
        for sample in output.outputs
    ]
    parts = [html.facts({"prompt": cut(prompt, _SHOWN)})]
    parts.append(html.table(("output", "tokens", "ended by"), rows, right=(1,)))
    times = output.metrics
    if times.token_times:
        parts.append(
            html.note(
                f"first token after {1e3 * times.ttft:.1f} ms, then {1e3 * times.tpot:.2f} ms each,"
                f" {1e3 * times.e2e:.1f} ms in all"
            )
        )
    if output.error:
        parts.append(html.note(output.error, color="#c00"))
    return html.card(f"request {output.request_id}", *parts)


def _tokens(ids: list[int]) -> str:
    shown = ", ".join(map(str, ids[:_MOST_TOKENS]))
    return f"{shown}, …" if len(ids) > _MOST_TOKENS else shown
