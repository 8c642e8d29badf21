"""`experiments.program`: reading XLA's dumps, rows by layer, mistakes; with the compiler, a whole run.

`program_dump.json` is the dump of Qwen3-30B-A3B's step of one row for an A100, of one layer, without what is
not read.
"""

import dataclasses
import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments.launch.app import launch
from experiments.program import main
from moejax import notebook
from moejax.bench.program.compiler import FOLDER, describe, device_name
from moejax.bench.program.config import ProgramSection
from moejax.bench.program.dump import Dump, alive, occupancy, read_dump, read_folder
from moejax.bench.program.job import Bucket, Compiled, Opened
from moejax.bench.program.rows import detail_of, grouped_rows, layer_counts, row_of, stage_counts
from moejax.bench.program.run import _TABLES, _kernels
from moejax.bench.program.worker import first_layers
from moejax.core.errors import CompileError, ConfigError
from moejax.core.hardware import KNOWN
from moejax.report.experiments import print_result, save_plots
from moejax.report.program_graph import MemoryPlan, plan_memory
from tests.gpu_compiler import needs_gpu_compiler
from tests.model_shapes import ONE_LAYER

MODEL = ONE_LAYER.replace(
    num_layers=48, moe_layers=(True,) * 48, sliding_windows=(None,) * 48, dtype="bfloat16"
)
TEXTS = json.loads((Path(__file__).parent / "program_dump.json").read_text())
ASSEMBLER = """ptxas info    : Compiling entry function 'grouped_swiglu' for 'sm_80'
ptxas info    : Function properties for grouped_swiglu
    8 bytes stack frame, 4 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 400 bytes cmem[0]
"""
PTX = """
.visible .entry grouped_swiglu(
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r1};
	mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%r2};
"""


@pytest.fixture(scope="module")
def dump() -> Dump:
    return read_dump(TEXTS, PTX, ASSEMBLER)


def test_a_program_is_a_graph(dump: Dump, tmp_path: Path) -> None:
    temp = max(b.offset + b.size for b in dump.buffers if b.memory == "temporary")
    program = detail_of(Compiled("1", Bucket(1, 0), 1, 1, dump, {}, {"temp": temp}, {}))
    (tmp_path / "program.json").write_text(json.dumps({"programs": [program]}))
    graph = notebook.program_graph(tmp_path, "1")
    nodes = {node["kernel"]: node for node in graph.shown}
    assert nodes["grouped_swiglu"]["number"] in nodes["grouped_matmul"]["reads"]
    assert nodes["rope_kv_write"]["in_place"] == ["argument"]
    rules = {row["rule"]: row for row in graph.rules()}
    assert rules["gate and up products, activation"]["apart"] == []
    router = rules["norm, router's product, choice, placement"]["apart"]
    assert any(line.startswith("topk_router → ") for line in router)
    assert 0 < graph.plan.live <= graph.plan.best_fit <= graph.plan.allocated == temp
    assert "rope_kv_write  ⟲ argument" in graph._repr_html_()
    for bucket, layer, said in (("2", 0, "unknown step '2'"), ("1", 1, "layer 1: 1 were compiled")):
        with pytest.raises(ConfigError, match=said):
            notebook.program_graph(tmp_path, bucket, layer)
    with pytest.raises(ConfigError, match="is not there"):
        notebook.program_graph(tmp_path / "none")


def test_memory_is_planned_around_lifetimes() -> None:
    """A and C never live together, B with both; D takes A's place while A still lives."""
    spans = {"A": (4, 0, 0, 1), "B": (2, 4, 1, 3), "C": (3, 8, 2, 3), "D": (4, 0, 1, 1)}
    values = [dict(zip(("size", "offset", "start", "end"), span, strict=True)) for span in spans.values()]
    assert plan_memory(values, 11) == MemoryPlan(live=6, best_fit=6, allocated=11)


def test_launches_are_in_their_layers_and_operations(dump: Dump) -> None:
    layer = [launch for launch in dump.launches if launch.layer == 0]
    counts = {name: sum(x.operation == name for x in layer) for name in ("qkv_projection", "router", "norm")}
    assert counts == {"qkv_projection": 4, "router": 4, "norm": 4}
    assert (len(dump.launches), len(layer), dump.command_buffers, dump.host_syncs) == (35, 21, 1, 0)
    assert all(launch.captured for launch in dump.launches)
    swiglu = next(launch for launch in layer if launch.kernel == "grouped_swiglu")
    assert (swiglu.operation, swiglu.blocks, swiglu.threads) == ("experts_gate_up", 192, 128)
    assert swiglu.products == 2
    assert (swiglu.registers, swiglu.stack, swiglu.spill_stores, swiglu.spill_loads) == (40, 8, 4, 12)
    assert layer[0].registers is None, "the assembler did not speak of it"


def test_a_product_of_one_row_makes_float32_copies_of_weights(dump: Dump) -> None:
    """Keys', values' and the router's weights, read as bfloat16 and written as float32 for a sum."""
    assert dump.f32_copies == 4 * (2 * 2048 * 512 + 2048 * 128)
    written = {launch.kernel: launch.written_bytes for launch in dump.launches}
    assert written["loop_multiply_fusion"] == 2 * 4 * 2048 * 512
    gathered = next(launch for launch in dump.launches if launch.operation == "embedding")
    assert gathered.read_bytes < 5000, "a row of the table, not all of it"


def test_the_cache_is_updated_in_its_place(dump: Dump) -> None:
    assert dump.pool_copies == 0 and dump.donated_bytes == 2 * 2048 * 4 * 32 * 128 * 2 + 65 * 4
    write = next(launch for launch in dump.launches if launch.kernel == "rope_kv_write")
    assert write.written_bytes == 32 * 128 * 2, "the turned queries alone"
    moved = TEXTS["buffers"].replace(", parameter 15", "")
    copied = read_dump(TEXTS | {"buffers": moved})
    assert copied.pool_copies == 2 * 2048 * 4 * 32 * 128 * 2, "argument and result of what was one place"


def test_parts_of_tuples_as_newer_versions_write_them(dump: Dump) -> None:
    """`%call#1` in place of a get-tuple-element."""
    part = re.compile(r"^ *%([\w.\-]+) = .* get-tuple-element\(.*?%([\w.\-]+)\), index=(\d+).*\n", re.M)
    names = {name: f"%{of}#{index}" for name, of, index in part.findall(TEXTS["hlo"])}
    assert names
    hlo = re.sub(r"%([\w.\-]+)", lambda m: names.get(m[1], m[0]), part.sub("", TEXTS["hlo"]))
    assert read_dump(TEXTS | {"hlo": hlo}, PTX, ASSEMBLER).launches == dump.launches


def test_memory_over_the_schedule_ends_at_what_is_alive_at_the_peak(dump: Dump) -> None:
    use = occupancy(dump.buffers)
    peak = use.index(max(use))
    values = alive(dump.buffers, peak)
    assert max(use) == sum(value.size for value in values)
    assert [(value.operation, value.size) for value in values[:2]] == [("qkv_projection", 4 * 2048 * 512)] * 2


COLLECTIVES = """HloModule m, is_scheduled=true, entry_computation_layout={}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %start = f32[8]{0} all-reduce-start(%p), metadata={op_name="layer_0/psum"}
  %work = f32[8]{0} custom-call(%p), metadata={op_name="layer_0/router/x"}
  %done = f32[8]{0} all-reduce-done(%start)
  %next = f32[8]{0} all-gather-start(%done)
  ROOT %end = f32[8]{0} all-gather-done(%next)
}
"""


def _metadata(*thunks: tuple[str, str]) -> str:
    info = 'thunk_metadata {{\n  thunk_info {{\n    profile_annotation: "{}"\n  }}\n  thunk_kind: "{}"\n}}\n'
    return "".join(info.format(*thunk) for thunk in thunks)


def test_collectives_with_work_beside_them_and_launches_outside_of_graphs() -> None:
    thunks = (
        "000: kAllReduceStart [source] x\n001: kCommandBuffer\n"
        "    002: kCustomKernel work grid: [2, 3, 1] threads: [64, 1, 1]  shared_memory: 16 bytes\n"
        "003: kAllReduceDone x\n004: kAllGatherStart x\n005: kAllGatherDone x\n006: kConditional x\n"
    )
    named = (
        ("start", "kAllReduceStart"), ("b", "kCommandBuffer"), ("work", "kCustomKernel"),
        ("done", "kAllReduceDone"), ("next", "kAllGatherStart"), ("end", "kAllGatherDone"),
        ("if", "kConditional"),
    )  # fmt: skip
    texts = {"hlo": COLLECTIVES, "live": "", "buffers": "", "thunks": thunks, "metadata": _metadata(*named)}
    dump = read_dump(texts)
    reduce, work, gather = dump.launches
    assert (reduce.kind, reduce.beside, reduce.captured, reduce.layer) == ("all-reduce", 1, False, 0)
    assert (reduce.overlapped, reduce.independent, gather.overlapped, gather.independent) == (
        True,
        1,
        False,
        1,
    )
    assert (work.blocks, work.threads, work.shared, work.captured, work.beside) == (6, 64, 16, True, None)
    assert (gather.kind, gather.beside, gather.read_bytes) == ("all-gather", 0, 32)
    assert dump.host_syncs == 1
    with pytest.raises(CompileError, match="do not agree"):
        read_dump(texts | {"metadata": _metadata(*named[1:])})


BRANCHES = """HloModule m, is_scheduled=true, entry_computation_layout={}

%wrapped (x: f32[16]) -> f32[2] {
  %x = f32[16]{0} parameter(0)
  ROOT %scatter = f32[2]{0} reduce-scatter(%x)
}

%even (y: f32[16]) -> f32[2] {
  %y = f32[16]{0} parameter(0)
  %half = f32[8]{0} custom-call(%y), metadata={op_name="layer_1/experts_down/x"}
  %start = ((f32[16]{0}), f32[2]{0}) async-start(%y), calls=%wrapped
  %other = f32[8]{0} custom-call(%y)
  %done = f32[2]{0} async-done(%start)
  ROOT %sum = f32[2]{0} custom-call(%half, %other, %done)
}

%worst (z: f32[16]) -> f32[2] {
  %z = f32[16]{0} parameter(0)
  ROOT %all = f32[2]{0} custom-call(%z)
}

ENTRY %main (p: f32[16], i: s32[]) -> f32[2] {
  %p = f32[16]{0} parameter(0)
  %i = s32[] parameter(1)
  ROOT %switch = f32[2]{0} conditional(%i, %p, %p), branch_computations={%even, %worst}
}
"""


def test_of_a_conditional_the_first_branch_counts_with_its_collectives() -> None:
    thunks = """006: kConditional   [source | sink]
  branch_0:
    001: kCustomKernel [source] half grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
    003: kAsyncStart   [source] stream=communication_stream[0]
        002: kReduceScatter [source] kReduceScatter
    000: kCommandBuffer [source]
        004: kCustomKernel [source] other grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
    005: kAsyncDone    [source] x
    007: kCustomKernel [source] sum grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
  branch_1:
    000: kCommandBuffer [source]
        008: kCustomKernel [source] all grid: [1, 1, 1] threads: [8, 1, 1]  shared_memory: 0 bytes
"""
    named = (
        ("switch", "kConditional"), ("half", "kCustomKernel"), ("start", "kAsyncStart"),
        ("scatter", "kReduceScatter"), ("b", "kCommandBuffer"), ("other", "kCustomKernel"),
        ("done", "kAsyncDone"), ("sum", "kCustomKernel"), ("c", "kCommandBuffer"), ("all", "kCustomKernel"),
    )  # fmt: skip
    texts = {"hlo": BRANCHES, "live": "", "buffers": "", "thunks": thunks, "metadata": _metadata(*named)}
    dump = read_dump(texts)
    assert [launch.kernel for launch in dump.launches] == ["half", "start", "other", "sum"]
    assert [launch.captured for launch in dump.launches] == [False, False, True, False]
    scatter = dump.launches[1]
    assert (scatter.kind, scatter.read_bytes, scatter.beside, scatter.independent) == (
        "reduce-scatter",
        64,
        1,
        2,
    )
    assert (dump.command_buffers, dump.host_syncs) == (1, 1)


def test_another_versions_dump_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(CompileError, match=r"XLA dumped 0 files .* jaxlib 0\.10\.2 to"):
        read_folder(tmp_path, "")


# --- rows -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("windows", "sparse", "counts"),
    [
        ((None,) * 48, (True,) * 48, (2, 4)),
        ((128, None) * 12, (True,) * 24, (2, 4)),
        ((128, 128, None) * 4, (True,) * 12, (3, 6)),
        ((None,) * 10, (False,) + (True,) * 9, (3, 5)),
        ((None,) * 3, (True,) * 3, (3,)),
    ],
)
def test_depths_differ_by_whole_periods(windows: Any, sparse: Any, counts: tuple[int, ...]) -> None:
    model = MODEL.replace(num_layers=len(windows), sliding_windows=windows, moe_layers=sparse)
    assert layer_counts(model) == counts
    whole = [range(len(windows))]
    assert first_layers(model, whole, counts[0]).sliding_windows == windows[: counts[0]]
    assert first_layers(model, whole, None) == model and stage_counts(model, whole) == counts


def test_stages_are_compiled_with_their_own_first_layers() -> None:
    model = MODEL.replace(num_layers=16, moe_layers=(False,) + (True,) * 15, sliding_windows=(8, None) * 8)
    stages = [range(7), range(7, 16)]
    counts = stage_counts(model, stages)
    assert counts == (3, 5)
    two = first_layers(model, stages, 3)
    assert two.sliding_windows == (8, None, 8, None, 8, None)
    assert two.moe_layers == (False,) + (True,) * 5
    assert stage_counts(model, [range(4), range(4, 16)]) == (12,), "a stage is too short: all layers"


COLLECTIVE = {
    "bucket": "1", "kind": "all-to-all", "operation": "experts_dispatch", "read_bytes": 2080, "launches": 48,
    "overlapped": 24, "beside": 72, "independent": 96,
}  # fmt: skip
SENT = {"collective_bytes": 30, "collective_formula_bytes": 20, "stage_bytes": 4096}


@pytest.fixture(scope="module")
def programs(dump: Dump) -> list[Compiled]:
    """Two depths, of which the second has each launch of the layer once more."""
    seconds, memory = {"trace": 1.0, "lower": 2.0, "compile": 3.0}, dict.fromkeys(("output", "alias"), 0)
    again = [dataclasses.replace(x, layer=1) for x in dump.launches if x.layer == 0]
    deeper = dataclasses.replace(dump, launches=[*dump.launches, *again], f32_copies=2 * dump.f32_copies)
    return [
        Compiled("1", Bucket(1, 0), 1, 48, dump, seconds, memory | {"argument": 100, "temp": 7}, SENT),
        Compiled("1", Bucket(1, 0), 2, 48, deeper, seconds, memory | {"argument": 150, "temp": 7}, SENT),
    ]


def test_rows_are_extrapolated_by_layer(programs: list[Compiled]) -> None:
    opened = Opened(MODEL, {}, "bfloat16", [], [range(48)])
    row = row_of(programs, opened, ProgramSection(), KNOWN["a100_80gb"])
    assert (row["launches_per_layer"], row["launches_per_step"]) == (21, 14 + 21 * 48)
    assert row["layers_compiled"] == [1, 2]
    assert row["f32_weight_copy_bytes"] == 48 * programs[0].dump.f32_copies
    assert (row["temp_bytes"], row["peak_bytes"]) == (7, 100 + 50 * 47 + 7)
    assert (row["kernels_with_spills"], row["spill_bytes"]) == (1, 16)
    assert 0 < row["bound_ms"] < row["modelled_ms"]
    dearer = row_of(programs, opened, ProgramSection(launch_us=2.5), KNOWN["a100_80gb"])
    assert dearer["modelled_ms"] - row["modelled_ms"] == pytest.approx(row["launches_per_step"] * 1e-3)
    alone = row_of(programs[:1], opened, ProgramSection(), None)
    assert (alone["launches_per_layer"], alone["launches_per_step"], alone["modelled_ms"]) == (None, 35, None)
    by_name = {item["operation"]: item for item in grouped_rows(programs, *_TABLES["operations"])}
    assert (by_name["router"]["launches_per_layer"], by_name["router"]["launches"]) == (4, 192)
    assert (by_name["sampling"]["launches_per_layer"], row["trace_s"]) == (0, 1)


def test_tables_and_plots(programs: list[Compiled], tmp_path: Path) -> None:
    row = row_of(
        programs, Opened(MODEL, {}, "bfloat16", [], [range(48)]), ProgramSection(), KNOWN["a100_80gb"]
    )
    result = {
        "experiment": "program",
        "config": {"program": dataclasses.asdict(ProgramSection())},
        "metrics": {},
        "cases": [row | {"host_syncs": 1, "collectives": 2}],
        "operations": grouped_rows(programs, *_TABLES["operations"]),
        "collectives": [COLLECTIVE],
        "kernels": _kernels(programs[-1]),
        "target": {"device": "NVIDIA A100-SXM4-80GB", "devices": 1, "memory": 85_100_068_864},
        "notes": ["autotuning"],
    }
    for width in (80, 120):
        console = Console(file=io.StringIO(), width=width)
        assert print_result(result, console)
        shown = console.file.getvalue()  # type: ignore[attr-defined]
        assert "453 MB" in shown and "1,022" in shown and "compiled with 1 and 2 layers" in shown
        assert "grouped_swiglu (1) spills 4 bytes, has 40 registers" in shown
        assert "the host waits 1 times" in shown and "2.1 kB      48         24" in shown
        assert "1: collectives of 30 bytes, by formula 20 bytes; 4.1 kB to the next stage" in shown
    files = save_plots(result, tmp_path, programs=[detail_of(programs[-1])])
    assert {file.name for file in files} == {"launches.png", "memory.png"}


# --- mistakes ---------------------------------------------------------------------------------------------


def _fails(capsys: pytest.CaptureFixture[str], *argv: str) -> str:
    assert launch(main, "program", ["tracker=none", *argv]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and err.count("\n") == 1, err
    return err


def test_mistakes_are_one_line_and_leave_nothing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(FOLDER, str(tmp_path))
    assert "make gpu-compiler" in _fails(capsys)
    library = tmp_path / "jax_plugins/xla_cuda12/xla_cuda_plugin.so"
    library.parent.mkdir(parents=True)
    library.touch()
    assert "is not for jaxlib" in _fails(capsys)
    monkeypatch.setattr("moejax.bench.program.run.plugin_folder", lambda: tmp_path)
    assert "target=b200: neither of a100, h100 nor a file" in _fails(capsys, "target=b200")
    (tmp_path / "x.txtpb").write_text("gpu_device_info {}")
    assert "device_memory_size is missing" in _fails(capsys, "target=x.txtpb")
    assert "the step 65 is beyond engine.max_num_seqs=64" in _fails(capsys, "program.rows=[65]")
    assert "for 1, 2, 4, 8 devices; this layout has 32" in _fails(capsys, "parallel=cluster_4x8")
    assert "no step to compile" in _fails(capsys, "program.rows=[]", "program.chunks=[]")
    assert not (tmp_path / "outputs").exists() or not any((tmp_path / "outputs").rglob("result.json"))


def test_targets_say_what_they_are() -> None:
    names = {target: device_name(describe(target)) for target in ("a100", "h100")}
    assert names == {"a100": "NVIDIA A100-SXM4-80GB", "h100": "NVIDIA H100 80GB HBM3"}


# --- with the compiler ------------------------------------------------------------------------------------


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize("layout", ["single", "ep8", "pp2_ep4"])
def test_the_engines_step_on_an_a100(layout: str, tmp_path: Path) -> None:
    small = ["model=eightway", "program.rows=[8]", "program.chunks=[]", "program.layers=1"]
    argv = ["tracker=none", f"parallel={layout}", *small, f"hydra.run.dir={tmp_path}"]
    assert launch(main, "program", argv) == 0
    result = json.loads((tmp_path / "result.json").read_text())
    stages = ["8 stage 0", "8 stage 1"] if layout == "pp2_ep4" else ["8"]
    assert [case["bucket"] for case in result["cases"]] == stages
    for case in result["cases"]:
        faults = ("copies_of_pool_bytes", "f32_weight_copy_bytes", "kernels_with_spills")
        assert not any(case[name] for name in faults)
        assert (case["collectives"] > 0) == (layout != "single")
        assert case["launches_outside"] == 0 or layout != "single"
    assert result["resolved"]["engine.kernels"]["value"] == "pallas_triton"
    assert {"rope_kv_write", "grouped_swiglu"} <= {kernel["kernel"] for kernel in result["kernels"]}
    for case in result["cases"] if layout != "single" else ():
        assert case["collective_bytes"] == case["collective_formula_bytes"] > 0
    assert [case.get("stage_bytes", 0) > 0 for case in result["cases"]] == [True, False][-len(stages) :]
