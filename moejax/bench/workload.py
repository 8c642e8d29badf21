"""The workload of a latency experiment: cases, prompts and service-level objectives.

Host code on plain values: no JAX, no Hydra. A case is B prompts of P tokens that generate N tokens each; all
requests of a case start together.
"""

import itertools
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np

from moejax.core.checked import Checked, Must, NonNegativeInt, PositiveInt
from moejax.core.errors import ConfigError, os_errors
from moejax.core.files import content_hash
from moejax.engine.requests.api import SamplingParams
from moejax.results.metrics import Slo

Pairing = Literal["product", "zip"]
Text = Literal["random", "copy", "own", "seen"]
Prompt = str | list[int]
Sizes = Annotated[
    PositiveInt | list[PositiveInt],
    Must(lambda sizes: sizes != [], "an integer of at least 1 or a list of such"),
]

COPIES = 4
"""How often a passage stands in a prompt of `text=copy`; the part that is random of one of `text=own`."""

_LENGTHS = ("batch_size", "prompt_len", "output_len")


@dataclass(frozen=True, kw_only=True)
class SampledWorkload(Checked, ABC, section="workload"):
    """The prompts, the sampling and the objectives of every workload.

    Attributes:
        temperature, top_k, top_p, min_p, ignore_eos: as in `SamplingParams`; greedy, to the full length.
        seed: of all that is drawn at random, and of sampling where temperature > 0.
        prompts_file: prompts from a text or JSONL file (see `load_prompts`) instead of random tokens. Random
            tokens spread over the experts more evenly than text does, and MoE time depends on that.
        slo: objectives for goodput.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    ignore_eos: bool = True
    seed: NonNegativeInt = 0
    prompts_file: str | None = None
    slo: Slo = field(default_factory=Slo)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.prompts_file is not None and not Path(self.prompts_file).is_file():
            raise ConfigError(f"workload.prompts_file: there is no file {self.prompts_file!r}")
        self.sampling(1)  # raises RequestError for a wrong sampling field

    @property
    @abstractmethod
    def hash(self) -> str:
        """Sixteen hex digits that name what is asked of the engine: equal hashes, comparable results.

        Covers prompts, lengths, arrivals, sampling fields and seed, files by content and not by name; not how
        often and in which modes it is measured, nor the objectives, which change neither prompts nor tokens.
        """

    def sampling(self, output_len: int, index: int = 0) -> SamplingParams:
        """Returns the sampling parameters of the `index`-th request, which generates `output_len` tokens.

        Raises:
            RequestError: a field is out of its range.
        """
        return SamplingParams(
            max_tokens=output_len,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            seed=(self.seed + index) % 2**32,
            ignore_eos=self.ignore_eos,
        )

    def batch_sampling(self, case: "LatencyCase") -> list[SamplingParams]:
        """Returns the sampling parameters of each of a batch's requests."""
        return [self.sampling(case.output_len, index) for index in range(case.batch_size)]


@dataclass(frozen=True)
class WorkloadConfig(SampledWorkload):
    """A fixed-batch workload.

    Attributes:
        batch_size, prompt_len, output_len: an integer or a list of them; lengths in tokens.
        pairing: `product` takes every combination; `zip` the i-th of each (an integer goes with every one).
        iterations: measured repetitions of each case.
        warmup: repetitions of each case before, not measured (they compile).
        text: the prompts, where no file has them; it decides what drafts are right (`engine.speculation`).
            `random` tokens; `copy`: a random passage, four times, which models that copy go on to repeat;
            `own`: a random start, then the model's own greedy answer, which it goes on with (small models
            repeat themselves); `seen`: as `random`, and what an engine remembers of having answered just
            before counts.
    """

    batch_size: Sizes = 1
    prompt_len: Sizes = 64
    output_len: Sizes = 32
    pairing: Pairing = "product"
    iterations: PositiveInt = 3
    warmup: NonNegativeInt = 1
    text: Text = "random"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.text != "random" and self.prompts_file is not None:
            raise ConfigError(
                f"workload.text={self.text} makes prompts of its own; leave out workload.prompts_file"
            )
        if self.pairing == "zip":
            _zipped_length(self)

    @property
    def hash(self) -> str:
        content = asdict(self)
        for name in (*_LENGTHS, "pairing", "iterations", "warmup", "slo", "prompts_file", "text"):
            del content[name]
        content["cases"] = [asdict(case) for case in latency_cases(self)]
        content["prompts"] = self.text if self.prompts_file is None else load_prompts(self.prompts_file)
        return content_hash(content)[:16]


@dataclass(frozen=True)
class LatencyCase:
    """`batch_size` prompts of `prompt_len` tokens, `output_len` tokens generated for each."""

    batch_size: int
    prompt_len: int
    output_len: int

    @property
    def name(self) -> str:
        return f"b{self.batch_size}_p{self.prompt_len}_n{self.output_len}"

    @property
    def total_len(self) -> int:
        """Longest sequence in tokens, which the engine's `max_model_len` must hold."""
        return self.prompt_len + self.output_len


def latency_cases(config: WorkloadConfig) -> list[LatencyCase]:
    """The workload's cases in the order given, a repeated one once."""
    axes = [_as_list(getattr(config, name)) for name in _LENGTHS]
    if config.pairing == "zip":
        count = _zipped_length(config)
        rows = list(zip(*(axis * count if len(axis) == 1 else axis for axis in axes), strict=True))
    else:
        rows = list(itertools.product(*axes))
    return [LatencyCase(*row) for row in dict.fromkeys(rows)]


def random_prompts(case: LatencyCase, vocab_size: int, seed: int) -> list[list[int]]:
    """`case.batch_size` prompts of `case.prompt_len` token ids, uniform in [0, vocab_size).

    A prompt depends on the seed, the case and its place in the batch, and on nothing else: adding a case to a
    workload or changing the order leaves the others' prompts alone, and no two cases share a prefix.
    """
    root = [seed, case.batch_size, case.prompt_len, case.output_len]
    rows = (np.random.default_rng([*root, row]) for row in range(case.batch_size))
    return [rng.integers(0, vocab_size, size=case.prompt_len).tolist() for rng in rows]


def load_prompts(path: str | Path) -> list[Prompt]:
    """Prompts of a file, one a line, blank lines skipped; ConfigError names the file and line of a bad one.

    `*.jsonl`: a JSON string, an object with `prompt` (text or token ids) or `prompt_token_ids`, or a list of
    token ids. Any other name: plain text.
    """
    rows = numbered_lines(path, "workload.prompts_file", "prompt")
    as_json = Path(path).suffix == ".jsonl"
    return [_parse_prompt(line, where) if as_json else line for where, line in rows]


def numbered_lines(path: str | Path, key: str, what: str) -> list[tuple[str, str]]:
    """The lines of a text file that are not blank, each with where it stands, for messages.

    Raises:
        ConfigError: the file cannot be read or holds no `what`; begins with `key`, the file's setting.
    """
    if not Path(path).exists():
        raise ConfigError(f"{key}: there is no file {str(path)!r}")
    with os_errors(ConfigError, f"{key}: cannot read {str(path)!r}"):
        lines = Path(path).read_text(encoding="utf-8").split("\n")
    rows = [(f"{key}: {path}:{number}", line) for number, line in enumerate(lines, 1) if line.strip()]
    if not rows:
        raise ConfigError(f"{key}: {str(path)!r} holds no {what}")
    return rows


def parse_line(line: str, where: str) -> Any:
    """The value of a line of JSON; ConfigError begins with `where`."""
    try:
        return json.loads(line)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where}: not JSON ({error.msg})") from error


def case_prompts(
    config: WorkloadConfig,
    case: LatencyCase,
    vocab_size: int,
    *,
    encode: Callable[[str], Sequence[int]] | None = None,
) -> list[list[int]]:
    """The token ids of a case: of `config.text` (random where a model is to answer), or the file's prompts
    brought to exactly `prompt_len` tokens.

    The file's prompts are taken in turn, from the start again when there are fewer than `batch_size`; a
    longer one is cut, a shorter one repeated, so that every request of the case has the same length. `encode`
    turns text into token ids and is needed only for a file that holds text.
    """
    if config.prompts_file is None:
        prompts, passage = random_prompts(case, vocab_size, config.seed), -(-case.prompt_len // COPIES)
        if config.text == "copy":
            prompts = [np.resize(prompt[:passage], case.prompt_len).tolist() for prompt in prompts]
        return prompts
    where = f"workload.prompts_file {config.prompts_file!r}"
    lines = itertools.islice(itertools.cycle(load_prompts(config.prompts_file)), case.batch_size)
    rows = [prompt_ids(line, vocab_size, encode, where) for line in lines]
    return [np.resize(np.asarray(ids), case.prompt_len).tolist() for ids in rows]


def prompt_ids(
    prompt: Prompt, vocab_size: int, encode: Callable[[str], Sequence[int]] | None, where: str
) -> list[int]:
    """A prompt's token ids; `encode` turns text into them.

    Raises:
        ConfigError: text without `encode`, no token, or one outside the vocabulary; begins with `where`.
    """
    if not isinstance(prompt, str):
        ids = list(prompt)
    elif encode is None:
        raise ConfigError(f"{where} holds text; the model has no tokenizer")
    else:
        ids = list(encode(prompt))
    if not ids:
        raise ConfigError(f"{where}: {prompt!r} encodes to no token")
    outside = [i for i in ids if not 0 <= i < vocab_size]
    if outside:
        raise ConfigError(f"{where}: token id {outside[0]} is outside the vocabulary [0, {vocab_size})")
    return ids


def _as_list(value: int | list[int]) -> list[int]:
    return [value] if isinstance(value, int) else list(value)


def _zipped_length(config: WorkloadConfig) -> int:
    """Number of zipped cases; lists longer than one must agree."""
    lengths = {name: len(_as_list(getattr(config, name))) for name in _LENGTHS}
    longest = max(lengths.values())
    if any(n not in (1, longest) for n in lengths.values()):
        given = ", ".join(f"{name} {n}" for name, n in lengths.items())
        raise ConfigError(
            f"workload.pairing=zip needs lists of one length, got {given}; or use pairing=product"
        )
    return longest


def _parse_prompt(line: str, where: str) -> Prompt:
    row = parse_line(line, where)
    if isinstance(row, dict):
        row = row.get("prompt_token_ids", row.get("prompt"))
    if isinstance(row, str) and row:
        return row
    if isinstance(row, list) and row and all(isinstance(i, int) and not isinstance(i, bool) for i in row):
        return row
    raise ConfigError(f"{where}: no text and no token ids in `prompt` or `prompt_token_ids`")
