"""An interrupted request as values, to go on in any process or engine. No JAX here."""

import dataclasses
import json
from typing import Any

from moejax.core.checked import Checked, Name, NonNegativeInt
from moejax.core.errors import RequestError
from moejax.engine.requests.api import Logprob, SamplingParams
from moejax.engine.requests.state import RequestState

VERSION = 1


@dataclasses.dataclass(frozen=True)
class Checkpoint(Checked, section="checkpoint", error=RequestError):
    """What `LLM.interrupt` keeps of a request.

    Attributes:
        model: what its model is, see `RequestBuilder`.
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

    @classmethod
    def of(cls, request: RequestState, model: str) -> "Checkpoint":
        """Returns what a request has between two steps."""
        out, first = request.output, request.sequences[0]
        room = first.max_length - first.prompt_len
        least = min(room, first.params.min_tokens)
        params = dataclasses.replace(first.params, seed=first.seed, max_tokens=room, min_tokens=least)
        samples = tuple(tuple(sample.token_ids) for sample in out.outputs)
        logprobs = tuple(tuple(sample.logprobs or ()) for sample in out.outputs)
        return cls(model, out.prompt, tuple(out.prompt_token_ids), params, samples, logprobs)

    def to_json(self) -> str:
        """Writes it as one line."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)})

    @classmethod
    def from_json(cls, text: str) -> "Checkpoint":
        """Reads what `to_json` wrote.

        Raises:
            RequestError: it is something else, damaged, or another version's.
        """

        def logprob(fields: dict[str, Any]) -> Logprob:
            return Logprob(**fields | {"top": {int(token): x for token, x in fields["top"].items()}})

        try:
            fields = json.loads(text)
            if (version := fields.pop("version")) != VERSION:
                raise RequestError(f"checkpoint: version {version}; this moejax reads version {VERSION}")
            fields["sampling_params"] = SamplingParams(**fields["sampling_params"])
            fields["logprobs"] = [list(map(logprob, sample)) for sample in fields["logprobs"]]
            return cls(**fields)
        except RequestError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise RequestError(f"not a checkpoint of LLM.interrupt: {error!r}") from None
