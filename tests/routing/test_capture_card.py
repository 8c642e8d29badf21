"""What a notebook shows of a routing trace."""

import dataclasses

from moejax.routing.generate import generate


def test_a_trace_shows_its_size_and_skew() -> None:
    trace = generate("zipf", num_experts=8, top_k=2, layers=3, requests=2, prompt_len=4, output_len=6)
    trace = dataclasses.replace(trace, meta={"model": "<tiny>"})
    page = trace._repr_html_()
    assert "routing trace (generated)" in page and "&lt;tiny&gt;" in page and "top-2 of 8 experts" in page
    busiest = int(trace.counts()[0].argmax())
    assert f">{busiest} (" in page
    assert repr(trace) == (
        f"<RoutingCapture generated: {trace.num_rows} rows of 2 requests in {trace.num_steps} steps,"
        " 3 layers, top-2 of 8 experts>"
    )


def test_many_layers_are_cut_and_an_empty_trace_is_shown() -> None:
    trace = generate("uniform", num_experts=4, top_k=1, layers=40, requests=1, prompt_len=2, output_len=2)
    assert "16 more layers" in trace._repr_html_() and trace._repr_html_().count("<tr>") < 40
    assert "0 tokens" in trace.select(slice(0, 0))._repr_html_()
