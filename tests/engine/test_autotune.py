"""Products of experts chosen by time: what is stored, what is taken, and that tokens stay the same."""

import dataclasses
import itertools
import json
from pathlib import Path

import numpy as np
import pytest

from moejax.core.config import EngineConfig
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig, Product, TunedMoe
from moejax.core.parallel import ParallelConfig
from moejax.core.quant import QuantConfig
from moejax.engine.llm import LLM
from moejax.engine.opening import autotune
from moejax.engine.opening.autotune import Timed, best, candidates, choose_products, measure, step_sizes
from moejax.engine.opening.resolve import resolve
from moejax.engine.requests.api import SamplingParams
from pallas_kernels.tuned import read_table
from tests.engine.tiny import small_config

MODEL = small_config()
RULES = MoeConfig(expert_layout="efd")
ENGINE = EngineConfig(max_num_seqs=4, max_num_batched_tokens=8, max_model_len=32, compile_cache=False)
MEASURE = dataclasses.replace(ENGINE, autotune="measure")


@pytest.fixture(autouse=True)
def own_tables(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MOEJAX_CACHE_DIR", str(tmp_path))


def timed(edf: float, efd: float, rules: float = 100.0) -> list[Timed]:
    """A step of 4 and one of 1 tokens, in microseconds: "edf" batched, "efd" as the rules have it."""
    rows = []
    for tokens in (4, 1):
        rows.append(Timed("edf", Product(tokens, "batched", 2), edf, 2 * edf))
        rows.append(Timed("efd", Product(tokens, "auto", None), efd, rules))
    return rows


def test_a_product_replaces_the_rules_beyond_noise_only() -> None:
    rules, noisy, sure, small = (Product(1, name, None) for name in ("auto", "a", "b", "c"))
    base = np.array([10.0, 11.0, 9.0, 10.0, 10.0])
    slow_at_times = np.array([8.0, 8.0, 8.0, 20.0, 20.0])
    seconds = {rules: base, noisy: slow_at_times * 1e-3 + slow_at_times, sure: base * 0.9, small: base * 0.98}
    assert best(seconds) == (sure, 9e6, 10e6)
    assert best({rules: base, noisy: slow_at_times, small: base * 0.98})[0] == rules


def test_what_was_measured_is_stored_and_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[int]] = []

    def fake(model, steps, budget_s):
        asked.append(list(steps))
        return [each for each in timed(edf=50.0, efd=100.0) if each.product.tokens in steps]

    monkeypatch.setattr(autotune, "measure", fake)
    assert step_sizes(ENGINE) == [1, 8, 4]
    moe, why = choose_products(MODEL, RULES, ENGINE, None)
    assert moe == RULES and why.value == "rules" and "engine.autotune=measure takes them" in why.reason

    moe, why = choose_products(MODEL, RULES, MEASURE, None)
    assert isinstance(moe, TunedMoe) and moe.expert_layout == "edf"
    assert why.value == "edf 1:batched:2 4:batched:2" == moe.choices
    assert "2.00 of the rules' speed" in why.reason and "1: 100 -> 50, 4: 100 -> 50" in why.reason
    # Of other runs: the same without measuring; measuring again only what the budget left out.
    assert choose_products(MODEL, RULES, ENGINE, None) == (moe, why)
    assert choose_products(MODEL, RULES, MEASURE, None)[0] == moe
    assert asked == [[1, 8, 4], [8]]
    rules = dataclasses.replace(ENGINE, autotune="rules")
    assert choose_products(MODEL, RULES, rules, None)[1].reason == "asked for"
    # Another shape has no times.
    assert choose_products(MODEL.replace(num_experts=16), RULES, ENGINE, None)[0] == RULES


def test_a_damaged_table_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", lambda *args: timed(edf=50.0, efd=100.0))
    choose_products(MODEL, RULES, MEASURE, None)
    (table,) = autotune.measured_tables().glob("*/*.json")
    for text in ("{", "[]", '{"entries": [{"problem": {}}]}'):
        table.write_text(text)
        read_table.cache_clear()
        with pytest.raises(ConfigError, match=r"engine\.autotune: .*remove the file") as caught:
            choose_products(MODEL, RULES, ENGINE, None)
        assert str(table) in str(caught.value)
    read_table.cache_clear()


def test_the_layout_stays_unless_the_other_gains(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autotune, "measure", lambda *args: timed(edf=98.0, efd=100.0))
    moe, why = choose_products(MODEL, RULES, MEASURE, None)
    assert moe.expert_layout == "efd" and why.value == "efd 1:auto 4:auto"


def test_prompts_do_not_pay_for_decodes(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layout that is faster on the whole and slower at one size stays out."""
    rows = [row._replace(us=125.0) if row[:2] == ("edf", Product(1, "batched", 2)) else row
            for row in timed(edf=25.0, efd=100.0)]  # fmt: skip
    monkeypatch.setattr(autotune, "measure", lambda *args: rows)
    assert choose_products(MODEL, RULES, MEASURE, None)[0].expert_layout == "efd"


def test_a_step_takes_the_nearest_product() -> None:
    products = [Product(1, "auto", None), Product(8, "batched", 2), Product(512, "blocks_uniform", 64)]
    moe = TunedMoe.of(RULES, "edf", products)
    assert [moe.product(n) for n in (1, 2, 3, 8, 63, 65, 4096)] == [
        products[at] for at in (0, 0, 1, 1, 1, 2, 2)
    ]
    assert TunedMoe.parse(RULES, moe.choices, "key") == moe
    for wrong in (
        "",
        "edf",
        "edf 1",
        "edf 0:auto",
        "edf 8:batched:0",
        "edf x:auto",
        "edf 1:nothing",
        "middle 1:auto",
    ):
        with pytest.raises(ConfigError, match="key"):
            TunedMoe.parse(RULES, wrong, "key")


def test_measuring_ends_with_its_budget() -> None:
    """A second a look at the clock: the first size is measured, of the second nothing is kept."""
    tick = itertools.count()
    layouts = [len(list(candidates(2, MODEL, layout))) for layout in ("edf", "efd")]
    looks = 1 + sum(layouts) * (1 + 2 * autotune.ROUNDS)
    found = measure(MODEL, [2, 1], looks + 1, clock=lambda: float(next(tick)))
    assert [(each.layout, each.product.tokens) for each in found] == [("edf", 2), ("efd", 2)]
    # All take one second: none gains.
    assert {each.product.implementation for each in found} == {"auto"}
    assert all(each.us == each.rules_us == 1e6 / sum(MODEL.moe_layers) for each in found)


REFUSALS = [
    ({"engine": dataclasses.replace(ENGINE, moe=MoeConfig(grouped_matmul="batched"))}, "engine.moe says"),
    ({"engine": dataclasses.replace(ENGINE, moe=MoeConfig(execution="dense"))}, "engine.moe says what runs"),
    ({"quant": QuantConfig(method="rtn", format="int8")}, "only products of float weights"),
    ({"parallel": ParallelConfig(tp=2)}, "timed for one device"),
]


@pytest.mark.parametrize(("options", "why"), REFUSALS, ids=[why for _, why in REFUSALS])
def test_where_nothing_is_tuned_the_reason_says_so(options: dict, why: str) -> None:
    resolved = resolve(MODEL, load_format="dummy", **{"engine": MEASURE} | options)
    (found,) = (each for each in resolved.resolutions if each.key == "engine.autotune")
    assert found.value == "rules" and why in found.reason
    pinned = dataclasses.replace(options.get("engine", ENGINE), autotune_choices="run")
    with pytest.raises(ConfigError, match="nothing is tuned here") as caught:
        resolve(MODEL, load_format="dummy", **options | {"engine": pinned})
    assert str(caught.value).startswith("engine.autotune_choices=run: ") and why in str(caught.value)


def test_choices_of_another_run_give_the_same_tokens(tmp_path: Path) -> None:
    """Products differ in the order of their sums; greedy tokens are the plain path's."""
    prompts, params = [[5, 6, 7, 8, 9], [11, 12]], SamplingParams(max_tokens=4, ignore_eos=True)
    plain = LLM(MODEL, load_format="dummy", engine=ENGINE)
    result = {"resolved": {"engine.autotune": {"value": "edf 1:batched:1 4:batched 8:blocks_uniform:2"}}}
    (tmp_path / "result.json").write_text(json.dumps(result))
    engine = dataclasses.replace(ENGINE, autotune_choices=str(tmp_path))
    pinned = LLM(MODEL, load_format="dummy", engine=engine)
    reasons = {each.key: each for each in pinned.resolutions}
    assert reasons["engine.moe.expert_layout"].value == "edf"
    assert reasons["engine.autotune"].reason == f"those of {tmp_path}"
    expected, out = (llm.generate(prompts, params) for llm in (plain, pinned))
    assert [each.outputs[0].token_ids for each in out] == [each.outputs[0].token_ids for each in expected]


@pytest.mark.parametrize("content", [None, "{", "{}", '{"resolved": {"engine.autotune": {"value": "x y"}}}'])
def test_a_run_without_choices_is_one_line(content: str | None, tmp_path: Path) -> None:
    if content is not None:
        (tmp_path / "result.json").write_text(content)
    engine = dataclasses.replace(ENGINE, autotune_choices=str(tmp_path))
    with pytest.raises(ConfigError, match=r"engine\.autotune_choices") as caught:
        resolve(MODEL, load_format="dummy", engine=engine)
    assert "\n" not in str(caught.value)
