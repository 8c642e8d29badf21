"""Report of a model's quantization, as values. No JAX here."""

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

from moejax.core import html
from moejax.core.words import byte_words


@dataclass(frozen=True)
class WeightReport:
    """Report of one weight; lists have an entry for each expert, or one for a weight without experts.

    Attributes:
        path: in the model, without a last `.kernel`.
        method, format: what it was quantized with; `format` by `WeightFormat.name`.
        shape: `[..., inputs, outputs]`.
        weight_error: norm of the change over norm of the weight (after folding).
        output_error: norm of the outputs' change over norm of the outputs, on the calibration tokens that the
            weight was calibrated with. None without calibration.
        damping: GPTQ's, as used; None for other methods.
        damping_raised: experts (or [0]) whose Hessian was not positive definite with the damping asked for.
        bits_per_weight: of all arrays held, scales included.
        bytes, float_bytes: held now, and before.
        seconds: to quantize it, calibration apart.
    """

    path: str
    method: str
    format: str
    shape: tuple[int, ...]
    weight_error: list[float]
    output_error: list[float] | None
    damping: list[float] | None
    damping_raised: list[int]
    bits_per_weight: float
    bytes: int
    float_bytes: int
    seconds: float


@dataclass(frozen=True)
class StageReport:
    """A layer or the output projection.

    Attributes:
        name: "layer 3", "lm_head", or "weights" for those quantized without calibration.
        tokens: calibration tokens that ran through it.
        expert_tokens: of these, how many were routed to each expert; None without experts or calibration of
            them.
        fallback_experts: those that fewer than `min_tokens` visited, calibrated by `fallback` instead.
        fallback: "shared" or "all"; None where no expert needed one.
        folded: sites whose scales were folded into what precedes them.
        notes: what a reader should know, one line each.
        seconds: in all.
        resumed: taken from `work_dir`, not computed in this run.
        stand_ins: `moejax.ptq.reduce.stand_ins` of a layer that has fewer experts now.
    """

    name: str
    tokens: int
    expert_tokens: list[int] | None
    fallback_experts: list[int]
    fallback: str | None
    folded: list[str]
    weights: list[WeightReport]
    notes: list[str]
    seconds: float
    resumed: bool = False
    stand_ins: list[int] | None = None


@dataclass(frozen=True)
class QuantReport:
    """Everything that `quantize_model` did.

    Attributes:
        method, format: of the configuration; the weights' own may differ by its rules.
        bytes, float_bytes: of all parameters of the model now, and before.
        num_params: numbers that these stand for.
        bits_per_parameter: held per number of the whole model, what stays in full precision included.
        seconds: in all.
    """

    method: str
    format: str
    bytes: int
    float_bytes: int
    num_params: int
    seconds: float
    stages: list[StageReport] = field(default_factory=list)

    @property
    def bits_per_parameter(self) -> float:
        return 8 * self.bytes / max(self.num_params, 1)

    @property
    def weights(self) -> list[WeightReport]:
        """Reports of the weights of all stages."""
        return [weight for stage in self.stages for weight in stage.weights]

    @property
    def quantized_bits_per_weight(self) -> float:
        """Average bits of the quantized weights only, scales included."""
        numbers = sum(8 * w.bytes / w.bits_per_weight for w in self.weights)
        return 8 * sum(w.bytes for w in self.weights) / numbers if numbers else 0.0

    @property
    def fallbacks(self) -> int:
        """Experts, over all layers, that were calibrated by the fallback."""
        return sum(len(stage.fallback_experts) for stage in self.stages)

    @property
    def damping_raised(self) -> int:
        """Matrices whose damping had to be raised."""
        return sum(len(weight.damping_raised) for weight in self.weights)

    @property
    def notes(self) -> list[str]:
        """Notes of all stages, each once, in order; a note of several layers with their number."""
        counts = Counter(note for stage in self.stages for note in stage.notes)
        return [note if n == 1 else f"{note} ({n} layers)" for note, n in counts.items()]

    def __repr__(self) -> str:
        return (
            f"<QuantReport {self.method} {self.format}: {len(self.weights)} weights,"
            f" {self.bits_per_parameter:.2f} bits per parameter, {self.seconds:.1f} s>"
        )

    def _repr_html_(self) -> str:
        about = {
            "held": f"{byte_words(self.bytes)} of {byte_words(self.float_bytes)}:"
            f" {self.bits_per_parameter:.2f} bits per parameter,"
            f" {self.quantized_bits_per_weight:.2f} per quantized weight",
            "fallbacks": f"{self.fallbacks} experts saw too little calibration text"
            if self.fallbacks
            else None,
            "damping": f"raised for {self.damping_raised} matrices" if self.damping_raised else None,
            "took": f"{self.seconds:.1f} s",
        }
        rows = [_stage_cells(stage) for stage in self.stages]
        stages = html.table(
            ("", "weights", "format", "weight error %", "output error %", "s"), rows, right=(1, 3, 4, 5)
        )
        notes = [html.note(note) for note in self.notes]
        return html.card(f"quantized: {self.method}, {self.format}", html.facts(about), stages, *notes)

    def to_dict(self) -> dict[str, Any]:
        """Returns the report in JSON's own types."""
        return {
            **asdict(self),
            "bits_per_parameter": self.bits_per_parameter,
            "quantized_bits_per_weight": self.quantized_bits_per_weight,
            "fallbacks": self.fallbacks,
            "damping_raised": self.damping_raised,
            "notes": self.notes,
        }


def _stage_cells(stage: StageReport) -> list[str]:
    """Returns a stage's row: its errors are means over its weights and their experts."""
    formats = ", ".join(dict.fromkeys(weight.format for weight in stage.weights))
    changed = [e for weight in stage.weights for e in weight.weight_error]
    outputs = [e for weight in stage.weights for e in weight.output_error or ()]
    return [
        stage.name,
        str(len(stage.weights)),
        formats,
        *(f"{100 * sum(errors) / len(errors):.2f}" if errors else "–" for errors in (changed, outputs)),
        f"{stage.seconds:.1f}",
    ]


def resumed_report(raw: dict[str, Any]) -> StageReport:
    """Returns the report of a finished stage, of its `dataclasses.asdict` after a way through JSON."""
    weights = [WeightReport(**{**weight, "shape": tuple(weight["shape"])}) for weight in raw["weights"]]
    return StageReport(**{**raw, "weights": weights, "resumed": True})
