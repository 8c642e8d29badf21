"""Specs of the grouped products from a routing trace: the group sizes that its real steps had.

Of each phase the steps with (nearly) as many tokens as any are taken, in every layer, and of these pairs of
step and layer some between the most even and the most skewed (load of the most loaded expert over the mean).
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from moejax.bench.kernels.config import KernelSelection
from moejax.bench.kernels.select import Selected, narrow
from moejax.core.errors import ConfigError, MoejaxError
from moejax.routing.analysis import skew
from moejax.routing.capture import RoutingCapture
from moejax.routing.source import open_trace
from pallas_kernels.group_specs import down_spec, swiglu_spec
from pallas_kernels.models import MODELS, ModelShape
from pallas_kernels.op import Spec
from pallas_kernels.qformats import Format
from pallas_kernels.registry import load_op

_QUANTIZED = ("quantized_grouped_matmul", "quantized_grouped_swiglu")
OPS = ("grouped_matmul", "grouped_swiglu", *_QUANTIZED)
"""Operations whose work depends on the sizes of groups."""

_FORMATS = (Format("w4a16", 128), Format("w8a16"))
_FULL = 0.9  # of the tokens of the phase's largest step
_MOST_STEPS = 512


class Step(NamedTuple):
    """A layer of a step: its phase and number, the model's layer, ids int `[tokens, k]`, max/mean load."""

    phase: str
    step: int
    layer: int
    ids: np.ndarray
    skew: float

    @property
    def routing(self) -> str:
        """Its name in a spec's."""
        return f"trace_step{self.step}_layer{self.layer}"


def select_routed(config: KernelSelection) -> list[Selected]:
    """Returns the grouped products that a configuration names, with specs of `bench.routing`'s steps.

    Raises:
        ConfigError: no trace, one that no model's experts fit, or a name of an operation, implementation or
            part of a spec that there is not.
    """
    path = str(config.bench.routing)
    capture = open_trace("bench.routing", path)
    for name in config.ops:
        if name not in OPS:
            raise ConfigError(
                f"ops: {name!r} has no groups of experts; bench.routing is for {', '.join(OPS)}"
            )
    shapes = shapes_for(capture, path, config.bench.routing_model)
    steps = [s for p in ("decode", "prefill") for s in pick_steps(capture, p, config.bench.routing_steps)]
    specs = [
        (load_op(name), [spec for shape in shapes for step in steps for spec in _specs(name, shape, step)])
        for name in config.ops or OPS
    ]
    selected = narrow(config.implementations, config.specs, specs)
    if not selected:
        names = ", ".join(dict.fromkeys(spec.name for _, every in specs for spec in every))
        raise ConfigError(
            f"specs: none of the trace's has {' or '.join(config.specs)} in its name; they are {names}"
        )
    return selected


def shapes_for(capture: RoutingCapture, path: str, model: str | None) -> list[ModelShape]:
    """The widths that a trace's groups are multiplied with.

    Raises:
        ConfigError: the model asked for is none or does not fit the trace, or no known one does.
    """
    by_name = {shape.name: shape for shape in MODELS}
    if model is None:
        routing = (capture.num_experts, capture.top_k)
        fitting = [shape for shape in MODELS if (shape.total_experts, shape.top_k) == routing]
        if not fitting:
            shapes = ", ".join(f"{s.name} {s.top_k} of {s.total_experts}" for s in MODELS)
            raise ConfigError(
                f"bench.routing={path}: its tokens visit {capture.top_k} of {capture.num_experts} experts,"
                f" and no shape of the kernels' does ({shapes}); say whose widths to take, as in"
                " bench.routing_model=tiny or bench.routing_model=DIR"
            )
        return fitting
    shape = by_name.get(model) or _shape_of(model, by_name)
    if (shape.total_experts, shape.top_k) != (capture.num_experts, capture.top_k):
        raise ConfigError(
            f"bench.routing={path}: its tokens visit {capture.top_k} of {capture.num_experts} experts, those"
            f" of bench.routing_model={model} {shape.top_k} of {shape.total_experts}; use a trace of this"
            " model, or one generated for its shape"
        )
    return [shape]


def _shape_of(model: str, kernels: dict[str, ModelShape]) -> ModelShape:
    from moejax.engine.opening.resolve import find_model

    try:
        _, config = find_model(model, "auto")
    except MoejaxError as error:
        reason = str(error).removeprefix("model.path: ")
        raise ConfigError(
            f"bench.routing_model: {reason}; the kernels' own shapes are {', '.join(kernels)}"
        ) from error
    if not any(config.moe_layers):
        raise ConfigError(f"bench.routing_model={model}: the model has no experts")
    return ModelShape(
        model.rstrip("/").rpartition("/")[2], config.hidden_size, config.moe_intermediate_size,
        config.num_experts, config.num_experts, config.num_experts_per_tok, config.num_heads,
        config.num_kv_heads, config.head_dim,
    )  # fmt: skip


def pick_steps(capture: RoutingCapture, phase: str, count: int) -> list[Step]:
    """Returns at most `count` steps of a phase, the most even first. A step that computes any part of a
    prompt is "prefill"."""
    starts = np.append(capture.step_starts, capture.num_rows)
    sizes = np.diff(starts)
    prompts = np.add.reduceat(capture.prefill.astype(np.int64), starts[:-1]) > 0
    chosen = np.flatnonzero(prompts == (phase == "prefill"))
    chosen = chosen[sizes[chosen] >= _FULL * sizes[chosen].max(initial=0)]
    chosen = chosen[np.unique(np.linspace(0, len(chosen) - 1, min(len(chosen), _MOST_STEPS)).astype(int))]
    pairs = []
    for step in chosen:
        ids = capture.ids[starts[step] : starts[step + 1]]
        loads = capture.select(np.arange(starts[step], starts[step + 1])).counts()
        for at, value in enumerate(skew(loads).max_over_mean):
            if np.isfinite(value):
                pairs.append(
                    Step(phase, int(step), capture.layers[at], ids[:, at].astype(np.int32), float(value))
                )
    pairs.sort(key=lambda step: (step.skew, step.step, step.layer))
    places = np.linspace(0, len(pairs) - 1, min(count, len(pairs))).round().astype(int)
    return [pairs[at] for at in dict.fromkeys(places.tolist())]


def _specs(op: str, shape: ModelShape, step: Step) -> Sequence[Spec]:
    """Returns the step's specs of one operation, of a quantized one in each of `_FORMATS` that fits."""
    formats: list[Format | None] = [None]
    if op in _QUANTIZED:
        inputs = shape.expert_hidden if op == "quantized_grouped_matmul" else shape.hidden
        formats = [f for f in _FORMATS if not f.group or inputs % f.group == 0]
    make = swiglu_spec if op.endswith("swiglu") else down_spec
    case = (shape, step.phase, len(step.ids), step.routing)
    return [make(*case, fmt, ids=step.ids) for fmt in formats]
