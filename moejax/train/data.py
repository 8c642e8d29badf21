"""Batches of documents. The tokens of a sequence are a pure function of (seed, its number).

An epoch shuffles the documents, strings them together (each ends in `<|endoftext|>`), starts at a random
offset below `seq_len`, cuts the stream into windows of `seq_len + 1` tokens that overlap by one, and shuffles
the windows. So no epoch cuts the text at the same places. No JAX here.
"""

import hashlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from tokenizers import Tokenizer

from moejax.checkpoint.directory import resolve_model_dir
from moejax.core.errors import ConfigError
from moejax.text.corpus import Corpus, Document, build_corpus
from moejax.train.config import TrainConfig
from moejax.train.tokenizer import END_OF_TEXT, train_tokenizer

HELD_OUT_CHARACTERS = 100_000
"""Size of the held-out sample that is evaluated and shipped."""


@dataclass(frozen=True)
class TrainingText:
    """Text that a run trains on and is evaluated on.

    Attributes:
        corpus: all documents of both parts.
        tokenizer: trained on the train part.
        train: int32 token ids of each train document.
        sample: the held-out documents that are evaluated, as one text; `<|endoftext|>` ends each.
        fingerprint: SHA-256 of all token ids: two runs with the same one see the same tokens.
    """

    corpus: Corpus
    tokenizer: Tokenizer
    train: list[np.ndarray]
    sample: str
    fingerprint: str

    @property
    def held_out(self) -> np.ndarray:
        """int32 token ids of `sample`."""
        return np.array(self.tokenizer.encode(self.sample).ids, np.int32)


def prepare_text(config: TrainConfig) -> TrainingText:
    """Reads the corpus, trains the tokenizer (an adapter has its base's) and encodes. Deterministic for a
    Python version.

    Raises:
        ConfigError: see `build_corpus` and `train_tokenizer`; or no document of either part is asked for.
    """
    corpus = build_corpus(config.held_out_fraction)
    parts = [
        tuple(document for document in part if re.search(config.documents, document.name))
        for part in (corpus.train, corpus.held_out)
    ]
    if not all(parts):
        some = ", ".join(document.name for document in corpus.train[:3])
        raise ConfigError(
            f"documents: {config.documents!r} is in the names of {len(parts[0])} documents to train on and of"
            f" {len(parts[1])} held out, and each part needs one; names are such as {some}"
        )
    corpus = Corpus(*parts)
    if config.adapter.rank:
        file = resolve_model_dir(config.adapter.base) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"adapter.base: {file} is missing, and text is to be encoded")
        tokenizer = Tokenizer.from_file(str(file))
        if tokenizer.token_to_id(END_OF_TEXT) is None:
            raise ConfigError(f"adapter.base: {file} has no {END_OF_TEXT}, which ends documents")
    else:
        tokenizer = train_tokenizer((document.text for document in corpus.train), config.vocab_size)
    train = encode(tokenizer, corpus.train)
    sample = "".join(document.text + END_OF_TEXT for document in sample_of(corpus.held_out))
    digest = hashlib.sha256(sample.encode())
    for document in train:
        digest.update(document.tobytes())
    return TrainingText(corpus, tokenizer, train, sample, digest.hexdigest())


def sample_of(documents: Sequence[Document]) -> list[Document]:
    """Returns whole documents, in order, each that still fits into `HELD_OUT_CHARACTERS`; at least one."""
    chosen: list[Document] = []
    room = HELD_OUT_CHARACTERS
    for document in documents:
        if len(document.text) <= room or not chosen:
            chosen.append(document)
            room -= len(document.text)
    return chosen


def encode(tokenizer: Tokenizer, documents: Sequence[Document]) -> list[np.ndarray]:
    """Returns int32 token ids of each document, `<|endoftext|>` last."""
    end = tokenizer.token_to_id(END_OF_TEXT)
    encoded = tokenizer.encode_batch([document.text for document in documents])
    return [np.array([*item.ids, end], np.int32) for item in encoded]


class Batches:
    """The batches of a training run.

    Raises:
        ConfigError: the text is shorter than one batch.
    """

    def __init__(self, documents: Sequence[np.ndarray], *, batch_size: int, seq_len: int, seed: int) -> None:
        self._documents = list(documents)
        self._batch_size, self._seq_len, self._seed = batch_size, seq_len, seed
        self.num_tokens = sum(len(document) for document in documents)
        # One window fewer than fit, so that the number does not depend on the epoch's offset.
        self.windows_per_epoch = (self.num_tokens - 1) // seq_len - 1
        if self.windows_per_epoch < batch_size:
            raise ConfigError(
                f"the text has {self.num_tokens} tokens, fewer than a batch of"
                f" batch_size={batch_size} × seq_len={seq_len} needs"
            )
        self._cached: tuple[int, np.ndarray, np.ndarray] | None = None

    def __call__(self, sequence: int) -> np.ndarray:
        """Returns int32 `[batch_size, seq_len + 1]`: the batch that starts at the data order's sequence
        number `sequence`. Inputs are `[:, :-1]`, targets `[:, 1:]`."""
        windows = []
        for index in range(sequence, sequence + self._batch_size):
            epoch, place = divmod(index, self.windows_per_epoch)
            stream, starts = self._epoch(epoch)
            windows.append(stream[starts[place] : starts[place] + self._seq_len + 1])
        return np.stack(windows)

    def epochs(self, sequence: int) -> float:
        """Returns how many times the text has been seen before sequence number `sequence`."""
        return sequence / self.windows_per_epoch

    def _epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the token stream of an epoch and the first token of each window; the last epoch is kept."""
        if self._cached is None or self._cached[0] != epoch:
            rng = np.random.default_rng([self._seed, epoch])
            order = rng.permutation(len(self._documents))
            stream = np.concatenate([self._documents[i] for i in order])
            starts = rng.integers(self._seq_len) + self._seq_len * rng.permutation(self.windows_per_epoch)
            self._cached = epoch, stream, starts
        return self._cached[1], self._cached[2]


def held_out_batches(
    stream: np.ndarray, *, batch_size: int, seq_len: int
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields every token of a stream, but its first, as a target exactly once.

    Windows follow one another without overlap of targets; a window's first tokens see little context, as in
    training.

    Yields:
        tokens int32 `[batch_size, seq_len + 1]` and scored bool `[batch_size, seq_len]`; False is padding.
    """
    targets = len(stream) - 1
    windows = -(-targets // seq_len)
    rows = -(-windows // batch_size) * batch_size
    padded = np.zeros(rows * seq_len + 1, np.int32)
    padded[: len(stream)] = stream
    index = np.arange(rows)[:, None] * seq_len + np.arange(seq_len + 1)
    scored = index[:, :-1] < targets
    for first in range(0, rows, batch_size):
        part = slice(first, first + batch_size)
        yield padded[index[part]], scored[part]
