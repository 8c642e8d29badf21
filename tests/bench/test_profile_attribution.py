"""Shares of traced time: hand-made events and programs whose parts are known to the nanosecond."""

import pytest

from moejax.bench.profile.attribute import HOST, LAUNCH, UNKNOWN, PhaseTimes, attribute_trace
from moejax.bench.profile.program import Program, match, place_of, read_program
from moejax.bench.profile.trace import Event, Trace, TraceError

# A loop of layer 0's experts with a copy inside that has no metadata, a product before it, a copy after it
# for the logits, and an instruction of nobody's.
DECODE = """HloModule jit_step, is_scheduled=true

%fused (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %dot.9 = f32[4]{0} dot(%p, %p), metadata={op_name="jit(step)/layer_0/qkv_projection/dot_general"}
  ROOT %add.9 = f32[4]{0} add(%dot.9, %p), metadata={op_name="jit(step)/layer_0/attention/rope/add"}
}

%body (arg: (s32[], f32[4])) -> (s32[], f32[4]) {
  %arg = (s32[], f32[4]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%arg), index=0
  %row = f32[4]{0} get-tuple-element(%arg), index=1
  %spare = f32[4]{0} copy(%row)
  %down = f32[4]{0} multiply(%row, %row), metadata={op_name="jit(step)/layer_0/experts_dispatch/while/body/experts_down/mul"}
  ROOT %next = (s32[], f32[4]{0}) tuple(%counter, %down)
}

%condition (arg.1: (s32[], f32[4])) -> pred[] {
  %arg.1 = (s32[], f32[4]{0}) parameter(0)
  %limit = s32[] constant(3)
  ROOT %less = pred[] compare(%limit, %limit), direction=LT
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0)
  %fusion.1 = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused, metadata={op_name="jit(step)/layer_0/attention/rope/add"}
  %start = (s32[], f32[4]{0}) tuple(%x, %fusion.1)
  %loop = (s32[], /*index=1*/f32[4]{0}) while(%start), condition=%condition, body=%body, metadata={op_name="jit(step)/layer_0/experts_dispatch/while"}
  %strange = f32[4]{0} custom-call(%x), custom_call_target="who"
  %copied = f32[4]{0} copy(%x)
  ROOT %head = f32[4]{0} negate(%copied), metadata={op_name="jit(step)/lm_head/neg"}
}
"""  # noqa: E501
PREFILL = DECODE.replace("%head", "%first").replace("%strange", "%odd")


def programs() -> list[Program]:
    return [read_program("decode", False, DECODE), read_program("prefill", True, PREFILL)]


def trace(*events: tuple[str, float, float], run: int = 1, program: int = 7) -> list[Event]:
    return [Event(name, program, run, start, end) for name, start, end in events]


def attribute(*events: Event, spans: tuple[tuple[float, float], ...] = ((0, 1000),)) -> dict[str, PhaseTimes]:
    ordered = sorted(events, key=lambda event: (event.start, -event.end))
    return attribute_trace(Trace(tuple(ordered), spans), programs())


def test_places() -> None:
    """By scope; a fusion by its product; what has none by those who use it, or by its loop."""
    places = programs()[0].places
    found = {name: (places[name].operation, places[name].layer, places[name].inferred) for name in places}
    assert found["fusion.1"] == ("qkv_projection", 0, False)
    assert found["loop"] == ("experts_dispatch", 0, False)
    assert found["down"] == ("experts_down", 0, False)
    assert found["less"] == ("experts_dispatch", 0, True)
    assert found["spare"][0] in ("experts_dispatch", "experts_down") and found["spare"][2]
    assert found["head"] == ("lm_head", None, False) and found["copied"] == ("lm_head", None, True)
    assert found["strange"] == (None, None, False)
    callers = programs()[0].callers
    assert callers["down"] == callers["less"] == {"loop"} and not callers["head"]


@pytest.mark.parametrize(
    ("op_name", "operation", "layer"),
    [
        ("jit(step)/layer_12/attention/kv_write/while/body/add", "kv_write", 12),
        ("jit(step)/layer_1/qkv_projection/norm/mul", "norm", 1),
        ("jit(step)/layer_1/experts_dispatch/jit(grouped_matmul)/grouped_matmul", "experts_down", 1),
        ("jit(step)/layer_1/experts_dispatch/grouped_swiglu", "experts_gate_up", 1),
        ("jit(step)/inputs/slice", "inputs", None),
        ("reduce_sum", None, None),
        ("", None, None),
    ],
)
def test_name_stacks(op_name: str, operation: str | None, layer: int | None) -> None:
    assert place_of(op_name)[:2] == (operation, layer)


def test_every_nanosecond_is_given_out_once() -> None:
    """Host before, gaps between, a loop's own time, and its body on another thread beyond its event."""
    events = trace(
        ("fusion.1", 100, 150),  # 50; then 10 of nothing
        ("loop", 160, 170),  # its own: 160 to 165, 175 to 180, and 190 to 200
        ("less", 165, 175),
        ("down", 180, 190),
        ("down", 200, 240),
        ("head", 240, 300),
    )
    found = attribute(*events)["decode"]
    assert (found.units, found.measured, found.steps, found.wall) == (1, 1, 1, 300)
    assert found.by_operation() == {
        "qkv_projection": 50,
        "experts_dispatch": 20 + 10,
        "experts_down": 50,
        "lm_head": 60,
        LAUNCH: 10,
        HOST: 100,
    }
    assert sum(found.by_operation().values()) == found.wall
    assert found.by_layer() == {0: 130} and found.inferred == 10
    assert found.executions["decode", "down"] == 2


def test_instructions_side_by_side_share_their_time() -> None:
    found = attribute(*trace(("fusion.1", 0, 60), ("head", 20, 60), ("strange", 40, 80)))["decode"]
    assert found.by_operation() == pytest.approx(
        {
            "qkv_projection": 20 + 10 + 20 / 3,
            "lm_head": 10 + 20 / 3,
            UNKNOWN: 20 / 3 + 20,
            LAUNCH: 0,
            HOST: 0,
        }
    )


def test_steps_follow_each_other() -> None:
    """The host's part is from a step's end to the next one's start; between generations nothing is counted;
    other programs are the host's."""
    events = [
        *trace(("odd", 50, 90), ("first", 90, 100), run=1, program=3),
        *trace(("head", 130, 150), run=2),
        *trace(("convert.1", 151, 159), run=1, program=9),
        *trace(("head", 160, 180), run=3),
        *trace(("head", 1010, 1040), run=4),
    ]
    found = attribute(*events, spans=((40, 200), (1000, 1100)))
    assert (found["prefill"].wall, found["prefill"].host) == (60, 10)
    assert found["prefill"].by_operation()[UNKNOWN] == 40
    assert found["decode"].measured == 3 and found["decode"].units == 1  # the middle one of 50, 30 and 40
    assert (found["decode"].wall, found["decode"].host) == (40, 10)


def test_the_middle_half_of_the_steps() -> None:
    starts = [0, 100, 300, 1300, 1340, 1440, 1550, 1650]
    events = [e for run, at in enumerate(starts) for e in trace(("head", at, at + 30 + run), run=run)]
    walls = sorted(
        [30, 101, 201, 1001, 41, 101, 111, 101]
    )  # from one step's end, 30 + run after its start, to the next one's
    found = attribute(*events, spans=((0, 5000),))["decode"]
    assert (found.measured, found.units, found.wall) == (8, 4, sum(walls[2:6]))


def test_the_steps_of_a_generations_prompts_are_one_unit() -> None:
    """Each generation's together; of three generations the middle one."""
    events, spans = [], []
    for generation, length in enumerate((10, 30, 20)):
        at = 1000 * generation
        spans.append((at, at + 900))
        for step in range(2):
            begin = at + 100 * step
            events += trace(("first", begin, begin + length), run=2 * generation + step)
    found = attribute(*events, spans=tuple(spans))["prefill"]
    assert (found.measured, found.units, found.steps) == (3, 1, 2)
    assert (found.wall, found.by_operation()["lm_head"], found.host) == (120, 40, 80)


def test_a_program_is_known_by_its_instructions() -> None:
    decode, prefill = programs()
    assert match({"head", "fusion.1"}, [decode, prefill]) is decode
    assert match({"first", "fusion.1"}, [decode, prefill]) is prefill
    assert match({"other"}, [decode, prefill]) is None and match({"head"}, []) is None


def test_a_trace_of_something_else() -> None:
    with pytest.raises(TraceError, match="no execution of the engine's steps"):
        attribute(*trace(("who", 0, 10)))
