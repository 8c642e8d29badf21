"""Requests of the engine and their results, as users see them; names follow vLLM. No JAX here."""

import json
import math
from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, Literal

from moejax.core.checked import (
    Checked,
    Must,
    Name,
    NonNegativeInt,
    NonNegativeNumber,
    PositiveInt,
    PositiveNumber,
    Seed,
    Share,
)
from moejax.core.errors import RequestError, unknown

FinishReason = Literal["stop", "length", "time", "interrupt", "abort", "error"]
"""A stop token or string; `max_tokens` or the longest sequence; `max_time_s`; `LLM.interrupt`; given up by
its caller, by `LLM.pause` or `LLM.close`; a step failed."""


Text = Annotated[str, Must(bool, "a string that is not empty")]
Strings = Annotated[tuple[Text, ...] | list[str] | str, Must(lambda _: True, "a string or a list of strings")]
Likeliest = Annotated[int, Must(lambda n: 0 <= n <= 1024, "an integer between 0 and 1024")]
Penalty = Annotated[float, Must(lambda x: -2 <= x <= 2, "a number in [-2, 2]")]


def _texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and bool(value) and all(isinstance(v, str) and v for v in value)


STRUCTURES: dict[str, Must] = {
    "json": Must(lambda x: isinstance(x, (dict, str)), "a JSON schema, as an object or as text"),
    "json_object": Must(lambda x: x is True, "true"),
    "regex": Must(lambda x: isinstance(x, str), "a regular expression"),
    "choice": Must(_texts, "a list of texts that are not empty"),
    "grammar": Must(lambda x: isinstance(x, str), "a Lark or GBNF grammar"),
}
"""Keys of `SamplingParams.structured_outputs`, and their values."""


@dataclass(frozen=True)
class SamplingParams(Checked, error=RequestError):
    """The choice of one request's tokens.

    Attributes:
        max_tokens: most tokens to generate, at least 1.
        max_time_s: seconds from the request's arrival after which it ends before the next step, with what it
            has (nothing, if it still waits) and finish reason "time"; None: never.
        min_tokens: before so many, no token ends the output, and no stop string.
        temperature: 0 is greedy; otherwise logits are divided by it.
        top_k: keep the k most likely tokens; 0 or -1 keeps all.
        top_p: keep the smallest set of tokens whose probability reaches top_p (Holtzman et al., 1904.09751).
        min_p: drop tokens less likely than min_p times the likeliest (Nguyen et al., 2407.01082).
        repetition_penalty: > 1 makes tokens of the prompt and output less likely (Keskar et al., 1909.05858).
        presence_penalty, frequency_penalty: taken off the logit of every token that the output has, once and
            once for each time; within [-2, 2].
        logit_bias: token id → what is added to its logit, clipped to [-100, 100].
        bad_words: texts whose last token is not generated where it would complete one of them.
        seed: the request's own random stream. None derives one from the engine's seed and the request's
            place in the call.
        stop: strings that end the output; they are cut off unless include_stop_str_in_output.
        stop_token_ids: tokens that end the output, besides the model's end-of-sequence tokens.
        ignore_eos: go on past the end-of-sequence token (for benchmarks).
        detokenize: whether outputs have a text; without one nothing can be stopped by a string.
        skip_special_tokens: whether texts leave out the tokenizer's special tokens.
        logprobs: None for none; n ≥ 0 for the chosen token's log-probability and the n likeliest tokens'.
        prompt_logprobs: the same of every prompt token but the first, in `RequestOutput.prompt_logprobs`; by
            the model's own distribution: temperature, filters, penalties and biases do not change it.
        n: independent samples of the same prompt; sample i uses seed + i.
        structured_outputs: what the whole output must be, by one key: `json` (a schema), `json_object` (any
            object), `regex`, `choice` (one of several texts) or `grammar`. What ends with "stop" is that; by
            `llguidance` (`pip install 'moejax[structured]'`).
        allowed_token_ids: the only tokens that may be generated; None for all.
        best_of: samples to draw, of which the `n` with the highest mean log-probability are kept; None: n.
        deterministic: True for log-probabilities that are equal to the bit whatever else runs, which
            `engine.deterministic` must allow; None leaves it to the engine.
    """

    max_tokens: PositiveInt = 16
    min_tokens: NonNegativeInt = 0
    temperature: NonNegativeNumber = 1.0
    top_k: NonNegativeInt = 0
    top_p: Annotated[float, Must(lambda p: 0 < p <= 1, "a number in (0, 1]")] = 1.0
    min_p: Share = 0.0
    repetition_penalty: PositiveNumber = 1.0
    presence_penalty: Penalty = 0.0
    frequency_penalty: Penalty = 0.0
    logit_bias: dict[int, float] = field(default_factory=dict, hash=False)
    bad_words: Strings = ()
    seed: Seed | None = None
    stop: Strings = ()
    stop_token_ids: Annotated[
        tuple[NonNegativeInt, ...] | list[int], Must(lambda _: True, "a list of token ids")
    ] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    logprobs: Likeliest | None = None
    prompt_logprobs: Likeliest | None = None
    n: PositiveInt = 1
    max_time_s: PositiveNumber | None = None
    structured_outputs: dict[str, Any] = field(default_factory=dict, hash=False)
    allowed_token_ids: Annotated[
        tuple[NonNegativeInt, ...] | list[int] | None, Must(lambda _: True, "a list of token ids")
    ] = None
    best_of: PositiveInt | None = None
    deterministic: bool | None = None

    def __post_init__(self) -> None:
        if self.top_k == -1 and not isinstance(self.top_k, bool):
            object.__setattr__(self, "top_k", 0)  # vLLM's other word for "all"
        super().__post_init__()
        if self.min_tokens > self.max_tokens:
            raise RequestError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        try:  # token ids may be texts, as JSON has them
            biases = {int(token): min(max(float(x), -100.0), 100.0) for token, x in self.logit_bias.items()}
            if any(math.isnan(x) for x in biases.values()):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}") from None
        object.__setattr__(self, "logit_bias", biases)
        if self.stop and not self.detokenize:
            raise RequestError("stop is sought in the text, which detokenize=False leaves out")
        if self.best_of is not None and self.best_of < self.n:
            raise RequestError(f"best_of {self.best_of} is below n {self.n}: there are not so many to keep")
        if self.structured_outputs:
            self._check_structure()
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise RequestError("allowed_token_ids is empty: nothing could be generated; null allows all")

    def _check_structure(self) -> None:
        for key, value in self.structured_outputs.items():
            if key not in STRUCTURES:
                raise RequestError(f"structured_outputs: {unknown('key', str(key), STRUCTURES)}")
            if not STRUCTURES[key].test(value):
                raise RequestError(f"structured_outputs.{key} must be {STRUCTURES[key].words}, got {value!r}")
        if len(self.structured_outputs) > 1:
            keys = ", ".join(self.structured_outputs)
            raise RequestError(f"structured_outputs takes one key, got {keys}")
        others = {"ignore_eos": self.ignore_eos, "min_tokens": self.min_tokens, "bad_words": self.bad_words}
        if other := next((name for name, value in others.items() if value), None):
            raise RequestError(f"structured_outputs does not go with {other}: it says where outputs end")

    @property
    def constrained(self) -> bool:
        """Tells whether some tokens may not be generated."""
        return bool(self.structured_outputs) or self.allowed_token_ids is not None

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        """Tells whether logits depend on how often the prompt and the output have each token."""
        return self.repetition_penalty != 1 or bool(self.presence_penalty or self.frequency_penalty)


@dataclass(frozen=True)
class RequestOptions(Checked, error=RequestError):
    """What the engine's policy goes by for one request (`engine.policy`), which changes no token, and its
    LoRA adapter.

    Attributes:
        priority: its class under the policy "priority"; small numbers go first.
        deadline_ms: milliseconds after its arrival within which its last token is wanted.
        tenant: who asks; shares and quotas are tenants' (`engine.scheduling.tenants`).
        slo_class: one of `engine.scheduling.slo_classes`; None asks nothing.
        adapter: the name of one that `LLM.load_adapter` has loaded; None: the model as it is.
    """

    priority: int = 0
    deadline_ms: PositiveNumber | None = None
    tenant: str = ""
    slo_class: str | None = None
    adapter: Name | None = None


@dataclass
class RequestMetrics:
    """Times of one request. Instants are `time.perf_counter()` seconds; token_times[i] is when token i was
    seen to be there (before the launch of a next step, if it was by then), scheduled_time when the first step
    that held it was scheduled. `ttft`, `tpot` and `e2e` are durations in seconds. `preemptions` counts how
    often a sample of it lost its cache blocks, `cached_tokens` how many of its prompt's tokens were found
    computed (`engine.prefix_cache`). `drafted[i]` counts steps that had an i-th draft to verify, from 0
    (`engine.speculation`), `accepted[i]` those in which it was right with all before it."""

    arrival_time: float
    token_times: list[float] = field(default_factory=list, repr=False)
    scheduled_time: float | None = None
    preemptions: int = 0
    cached_tokens: int = 0
    drafted: list[int] = field(default_factory=list, repr=False)
    accepted: list[int] = field(default_factory=list, repr=False)

    @property
    def ttft(self) -> float:
        """Arrival to the first output token."""
        return self.token_times[0] - self.arrival_time

    @property
    def e2e(self) -> float:
        """Arrival to the last output token."""
        return self.token_times[-1] - self.arrival_time

    @property
    def tpot(self) -> float:
        """Mean time per output token after the first; 0 where there is only one."""
        steps = len(self.token_times) - 1
        return (self.token_times[-1] - self.token_times[0]) / steps if steps > 0 else 0.0

    @property
    def itl(self) -> list[float]:
        """Inter-token latencies, between the instants at which tokens came: several come at one where drafts
        were right."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False) if b > a]

    def verified(self, place: int, accepted: bool) -> None:
        """Takes note of a step's draft at `place`."""
        while len(self.drafted) <= place:
            self.drafted.append(0)
            self.accepted.append(0)
        self.drafted[place] += 1
        self.accepted[place] += accepted


@dataclass
class Logprob:
    """A chosen token's, or a prompt token's, log-probability under the model's own distribution (before
    temperature and filters), its rank (1 is the likeliest) and the likeliest tokens' log-probabilities."""

    logprob: float
    rank: int
    top: dict[int, float]


@dataclass
class CompletionOutput:
    """One sample of a request. `finish_reason` is None while it is still running."""

    index: int
    text: str
    token_ids: list[int]
    logprobs: list[Logprob] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None


@dataclass
class RequestOutput:
    """A request with its samples. `metrics` is the first sample's. `error` says what failed where a sample's
    finish reason is "error". `prompt_logprobs` has an entry a prompt token, None for the first, which nothing
    predicts; it is None where the request did not ask for it."""

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    metrics: RequestMetrics
    finished: bool = False
    error: str | None = None
    prompt_logprobs: list[Logprob | None] | None = None

    def __repr__(self) -> str:
        ends = [(len(sample.token_ids), sample.finish_reason or "running") for sample in self.outputs]
        samples, times = [f"{count} out ({end})" for count, end in ends], self.metrics
        line = f"<RequestOutput {self.request_id}: {len(self.prompt_token_ids)} tokens in, "
        line += ", ".join(samples)
        if times.token_times:
            line += f"; TTFT {1e3 * times.ttft:.1f} ms, TPOT {1e3 * times.tpot:.2f} ms"
        return f"{line}>"

    def _repr_html_(self) -> str:
        from moejax.engine.requests.output_card import output_card

        return output_card(self)


CHECKPOINT_VERSION = 1


@dataclass(frozen=True)
class Checkpoint(Checked, section="checkpoint", error=RequestError):
    """What `LLM.interrupt` keeps of a request.

    Attributes:
        model: what its model is, see `moejax.engine.requests.builder.RequestBuilder`.
        prompt, prompt_token_ids: its prompt; the text is None where token ids were given.
        sampling_params: its own, with the seed that was drawn and the `max_tokens` that there was room for.
        samples: the tokens of each of its n samples so far.
        logprobs: of each sample's tokens; empty where they are not asked for.
    """

    model: Name
    prompt: str | None
    prompt_token_ids: tuple[NonNegativeInt, ...]
    sampling_params: SamplingParams
    samples: tuple[tuple[NonNegativeInt, ...], ...]
    logprobs: tuple[tuple[Logprob, ...], ...]

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps({"version": CHECKPOINT_VERSION, **asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "Checkpoint":
        """Reads what `to_json` wrote; raises `RequestError` for what is damaged or another version's."""

        def logprob(fields: dict[str, Any]) -> Logprob:
            return Logprob(**fields | {"top": {int(token): x for token, x in fields["top"].items()}})

        try:
            fields = json.loads(text)
            if (version := fields.pop("version")) != CHECKPOINT_VERSION:
                raise RequestError(f"checkpoint: version {version}; this moejax reads {CHECKPOINT_VERSION}")
            fields["sampling_params"] = SamplingParams(**fields["sampling_params"])
            fields["logprobs"] = [list(map(logprob, sample)) for sample in fields["logprobs"]]
            return cls(**fields)
        except RequestError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"not a checkpoint of LLM.interrupt: {error!r}") from None
