"""Choice of quantization and its calibration text: the values behind `quant=` and `configs/quant/`."""

from dataclasses import dataclass, field
from typing import Annotated, Literal

from moejax.core.checked import Checked, Must, NonNegativeInt, PositiveInt, PositiveNumber, Share, at_least
from moejax.core.errors import ConfigError

Method = Literal["none", "rtn", "gptq", "awq", "smoothquant", "magnitude", "wanda"]
Clip = Literal["minmax", "percentile", "entropy", "mse"]
KvDtype = Literal["auto", "int8", "float8_e4m3fn", "float8_e5m2", "int4"]
Fallback = Literal["shared", "all"]
Implementation = Literal["auto", "dequantize", "xla", "pallas_triton"]
Layout = Literal["auto", "plain"]
Reduction = Literal["none", "prune", "merge"]
Criterion = Literal["frequency", "router_mass", "reap"]

SPARSE = ("magnitude", "wanda")  # of every four weights two are kept


@dataclass(frozen=True)
class QuantRule(Checked, section="quant.rules"):
    """Weights whose path matches `pattern` get this method and format; the first rule that matches counts.

    Attributes:
        pattern: over paths of weights such as `layers.3.moe.experts.down_proj` or
            `layers.0.attention.q_proj`; `*` stands for anything. One that matches nothing is an error.
        method: None takes `QuantConfig.method`; "none" keeps these weights in full precision.
        format: None takes `QuantConfig.format`.
    """

    pattern: Annotated[str, Must(bool, "over paths of weights, such as 'layers.*.moe.experts.*'")]
    method: Method | None = None
    format: str | None = None


@dataclass(frozen=True)
class CalibrationConfig(Checked, section="quant.calibration"):
    """The text that methods with calibration see, and what becomes of experts that see too little of it.

    Attributes:
        text: a UTF-8 file, or "auto": the training part of the text that `tiny` was trained on.
        num_samples, seq_len: sequences and the tokens of each.
        batch_size: sequences that run at a time.
        min_tokens: an expert with fewer tokens falls back (and is counted so in the report).
        fallback: "shared" takes the statistics of all tokens of the layer; "all" routes all tokens to it.
        work_dir: keeps what is done layer by layer, so that a killed run goes on; None keeps nothing.
        seed: of the choice of sequences.
    """

    text: str = "auto"
    num_samples: PositiveInt = 128
    seq_len: Annotated[int, at_least(2)] = 256
    batch_size: PositiveInt = 16
    min_tokens: NonNegativeInt = 64
    fallback: Fallback = "shared"
    work_dir: str | None = None
    seed: int = 0


@dataclass(frozen=True)
class ExpertReduction(Checked, section="quant.experts"):
    """Fewer experts in each layer, chosen by what the calibration text makes of them.

    Attributes:
        method: "prune" leaves the others out; "merge" averages each of them into the one that stays whose
            router's logits are most like its own, weighted by their tokens (M-SMoE, arXiv 2310.01334).
        keep: of each layer's experts, evenly over a router's groups: a share below 1, else their number.
        criterion: what those that stay have most of: "frequency", tokens; "router_mass", the sum of these
            tokens' weights; "reap", the mean of weight times norm of the output (REAP, arXiv 2510.13999).
    """

    method: Reduction = "none"
    keep: PositiveNumber = 0.75
    criterion: Criterion = "reap"


@dataclass(frozen=True)
class QuantConfig(Checked, section="quant"):
    """Quantization of weights and of the key/value cache.

    Attributes:
        method: "rtn" rounds to nearest; "gptq", "awq" and "smoothquant" calibrate. "magnitude" keeps two of
            every four weights, "wanda" (arXiv 2306.11695) by calibration. "none" leaves the weights
            as they are in the checkpoint (which may be quantized itself).
        format: of the weights, see `moejax.quantization.formats.parse_format`; empty is int8, or bf16_2of4.
        clip: how the range of a scale is found: "minmax"; "percentile" of the magnitudes; "entropy"
            (least KL divergence of the histograms); "mse" (least squared error).
        percentile: of "percentile".
        rules: exceptions by path. Without one, all linear layers and experts are quantized, but not router,
            norms, embeddings and output projection.
        experts: leaves some experts out, before anything is quantized.
        kv_cache: dtype of the key/value cache, with a scale for each token and head; "auto" is the model's.
        damping: of GPTQ, as a share of the Hessian's mean diagonal.
        act_order: GPTQ goes through the inputs by falling Hessian diagonal (groups stay in place).
        gptq_block: columns between two updates of the rest.
        awq_grid: exponents that AWQ tries between 0 and 1.
        awq_clip: AWQ searches clipping ranges too.
        smoothing: alpha of SmoothQuant.
        implementation: of the products: "dequantize" first and multiply then; "xla"; "pallas_triton", the
            GPU kernels; "auto".
        layout: of codes in memory: "plain", as in checkpoints; "auto" puts four-bit codes into tiles that the
            GPU kernels read in whole lines, where these run, and keeps float8 on a CPU as its bits, which
            XLA converts by vectors.
    """

    method: Method = "none"
    format: str = ""
    clip: Clip = "minmax"
    percentile: Annotated[float, Must(lambda p: 50 <= p <= 100, "a number from 50 to 100")] = 99.9
    rules: list[QuantRule] = field(default_factory=list)
    experts: ExpertReduction = field(default_factory=ExpertReduction)
    kv_cache: KvDtype = "auto"
    calibration: CalibrationConfig = field(default_factory=CalibrationConfig)
    damping: Share = 0.01
    act_order: bool = True
    gptq_block: PositiveInt = 128
    awq_grid: PositiveInt = 20
    awq_clip: bool = True
    smoothing: Share = 0.5
    implementation: Implementation = "auto"
    layout: Layout = "auto"

    def __post_init__(self) -> None:
        super().__post_init__()
        quantizes = self.method != "none" or self.rules
        if self.format and not quantizes:
            raise ConfigError(
                f"quant.format={self.format} does nothing while quant.method is none: set quant.method to "
                "rtn, gptq, awq, smoothquant, magnitude or wanda"
            )
        if quantizes and not self.format:
            object.__setattr__(self, "format", "bf16_2of4" if self.method in SPARSE else "int8")

    @property
    def methods(self) -> set[str]:
        """Methods that some weights get."""
        methods: set[str] = {self.method, *(rule.method or self.method for rule in self.rules)}
        return methods - {"none"}

    @property
    def is_none(self) -> bool:
        """True if nothing is changed."""
        return not self.rules and {self.method, self.experts.method} == {"none"} and self.kv_cache == "auto"

    @property
    def what(self) -> str:
        """The method of the weights, or where that is none, of the experts."""
        return self.experts.method if self.method == "none" and not self.rules else self.method
