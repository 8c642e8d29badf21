"""Every compilation is in the ledger, with its cause; the same work twice compiles nothing."""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

from moejax.core.config import EngineConfig
from moejax.core.errors import CompileError
from moejax.engine.llm import LLM
from moejax.engine.opening.resolve import default_cache_dir
from moejax.engine.requests.api import SamplingParams
from moejax.engine.step.ledger import CompileLedger, Program, enable_compile_cache
from tests.engine.tiny import small_config


class Key(NamedTuple):
    batch: int
    tokens: int


def use(ledger: CompileLedger, batch: int, tokens: int, function: str = "step") -> Callable[..., Any]:
    shape = jax.ShapeDtypeStruct((batch, tokens), jnp.float32)
    return ledger.get(function, Key(batch, tokens), lambda: jax.jit(lambda x: x * 2.0), lambda: (shape,))


def test_compiles_once_per_key() -> None:
    ledger = CompileLedger()
    first = use(ledger, 1, 4)
    assert first is use(ledger, 1, 4)
    assert len(ledger.entries) == 1
    assert first(jnp.ones((1, 4))).tolist() == [[2.0] * 4]
    assert use(ledger, 1, 4, "other") is not first


def test_a_key_in_use_is_not_built_again() -> None:
    ledger = CompileLedger()
    use(ledger, 1, 4)

    def never() -> Any:
        raise AssertionError("built again")

    assert ledger.get("step", Key(1, 4), never, never) is use(ledger, 1, 4)


def test_products_of_one_row_stay_products_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """What XLA is told there, which XLA takes; on a CPU nothing, so that programs are the same as before."""
    options: list[Any] = []
    compile_ = jax.stages.Lowered.compile

    def noted(lowered: Any, compiler_options: Any = None) -> Any:
        options.append(compiler_options)
        return compile_(lowered, compiler_options)

    monkeypatch.setattr(jax.stages.Lowered, "compile", noted)
    use(CompileLedger(), 1, 4)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for overlap in (False, True):
        ledger = CompileLedger(overlap=overlap)
        assert use(ledger, 1, 4)(jnp.ones((1, 4))).tolist() == [[2.0] * 4]
    kept, scheduler = (
        {"xla_disable_hlo_passes": "dot-strength-reduction"},
        "xla_gpu_enable_latency_hiding_scheduler",
    )
    assert options == [{}, kept | {scheduler: False}, kept | {scheduler: True}]


def test_causes_name_what_changed_against_the_nearest_key() -> None:
    ledger = CompileLedger()
    for batch, tokens in ((1, 16), (2, 16), (2, 32), (8, 64)):
        use(ledger, batch, tokens)
    use(ledger, 1, 16, "other")
    ledger.get("plain", "a", lambda: jax.jit(lambda x: x), lambda: (jnp.ones(1),))
    ledger.get("plain", "b", lambda: jax.jit(lambda x: x), lambda: (jnp.ones(1),))
    assert [(entry.function, entry.cause) for entry in ledger.entries] == [
        ("step", "first use"),
        ("step", "new batch 1 -> 2"),
        ("step", "new tokens 16 -> 32"),
        ("step", "new batch 1 -> 8, tokens 16 -> 64"),
        ("other", "first use"),
        ("plain", "first use"),
        ("plain", "new key b"),
    ]


def test_what_compiles_after_the_warm_up_is_listed() -> None:
    ledger = CompileLedger()
    use(ledger, 1, 16)
    assert ledger.recompiles == []
    ledger.warmed_up = True
    use(ledger, 1, 16)
    assert ledger.recompiles == []
    use(ledger, 4, 16)
    (entry,) = ledger.recompiles
    assert entry.after_warmup and entry.key == "Key(batch=4, tokens=16)" and entry.cause == "new batch 1 -> 4"
    assert ledger.rows()[1] == {
        "function": "step",
        "key": entry.key,
        "cause": entry.cause,
        "seconds": entry.seconds,
        "after_warmup": True,
    }
    assert ledger.seconds == sum(row["seconds"] for row in ledger.rows()) > 0


def test_a_failed_compilation_leaves_no_entry() -> None:
    ledger = CompileLedger()
    with pytest.raises(TypeError):
        ledger.get("step", Key(1, 1), lambda: jax.jit(lambda x: x + "a"), lambda: (jnp.ones(1),))
    assert ledger.entries == []


def test_the_engine_compiles_once_per_bucket(llm: LLM) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    llm.score([[1, 2, 3], [4, 5]])
    before = len(llm.ledger.entries)
    llm.generate([[4, 5, 6]], params)
    llm.generate([[7] * 16], SamplingParams(temperature=0.0, max_tokens=5, seed=3, stop=["x"], top_k=3))
    llm.score([[9] * 12, [4, 5, 6]])
    list(llm.generate_stream([1, 2], params))
    assert llm.ledger.entries[before:] == []


def test_the_engine_names_the_bucket_that_is_new() -> None:
    """A longer prompt needs a step of more tokens, and nothing else."""
    llm = LLM(small_config(), load_format="dummy", engine=EngineConfig(compile_cache=False))
    params = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    llm.generate([[1, 2, 3]], params)
    before = len(llm.ledger.entries)
    llm.ledger.warmed_up = True
    try:
        llm.generate([[1] * 33], params)
        added = llm.ledger.entries[before:]
        assert [(entry.function, entry.after_warmup) for entry in added] == [("step", True)]
        assert added[0].cause.startswith("new tokens ") and added[0].cause.endswith("-> 64")
        assert llm.ledger.recompiles == added
    finally:
        llm.ledger.warmed_up = False


def test_programs_are_compiled_side_by_side_once_each() -> None:
    ledger = CompileLedger()
    told: list[tuple[int, int]] = []
    ledger.on_progress = lambda done, total: told.append((done, total))
    shape = jax.ShapeDtypeStruct((3,), jnp.float32)
    first = use(ledger, 1, 4)
    told.clear()
    wanted = [
        Program("step", Key(batch, 4), lambda by=batch: jax.jit(lambda x: x * by), lambda: (shape,))
        for batch in (1, 2, 8, 2)
    ]
    ledger.compile_all(wanted)
    assert [(entry.key, entry.cause) for entry in ledger.entries[1:]] == [
        ("Key(batch=2, tokens=4)", "new batch 1 -> 2"),
        ("Key(batch=8, tokens=4)", "new batch 1 -> 8"),
    ]
    assert told[-1] == (2, 2) and {total for _, total in told} == {2}
    assert use(ledger, 1, 4) is first
    assert [dict(ledger.programs("step"))[Key(n, 4)](jnp.ones(3))[0] for n in (2, 8)] == [2.0, 8.0]
    ledger.warmed_up = ledger.strict = True
    with pytest.raises(CompileError, match=r"Key.batch=3, tokens=4. is not compiled .new batch"):
        ledger.compile_all([wanted[0], wanted[0]._replace(key=Key(3, 4))])


def test_known_batches_are_compiled_ahead(llm: LLM) -> None:
    """Nothing is left to compile when they run, counted or not; an equal engine uses the same programs."""
    engine = llm.variant(EngineConfig(compile_cache=False, max_num_seqs=3, strict_compile=True))
    params = [SamplingParams(temperature=0.0, max_tokens=n, ignore_eos=True) for n in (9, 4)]
    batches = [([[1, 2, 3]], params[:1]), ([[4] * 40, [5] * 7], params)]
    engine.compile_for(batches, record_routing=True)
    compiled = len(engine.ledger.entries)
    assert compiled >= 4 and not engine.routing.counts["decode"].any()
    assert engine.engine.scheduler.policy.seconds_per_token == 0.0  # none has been computed
    engine.ledger.warmed_up = True
    for prompts, asked in batches:
        engine.routing.reset()
        plain = [output.outputs[0].token_ids for output in engine.generate(prompts, asked)]
        assert plain == [output.outputs[0].token_ids for output in llm.generate(prompts, asked)]
        assert not engine.routing.counts["decode"].any()
        counted = engine.generate(prompts, asked, record_routing=True)
        assert [output.outputs[0].token_ids for output in counted] == plain
        assert engine.routing.counts["decode"].any()
    twin = engine.variant(dataclasses.replace(engine.engine_config, overlap=not llm.engine_config.overlap))
    twin.ledger.warmed_up = True
    twin.runner.count_always(True)
    twin.generate(*batches[1])
    assert len(engine.ledger.entries) == compiled and twin.ledger.entries == []


@pytest.fixture
def cache_settings() -> Iterator[None]:
    names = ("jax_compilation_cache_dir", "jax_persistent_cache_min_compile_time_secs",
             "jax_persistent_cache_min_entry_size_bytes")  # fmt: skip
    before = {name: getattr(jax.config, name) for name in names}
    yield
    for name, value in before.items():
        jax.config.update(name, value)


def test_the_users_own_cache_folder_is_kept(cache_settings: None) -> None:
    jax.config.update("jax_compilation_cache_dir", "mine")
    enable_compile_cache("ours")
    assert jax.config.jax_compilation_cache_dir == "mine"
    jax.config.update("jax_compilation_cache_dir", None)
    enable_compile_cache("ours")
    assert jax.config.jax_compilation_cache_dir == "ours"
    jax.config.update("jax_compilation_cache_dir", "mine")


def test_where_programs_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEJAX_CACHE_DIR", "somewhere")
    assert default_cache_dir().startswith("somewhere")
    monkeypatch.delenv("MOEJAX_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "cache-home")
    assert default_cache_dir().startswith("cache-home")
    assert jax.__version__ in default_cache_dir()
