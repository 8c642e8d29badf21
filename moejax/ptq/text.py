"""The tokens that calibration runs: sequences of one length, chosen by a seed and none twice. No JAX here.

"auto" takes the train part of the corpus that the shipped model was made from (`moejax.text.corpus`), never
the held-out part that perplexity is measured on.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from moejax.core.errors import ConfigError
from moejax.core.quant import CalibrationConfig
from moejax.text.corpus import HELD_OUT_FRACTION, build_corpus


class Encoder(Protocol):
    """A tokenizer: `moejax.engine.requests.tokenizer.Tokenizer`, or one of the `tokenizers` library."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> Any: ...


def calibration_tokens(
    calibration: CalibrationConfig, tokenizer: Encoder, *, end: int | None = None
) -> np.ndarray:
    """Returns int32 `[num_samples, seq_len]`.

    The text's documents (a file is one) are strung together in an order drawn by the seed, cut into windows
    of `seq_len` tokens, and windows are drawn without repeats. Of the corpus only as many documents are
    encoded as fill the windows twice over, so that there is a choice.

    Args:
        end: token that ends each document, where the model knows one.

    Raises:
        ConfigError: the file cannot be read, or the text is too short.
    """
    samples, length = calibration.num_samples, calibration.seq_len
    rng = np.random.default_rng(calibration.seed)
    if calibration.text == "auto":
        documents = [document.text for document in build_corpus(HELD_OUT_FRACTION).train]
        order = rng.permutation(len(documents))
        stream = _stream((documents[i] for i in order), tokenizer, end, 2 * samples * length)
        source = "'auto' (the training part of Python's own documentation)"
    else:
        text = _read(calibration.text)
        stream = _stream((text,), tokenizer, end, None)
        source = str(calibration.text)
    windows = len(stream) // length
    if windows < samples:
        raise ConfigError(_too_short(source, len(stream), calibration))
    chosen = rng.permutation(windows)[:samples]
    return stream[: windows * length].reshape(windows, length)[chosen]


def _stream(texts: Iterable[str], tokenizer: Encoder, end: int | None, enough: int | None) -> np.ndarray:
    """Returns int32 tokens of the texts, one after another, until there are enough."""
    parts: list[np.ndarray] = []
    count = 0
    for text in texts:
        encoding = tokenizer.encode(text, add_special_tokens=False)
        ids = [*getattr(encoding, "ids", encoding), *([] if end is None else [end])]
        parts.append(np.array(ids, np.int32))
        count += len(ids)
        if enough is not None and count >= enough:
            break
    return np.concatenate(parts) if parts else np.zeros(0, np.int32)


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ConfigError(
            f"quant.calibration.text: cannot read {path} ({error.strerror or error}); give a UTF-8 file or "
            "'auto'"
        ) from None
    except UnicodeDecodeError as error:
        raise ConfigError(
            f"quant.calibration.text: {path} is not UTF-8 ({error.reason} at {error.start})"
        ) from None


def _too_short(source: str, tokens: int, calibration: CalibrationConfig) -> str:
    samples, length = calibration.num_samples, calibration.seq_len
    start = (
        f"quant.calibration.text: {source} has {tokens} tokens, but num_samples={samples} × seq_len={length} "
        f"needs {samples * length}"
    )
    if tokens < 2:
        return f"{start}; give a longer text"
    least = tokens // length
    lower = f"lower num_samples to at most {least}" if least else f"lower seq_len to at most {tokens}"
    return f"{start}; {lower}, or give a longer text"
