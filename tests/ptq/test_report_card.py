"""What a notebook shows of a quantization report."""

from moejax.ptq.report import QuantReport, StageReport, WeightReport


def report() -> QuantReport:
    weight = WeightReport(
        path="layers.0.moe.experts.up", method="gptq", format="int4_g64", shape=(2, 64, 64),
        weight_error=[0.1, 0.2], output_error=[0.05, 0.07], damping=[0.01, 0.01], damping_raised=[1],
        bits_per_weight=4.25, bytes=4352, float_bytes=32768, seconds=0.5,
    )  # fmt: skip
    stage = StageReport("layer 0", 100, [90, 10], [1], "shared", [], [weight], ["a <note>"], 0.6)
    return QuantReport("gptq", "int4_g64", 4352, 32768, 8192, 0.7, [stage])


def test_a_report_shows_what_was_done() -> None:
    page = report()._repr_html_()
    for part in (
        "quantized: gptq, int4_g64",
        "4.25",
        "15.00",
        "6.00",
        "1 experts",
        "1 matrices",
        "a &lt;note&gt;",
    ):
        assert part in page
    assert repr(report()) == "<QuantReport gptq int4_g64: 1 weights, 4.25 bits per parameter, 0.7 s>"
