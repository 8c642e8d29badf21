"""Prints generated text: the completion on stdout, everything else on stderr."""

import json
import sys
from collections.abc import Sequence
from pathlib import Path

from moejax.core.files import atomic_write_text
from moejax.engine.llm import LLM
from moejax.engine.requests.api import RequestOutput, SamplingParams
from moejax.engine.requests.output import StreamChunk


def generate_to_console(
    llm: LLM,
    prompts: Sequence[str],
    params: SamplingParams,
    *,
    stream: bool,
    chat: bool,
    out_dir: Path,
) -> dict[str, int]:
    """Completes the prompts, keeps the outputs in `out_dir/outputs.jsonl` and returns how many they are.

    With `chat`, each prompt becomes the user's turn of the model's chat template. With `stream`, the single
    prompt's text is printed as it comes.
    """
    inputs: list[str | list[int]] = list(prompts)
    if chat:
        inputs = [llm.chat_prompt([{"role": "user", "content": prompt}]) for prompt in prompts]
    rows = []
    if stream:
        row = _stream(llm, inputs[0], params)
        rows.append({"prompt": prompts[0], "outputs": [row]})
    else:
        for prompt, output in zip(prompts, llm.generate(inputs, params), strict=True):
            _print_output(prompt, output, label=len(prompts) > 1 or params.n > 1)
            rows.append({"prompt": prompt, "outputs": [_row(sample) for sample in output.outputs]})
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    atomic_write_text(out_dir / "outputs.jsonl", text)
    return {"outputs": sum(len(row["outputs"]) for row in rows)}


def _stream(llm: LLM, prompt: str | list[int], params: SamplingParams) -> dict[str, object]:
    chunks: list[StreamChunk] = []
    for chunk in llm.generate_stream(prompt, params):
        chunks.append(chunk)
        sys.stdout.write(chunk.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    return {
        "text": "".join(chunk.text for chunk in chunks),
        "token_ids": [token for chunk in chunks for token in chunk.token_ids],
        "finish_reason": chunks[-1].finish_reason,
    }


def _print_output(prompt: str, output: RequestOutput, *, label: bool) -> None:
    for sample in output.outputs:
        if label:
            print(f"--- {prompt!r} [{sample.index}]", file=sys.stderr)
        print(sample.text)


def _row(sample: object) -> dict[str, object]:
    return {name: getattr(sample, name) for name in ("text", "token_ids", "finish_reason")}
