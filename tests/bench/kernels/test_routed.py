"""mode=bench with a trace: the grouped products' specs have the group sizes of its steps."""

from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from moejax.bench.kernels.bench import run_bench
from moejax.bench.kernels.config import BenchSection, KernelSelection
from moejax.bench.kernels.routed import OPS, pick_steps, select_routed
from moejax.core.errors import ConfigError, DeviceError
from moejax.routing.capture import RoutingCapture
from moejax.routing.generate import generate
from pallas_kernels.group_specs import lay_out
from tests.bench.runs import run_into


@pytest.fixture(scope="module")
def trace() -> RoutingCapture:
    return generate(
        "zipf", num_experts=16, top_k=4, layers=5, requests=6, prompt_len=10, output_len=9, exponent=1.0
    )


@pytest.fixture(scope="module")
def path(trace: RoutingCapture, tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(trace.save(tmp_path_factory.mktemp("trace") / "routing.npz"))


def selection(path: str, model: str | None = "tiny", **changes: Any) -> KernelSelection:
    return KernelSelection(mode="bench", bench=BenchSection(routing=path, routing_model=model), **changes)


def test_steps_go_from_even_to_skewed(trace: RoutingCapture) -> None:
    for phase, tokens in (("decode", 6), ("prefill", 60)):
        steps = pick_steps(trace, phase, 3)
        assert len(steps) == 3 and [len(s.ids) for s in steps] == [tokens] * 3
        assert steps[0].skew < steps[1].skew < steps[2].skew
        every = pick_steps(trace, phase, 1000)
        assert len(every) == (8 if phase == "decode" else 1) * 5
        assert (every[0].skew, every[-1].skew) == (steps[0].skew, steps[2].skew)
        own = trace.ids[trace.step == steps[1].step, steps[1].layer]
        np.testing.assert_array_equal(steps[1].ids, own)
    assert pick_steps(trace.phase("decode"), "prefill", 3) == []


def test_specs_have_the_traces_groups_and_the_models_widths(trace: RoutingCapture, path: str) -> None:
    found = {item.op.name: item for item in select_routed(selection(path))}
    assert tuple(found) == OPS
    for name, item in found.items():
        assert item.implementations == tuple(item.op.implementations)
        formats = 2 if name.startswith("quantized") else 1
        assert len(item.specs) == 6 * formats and len({s.name for s in item.specs}) == 6 * formats
    for item in found.values():
        spec = item.specs[0]
        _, size, routing = spec.name.split("/")[:3]
        step, layer = (int(part.strip("abcdefghijklmnopqrstuvwxyz")) for part in routing.split("_")[1:])
        ids = trace.ids[trace.step == step, layer].astype(np.int32)
        assert size == "decode_6" and spec.tags >= {"tiny", "decode", "tokens_6"}
        want = lay_out(ids, 16, int(spec.static["block_m"]))
        assert (spec.problem["P"], spec.problem["E"], spec.problem["D"]) == (
            len(want.row_assignment),
            16,
            128,
        )
        arrays = spec.make(jax.random.key(0))
        np.testing.assert_array_equal(arrays["block_expert"], want.block_expert)
        np.testing.assert_array_equal(arrays["num_blocks"], want.num_blocks)
        hit = len(np.unique(ids))
        assert want.counts.sum() == 24 and (want.counts > 0).sum() == hit
        matrices = 2 if item.op.name.endswith("swiglu") else 1
        assert spec.cost.flops == 2.0 * 24 * 128 * 128 * matrices


def test_names_and_parts_select_among_them(path: str) -> None:
    some = select_routed(
        selection(path, ops=["grouped_swiglu"], specs=["prefill"], implementations=["pallas_triton"])
    )
    assert [item.op.name for item in some] == ["grouped_swiglu"]
    assert some[0].implementations == ("pallas_triton",) and len(some[0].specs) == 3
    with pytest.raises(
        ConfigError, match=r"'rms_norm' has no groups of experts; bench\.routing is for grouped"
    ):
        select_routed(selection(path, ops=["rms_norm"]))
    with pytest.raises(
        ConfigError, match="unknown implementation 'pallas_trito'; did you mean 'pallas_triton'"
    ):
        select_routed(selection(path, implementations=["pallas_trito"]))
    with pytest.raises(
        ConfigError, match=r"none of the trace's has decode_7 in its name; they are tiny/decode_6"
    ):
        select_routed(selection(path, specs=["decode_7"]))


def test_widths_are_the_kernels_own_where_they_fit(path: str, tmp_path: Path) -> None:
    other = generate("uniform", num_experts=64, top_k=8, layers=1, requests=2, prompt_len=1, output_len=2)
    file = str(other.save(tmp_path / "olmoe.npz"))
    specs = [spec for item in select_routed(selection(file, None)) for spec in item.specs]
    assert {spec.name.split("/")[0] for spec in specs} == {"olmoe_1b_7b"}
    with pytest.raises(
        ConfigError, match=r"visit 4 of 16 experts,.*olmoe_1b_7b 8 of 64.*bench\.routing_model=tiny"
    ):
        select_routed(selection(path, None))
    with pytest.raises(ConfigError, match=r"those of bench\.routing_model=mixtral_8x7b 2 of 8"):
        select_routed(selection(path, "mixtral_8x7b"))
    with pytest.raises(ConfigError, match=r"bench\.routing_model: unknown model 'tinny'.*qwen3_30b_a3b"):
        select_routed(selection(path, "tinny"))


def test_without_a_gpu_the_trace_is_read_first(path: str, tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="times kernels on a CUDA device"):
        run_bench(selection(path), run_into(tmp_path / "run", "kernels"))
    with pytest.raises(ConfigError, match="no shape of the kernels'"):
        run_bench(selection(path, None), run_into(tmp_path / "run", "kernels"))
    assert not (tmp_path / "run").exists()


def test_keys_that_do_not_go_together_are_refused(path: str) -> None:
    with pytest.raises(ConfigError, match=r"bench\.routing is for mode=bench, and this is mode=static"):
        KernelSelection(bench=BenchSection(routing=path))
    with pytest.raises(ConfigError, match=r"bench\.routing=gone: there is no such file"):
        selection("gone")
    with pytest.raises(ConfigError, match=r"bench\.routing_model names the widths for bench\.routing"):
        KernelSelection(mode="bench", bench=BenchSection(routing_model="tiny"))
