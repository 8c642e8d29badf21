"""The measurement of what capturing costs, in the small."""

import json

import pytest

from moejax.bench import overhead


@pytest.mark.slow
def test_a_small_measurement(capsys: pytest.CaptureFixture[str]) -> None:
    overhead.main(["--pairs", "2", "--prompt-len", "8", "--output-len", "4", "--batch-sizes", "1", "2"])
    found = json.loads(capsys.readouterr().out)
    assert [(row["phase"], row["batch_size"]) for row in found["rows"]] == [
        ("decode", 1), ("prefill", 1), ("decode", 2), ("prefill", 2)
    ]  # fmt: skip
    for row in found["rows"]:
        assert row["low"] <= row["ratio"] <= row["high"] and row["pairs"] == 2
        # Ids and weights of five layers of four experts, and where the row belongs.
        assert row["bytes_per_token"] == 5 * 4 * (1 + 4) + 17


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--output-len", "1"], "--output-len is too small"),
        (["--batch-sizes", "0"], "--batch-sizes is too small"),
        (["--model", "tinny"], "tinny"),
        (["--prompt-len", "4000"], "max_position_embeddings"),
    ],
)
def test_mistakes_are_one_line(arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        overhead.main(arguments)
    assert error.value.code == 2
    assert text in capsys.readouterr().err.splitlines()[-1]
