"""The held-out text as windows of tokens. No JAX here."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moejax.core.errors import ConfigError, os_errors
from moejax.engine.requests.tokenizer import Tokenizer


@dataclass(frozen=True)
class Windows:
    """Windows of a text, in its order.

    Attributes:
        tokens: int32 `[W, T + 1]`; of the text's last window what is left is 0.
        scored: bool `[W, T]`: tokens that are predicted; False is padding.
        source: the text's file.
        bytes_per_token: of the text's UTF-8.
    """

    tokens: np.ndarray
    scored: np.ndarray
    source: str
    bytes_per_token: float

    @property
    def num_tokens(self) -> int:
        """Tokens that are predicted."""
        return int(self.scored.sum())

    @property
    def fingerprint(self) -> str:
        """SHA-256 of what is predicted: two results with the same one measured the same tokens."""
        return hashlib.sha256(self.tokens.tobytes() + self.scored.tobytes()).hexdigest()


def read_windows(
    text: str,
    seq_len: int,
    max_windows: int | None,
    *,
    model_dir: Path | None,
    tokenizer: Tokenizer | None,
    seed: int,
    max_model_len: int,
    section: str = "quantization",
) -> Windows:
    """Cuts a text into windows of `seq_len` predicted tokens. They follow one another, so that every token of
    the text but the first is predicted at most once; the first ones of a window see little context.

    Args:
        text: a UTF-8 file, or "auto" for `held_out.txt` in `model_dir`.
        max_windows: so many are drawn by `seed`, without repeats; None takes all.
        max_model_len: the longest window that the model takes.
        section: of the configuration, for messages.

    Raises:
        ConfigError: no such text, no tokenizer, or too little text.
    """
    if seq_len + 1 > max_model_len:
        raise ConfigError(
            f"{section}.seq_len={seq_len} and one token more exceed the limit of {max_model_len} tokens; "
            "shorten the windows"
        )
    path = Path(text)
    if text == "auto":
        path = (model_dir or Path()) / "held_out.txt"
        if model_dir is None or not path.is_file():
            where = "a model without a folder" if model_dir is None else str(model_dir)
            raise ConfigError(
                f"{section}.text=auto: {where} has no held_out.txt; give one with {section}.text=FILE"
            )
    if tokenizer is None:
        raise ConfigError(f"{section}.text: the model has no tokenizer.json, so no text can be scored")
    with os_errors(ConfigError, f"{section}.text: cannot read {path}"):
        content = path.read_text(encoding="utf-8")
    stream = np.array(tokenizer.encode(content), np.int32)
    targets = len(stream) - 1
    count = -(-targets // seq_len)
    if count < 2:
        raise ConfigError(
            f"{section}.text: {path} has {len(stream)} tokens, and two windows of"
            f" {section}.seq_len={seq_len} need {seq_len + 2}; give a longer text or shorter windows"
        )
    padded = np.zeros(count * seq_len + 1, np.int32)
    padded[: len(stream)] = stream
    index = np.arange(count)[:, None] * seq_len + np.arange(seq_len + 1)
    chosen = np.arange(count)
    if max_windows is not None and max_windows < count:
        chosen = np.sort(np.random.default_rng(seed).permutation(count)[:max_windows])
    per_token = len(content.encode()) / len(stream)
    return Windows(padded[index[chosen]], index[chosen, :-1] < targets, str(path), per_token)
