"""A run that takes a second: a dozen documents and a model of a few thousand parameters."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moejax.text.corpus import Corpus, Document
from moejax.train.config import TrainConfig, TrainModelConfig
from moejax.train.data import TrainingText, encode
from moejax.train.tokenizer import END_OF_TEXT, train_tokenizer

WORDS = (
    "the router sends each token to a few experts and the experts answer with a sum of their outputs"
).split()
VOCAB = 272


def small_text() -> TrainingText:
    """Deterministic nonsense of real words; the same in every process."""
    documents = []
    for number in range(12):
        words = [WORDS[(i * i + number * i + number) % len(WORDS)] for i in range(240)]
        documents.append(Document(f"module:part{number}", " ".join(words)))
    corpus = Corpus(tuple(documents[2:]), tuple(documents[:2]))
    tokenizer = train_tokenizer((document.text for document in corpus.train), VOCAB)
    sample = "".join(document.text + END_OF_TEXT for document in corpus.held_out)
    return TrainingText(corpus, tokenizer, encode(tokenizer, corpus.train), sample, "small")


def small_config(folder: Path, **changes: Any) -> TrainConfig:
    """24 steps with checkpoints every eight."""
    model = TrainModelConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=8,
        max_position_embeddings=64,
    )
    values: dict[str, Any] = {
        "model": model,
        "vocab_size": VOCAB,
        "steps": 24,
        "batch_size": 4,
        "seq_len": 32,
        "learning_rate": 2e-2,
        "warmup_steps": 2,
        "log_every": 1,
        "eval_every": 12,
        "checkpoint_every": 8,
        "checkpoint_dir": str(folder / "checkpoints"),
    }
    return TrainConfig(**{**values, **changes})


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.rows: list[tuple[int | None, dict[str, Any]]] = []
        self.final: dict[str, Any] = {}
        self.tables: dict[str, list[Sequence[Any]]] = {}

    def log(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        self.rows.append((step, dict(metrics)))

    def summary(self, metrics: Mapping[str, Any]) -> None:
        self.final.update(metrics)

    def define_metric(self, name: str, *, step_metric: str | None = None, summary: str | None = None) -> None:
        pass

    def table(self, name: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.tables[name] = [columns, *rows]

    def image(self, name: str, path: Path) -> None:
        raise AssertionError("no pictures are expected")

    def artifact(self, name: str, kind: str, paths: Sequence[Path]) -> None:
        pass

    def finish(self, exit_code: int = 0) -> None:
        pass

    def hints(self) -> list[str]:
        return []

    def series(self, name: str) -> list[tuple[int | None, float]]:
        """(step, value) of one metric."""
        return [(step, row[name]) for step, row in self.rows if name in row]
