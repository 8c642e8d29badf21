"""The held-out text as windows of tokens. No JAX here."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import numpy as np

from moejax.core.checked import Checked, OpenShare, PositiveInt, at_least
from moejax.core.errors import ConfigError, os_errors

if TYPE_CHECKING:
    from moejax.engine.requests.tokenizer import Tokenizer


@dataclass(frozen=True)
class HeldOutText(Checked):
    """The text that models are compared on.

    Attributes:
        text: the held-out text, a UTF-8 file; "auto" is `held_out.txt` in the model's folder.
        seq_len: tokens predicted in each window.
        max_windows: windows drawn from the text, without repeats; None takes all of them, in which case every
            token but the first is predicted once.
        resamples: bootstrap resamples of the windows.
        confidence: of every interval.
    """

    text: str = "auto"
    seq_len: PositiveInt = 256
    max_windows: Annotated[int, at_least(2)] | None = None
    resamples: Annotated[int, at_least(100)] = 2000
    confidence: OpenShare = 0.95

    @property
    def prefix(self) -> str:
        """What the names of its fields begin with on the command line."""
        return self._section


@dataclass(frozen=True)
class Windows:
    """Windows of a text, in its order.

    Attributes:
        tokens: int32 `[W, T + 1]`; of the text's last window what is left is 0.
        scored: bool `[W, T]`: tokens that are predicted; False is padding.
        source: the text's file.
        bytes_per_token: of the text's UTF-8.
        documents: name → bool `[W, T]`, the tokens of each with 5 % of a text of several, and of "others".
    """

    tokens: np.ndarray
    scored: np.ndarray
    source: str
    bytes_per_token: float
    documents: Mapping[str, np.ndarray] = field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.scored.sum())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what is predicted: two results with the same one measured the same tokens."""
        return hashlib.sha256(self.tokens.tobytes() + self.scored.tobytes()).hexdigest()


def read_windows(
    section: HeldOutText,
    model_dir: Path | None,
    tokenizer: "Tokenizer | None",
    max_model_len: int,
    seed: int,
    ends: Sequence[int] = (),
) -> Windows:
    """Cuts a text into windows. They follow one another, so that every token of the text but the first is
    predicted at most once; the first ones of a window see little context.

    Args:
        max_model_len: the longest window that the model takes.
        seed: draws `section.max_windows` of them.
        ends: tokens after which another document begins.

    Raises:
        ConfigError: no such text, no tokenizer, or too little text.
    """
    prefix, seq_len, most = section.prefix, section.seq_len, section.max_windows
    if seq_len + 1 > max_model_len:
        raise ConfigError(
            f"{prefix}seq_len={seq_len} and one token more exceed the limit of {max_model_len} tokens; "
            "shorten the windows"
        )
    path = Path(section.text)
    if section.text == "auto":
        path = (model_dir or Path()) / "held_out.txt"
        if model_dir is None or not path.is_file():
            where = "a model without a folder" if model_dir is None else str(model_dir)
            raise ConfigError(
                f"{prefix}text=auto: {where} has no held_out.txt; give one with {prefix}text=FILE"
            )
    if tokenizer is None:
        raise ConfigError(f"{prefix}text: the model has no tokenizer.json, so no text can be scored")
    with os_errors(ConfigError, f"{prefix}text: cannot read {path}"):
        content = path.read_text(encoding="utf-8")
    stream = np.array(tokenizer.encode(content), np.int32)
    targets = len(stream) - 1
    count = -(-targets // seq_len)
    if count < 2:
        raise ConfigError(
            f"{prefix}text: {path} has {len(stream)} tokens, and two windows of"
            f" {prefix}seq_len={seq_len} need {seq_len + 2}; give a longer text or shorter windows"
        )
    padded = np.zeros(count * seq_len + 1, np.int32)
    padded[: len(stream)] = stream
    index = np.arange(count)[:, None] * seq_len + np.arange(seq_len + 1)
    chosen = np.arange(count)
    if most is not None and most < count:
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:most])
    per_token = len(content.encode()) / len(stream)
    scored, masks = index[chosen, :-1] < targets, dict[str, np.ndarray]()
    is_end = np.isin(stream, ends)
    starts = np.flatnonzero(np.append(True, is_end[:-1]))
    for start, stop in zip(starts, [*starts[1:], len(stream)], strict=True) if len(starts) > 1 else ():
        name = tokenizer.decode(stream[start : start + 24].tolist()).strip().partition("\n")[0][:24]
        name = name if stop - start >= 0.05 * len(stream) else "others"
        mask = scored & (index[chosen, 1:] >= start) & (index[chosen, 1:] < stop)
        if mask.any():
            masks[name] = masks.get(name, False) | mask
    return Windows(padded[index[chosen]], scored, str(path), per_token, masks)
