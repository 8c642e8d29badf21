"""A profile that jax.profiler really writes, of a small program with a loop, read back and shared out."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from moejax.bench.profile.attribute import attribute_trace
from moejax.bench.profile.config import ProfileSection, ProfileWorkload
from moejax.bench.profile.program import place_of, read_program
from moejax.bench.profile.trace import SPAN, TraceError, find_trace, read_trace
from moejax.core.errors import ConfigError
from moejax.core.moe import MoeConfig
from moejax.models.decoder import Decoder
from tests.perf.models import small_model


def step(x: jax.Array) -> jax.Array:
    with jax.named_scope("layer_0"):
        with jax.named_scope("qkv_projection"):
            x = jnp.tanh(x @ x)
        with jax.named_scope("experts_dispatch"):

            def body(i: jax.Array, x: jax.Array) -> jax.Array:
                with jax.named_scope("experts_down"):
                    return jnp.tanh(x @ x) * (i + 1).astype(x.dtype)

            x = jax.lax.fori_loop(0, jnp.argmax(x[0]) % 2 + 3, body, x)
    with jax.named_scope("lm_head"):
        return jnp.sort(x, axis=1)


@pytest.mark.optimized
def test_a_real_trace(tmp_path: Path) -> None:
    x = jnp.asarray(np.random.default_rng(0).standard_normal((96, 96)), jnp.float32)
    compiled = jax.jit(step).lower(x).compile()
    jax.block_until_ready(compiled(x))
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0
    with jax.profiler.trace(str(tmp_path), profiler_options=options):
        for _ in range(2):
            with jax.profiler.TraceAnnotation(SPAN):
                for _ in range(3):
                    jax.block_until_ready(compiled(x))
    trace = read_trace(find_trace(tmp_path))
    assert len(trace.spans) == 2
    found = attribute_trace(trace, [read_program("step", False, compiled.as_text())])
    times = found["decode"]
    assert (found["prefill"].measured, times.measured, times.units) == (0, 6, 4)
    spent = times.by_operation()
    assert {"qkv_projection", "experts_down", "lm_head"} <= {name for name, ns in spent.items() if ns > 0}
    assert sum(spent.values()) == pytest.approx(times.wall) and times.wall > 0
    # The loop turns three or four times a step.
    turns = [
        count for (_, name), count in times.executions.items() if times.places[_, name][0] == "experts_down"
    ]
    assert max(turns) in (3 * times.steps, 4 * times.steps)


def products(jaxpr: Any, outer: str = "") -> Iterator[str]:
    """The name stack of every matrix product, those of loops and inner functions below their callers'."""
    for equation in jaxpr.eqns:
        stack = f"{outer}/{equation.source_info.name_stack}"
        if equation.primitive.name == "dot_general":
            yield f"{stack}/dot_general"
        for value in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                yield from products(inner, stack)


@pytest.mark.parametrize("how", ["blocks_uniform", "blocks_mixed", "ragged_dot", "capacity", "dense"])
def test_every_product_of_the_model_has_its_scope(how: str) -> None:
    """No matrix product is without its operation, and those in layers know theirs."""
    config = small_model(num_layers=2, moe_layers=(True, False), sliding_windows=(None, None), qk_norm="head")
    plain: Any = {"execution": how} if how in ("capacity", "dense") else {"grouped_matmul": how}
    graph, state = nnx.split(Decoder(config, moe=MoeConfig(**plain)))
    jaxpr = jax.make_jaxpr(lambda state, tokens: nnx.merge(graph, state)(tokens))(
        state, jnp.zeros((1, 4), jnp.int32)
    )
    attention = {"qkv_projection", "attention", "output_projection"}
    # A ragged product is a primitive of its own.
    experts = set() if how == "ragged_dot" else {"experts_gate_up", "experts_down"}
    found = {place_of(stack)[:2] for stack in products(jaxpr.jaxpr)}
    assert found == {("lm_head", None), ("mlp", 1)} | {(name, i) for name in attention for i in (0, 1)} | {
        (name, 0) for name in {"router", "shared_expert", *experts}
    }


def test_no_trace(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"has left no \.xplane\.pb under"):
        find_trace(tmp_path)
    (tmp_path / "broken.xplane.pb").write_bytes(b"\xff\xff not a profile")
    with pytest.raises(TraceError, match=r"cannot read the profile|has no event of a compiled program"):
        read_trace(find_trace(tmp_path))
    (tmp_path / "empty.xplane.pb").write_bytes(b"")
    with pytest.raises(TraceError, match="has no event of a compiled program"):
        read_trace(tmp_path / "empty.xplane.pb")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"output_len": 3}, "gives 2 decode steps, too few for a profile; take at least 5"),
        ({"batch_size": 0}, "workload.batch_size must be an integer of at least 1"),
        ({"iterations": "two"}, "workload.iterations must be"),
        ({"prompts_file": "no/such/file"}, "there is no file"),
    ],
)
def test_workloads_that_make_no_profile(change: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        ProfileWorkload(**change)  # type: ignore[arg-type]


def test_devices_to_compare_with() -> None:
    with pytest.raises(ConfigError, match="unknown device with a data sheet 'h10'; did you mean 'h100'"):
        ProfileSection(compare=("h10",))
    with pytest.raises(ConfigError, match=r"'cpu'.*known: a100_80gb, .*h100, h200"):
        ProfileSection(compare=("cpu",))
