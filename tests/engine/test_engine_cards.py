"""What a notebook shows of an engine and of an output."""

import jax
from flax import nnx

from moejax import notebook
from moejax.checkpoint.directory import resolve_model_dir
from moejax.engine.llm import LLM
from moejax.engine.requests.api import CompletionOutput, RequestMetrics, RequestOutput
from moejax.engine.requests.tokenizer import Tokenizer
from moejax.models.decoder import Decoder
from moejax.nn.param import num_params


def output(prompt: str | None = "a <b>", text: str = "x & y", **fields: object) -> RequestOutput:
    sample = CompletionOutput(0, text, [5, 6, 7], finish_reason="length")
    metrics = RequestMetrics(1.0, token_times=[1.5, 1.75, 2.0])
    return RequestOutput("7", prompt, list(range(100)), [sample], metrics, finished=True, **fields)  # type: ignore[arg-type]


def test_an_output_shows_texts_and_times() -> None:
    page = output()._repr_html_()
    assert "request 7" in page and "a &lt;b&gt;" in page and "x &amp; y" in page and "length" in page
    assert "first token after 500.0 ms, then 250.00 ms each, 1000.0 ms in all" in page


def test_an_output_without_text_shows_tokens() -> None:
    page = output(prompt=None, text="")._repr_html_()
    assert "100 tokens: 0, 1, 2" in page and "99" not in page and "5, 6, 7" in page


def test_an_unfinished_output_and_a_failed_one() -> None:
    waiting = output(error="no <room>")
    waiting.outputs[0].finish_reason, waiting.metrics = None, RequestMetrics(1.0)
    page = waiting._repr_html_()
    assert "running" in page and "first token" not in page and "no &lt;room&gt;" in page


def test_an_engine_shows_its_model_and_choices(bare_llm: LLM) -> None:
    page = bare_llm._repr_html_()
    assert f"{num_params(bare_llm.model):,} parameters" in page
    assert f"top-{bare_llm.config.num_experts_per_tok}" in page
    for resolution in bare_llm.resolutions:
        assert resolution.key in page
    assert repr(bare_llm).startswith(f"<LLM {bare_llm.config.family}: ") and "\n" not in repr(bare_llm)


def test_reprs_are_one_short_line(bare_llm: LLM) -> None:
    done = output()
    assert repr(done) == "<RequestOutput 7: 100 tokens in, 3 out (length); TTFT 500.0 ms, TPOT 250.00 ms>"
    assert "token_times" not in repr(done.metrics)
    config = bare_llm.config
    decoder = f"<Decoder {config.family}: {config.num_layers} layers, {config.num_experts} experts (top-"
    assert repr(bare_llm.model).startswith(decoder)
    record = f"<RoutingRecord: {config.num_layers} layers, {config.num_experts} experts; "
    assert repr(bare_llm.routing).startswith(record)
    assert repr(Tokenizer.load(resolve_model_dir("tiny"))) == "<Tokenizer: 2,048 tokens, a chat template>"
    assert max(map(len, map(repr, (done, done.metrics, bare_llm.model, bare_llm.routing)))) < 110


def test_an_engine_is_shown_as_its_model_and_keeps_its_weights(bare_llm: LLM) -> None:
    shown = notebook.show(bare_llm).value
    assert type(shown) is Decoder and shown is not bare_llm.model
    leaves = jax.tree.leaves(nnx.state(shown))
    assert leaves and all(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in leaves)
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(nnx.state(bare_llm.model)))
