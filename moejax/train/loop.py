"""The training loop: text in, a trained state out; checkpoints, evaluation and figures on the way.

It knows nothing of Hydra and nothing of what becomes of the model (see `moejax.train.export`).
"""

import dataclasses
import logging
import math
import time
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

from moejax.checkpoint.orbax import Checkpoints
from moejax.core.errors import CheckpointError, ConfigError
from moejax.core.files import to_jsonable
from moejax.report.progress import progress
from moejax.routing.analysis import load_shares
from moejax.tracking.base import Scalar, Tracker
from moejax.train.adapter import base_params, merged
from moejax.train.config import TrainConfig
from moejax.train.data import Batches, TrainingText, prepare_text
from moejax.train.evaluate import Evaluator, HeldOut
from moejax.train.optimizer import learning_rate_schedule
from moejax.train.step import StepMetrics, TrainState, init_state, make_train_step

logger = logging.getLogger(__name__)

RESULT_FREE = frozenset(
    {
        "log_every",
        "eval_every",
        "checkpoint_every",
        "keep",
        "checkpoint_dir",
        "resume",
        "export_dir",
        "documents",
    }
)
"""Fields of `TrainConfig` that do not change what is trained, or, as `documents`, by the text alone, whose
digest is kept; a resumed run may have others."""


@dataclass(frozen=True)
class TrainResult:
    """A finished run.

    Attributes:
        state: the last one.
        text: what it was trained on.
        held_out: of the float32 weights.
        seconds: spent in training steps over all starts of the run, without compiling, evaluating and saving.
        cpu_seconds: of all threads in the same time; on a busy machine they tell more than `seconds`.
        resumed_from: the step that this start went on from; 0 for a fresh one.
        metrics: the last logged figures and the summary.
    """

    state: TrainState
    text: TrainingText
    held_out: HeldOut
    seconds: float
    cpu_seconds: float
    resumed_from: int
    metrics: dict[str, Scalar]


def train(config: TrainConfig, tracker: Tracker, text: TrainingText | None = None) -> TrainResult:
    """Trains until `config.steps`, from the newest checkpoint if there is one and `config.resume` is set.

    A run that was killed and started again gives the same weights, bit for bit, as one that was not: the
    data order and each step's randomness are functions of the state that the checkpoints hold.

    Args:
        text: what to train on; None takes what `prepare_text` makes of the running Python.

    Raises:
        ConfigError: the text does not fit the configuration, or the loss stops being a number.
        CheckpointError: the checkpoint belongs to another configuration (the differing keys are named) or
            is damaged.
        OutputError: a checkpoint cannot be written.
    """
    with Checkpoints(config.checkpoint_dir, keep=config.keep) as checkpoints:
        if text is None:
            with progress("reading Python's documentation"):
                text = prepare_text(config)
        logger.info("text: %s; %d train tokens", text.corpus.describe(), sum(map(len, text.train)))
        run = _Run(config, tracker, checkpoints, text)
        run.all_steps()
        held_out = run.evaluate()
        summary = run.summary(held_out)
        tracker.summary(summary)
    return TrainResult(
        run.state, text, held_out, run.seconds, run.cpu_seconds, run.start, {**run.last, **summary}
    )


def run_identity(config: TrainConfig) -> dict[str, Any]:
    """Returns the value by dotted key of everything in the configuration that decides what is trained."""
    unused = RESULT_FREE | ({"model", "vocab_size"} if config.adapter.rank else {"adapter"})
    flat: dict[str, Any] = {}
    for item in dataclasses.fields(TrainConfig):  # not a subclass's: where figures go changes nothing
        value = getattr(config, item.name)
        if item.name in unused:
            continue
        if dataclasses.is_dataclass(value):
            flat |= {f"{item.name}.{key}": to_jsonable(part) for key, part in vars(value).items()}
        else:
            flat[item.name] = to_jsonable(value)
    return flat


def check_identity(stored: dict[str, Any], current: dict[str, Any], directory: str) -> None:
    """Raises `CheckpointError` naming the keys that differ between a checkpoint's run and this one."""
    different = [key for key in sorted({*stored, *current}) if stored.get(key) != current.get(key)]
    if not different:
        return
    said = [
        "the text (another Python version's library, or other documents)"
        if key == "text"
        else f"{key} ({stored.get(key)!r} there, {current.get(key)!r} here)"
        for key in different
    ]
    raise CheckpointError(
        f"{directory}: the checkpoint is of another run; what differs: {', '.join(said)};"
        " choose another checkpoint_dir, or start afresh with resume=false"
    )


class _Run:
    """The mutable part of a run: its state, its clock, the last logged figures."""

    def __init__(
        self, config: TrainConfig, tracker: Tracker, checkpoints: Checkpoints, text: TrainingText
    ) -> None:
        self.config, self.tracker, self.checkpoints = config, tracker, checkpoints
        self.identity = {**run_identity(config), "text": text.fingerprint}
        self.batches = Batches(
            text.train, batch_size=config.batch_size, seq_len=config.seq_len, seed=config.seed
        )
        self.seconds, self.cpu_seconds = 0.0, 0.0
        self.base = base_params(config)
        self.state = self._first_state()
        self.start = int(self.state.step)
        self.last: dict[str, Scalar] = {}
        self.untrained: HeldOut | None = None
        self._schedule = learning_rate_schedule(config)
        self._evaluator = Evaluator(config)
        self._held_out = text.held_out

    def all_steps(self) -> None:
        """Runs every step that is left, with logging, evaluation and checkpoints as configured."""
        config = self.config
        if self.base is not None:
            self.untrained = self._evaluator(self.base, self._held_out)
            if not self.start:
                self._log_held_out(0, self.untrained)
        if self.start == config.steps:
            logger.info("the newest checkpoint is of the last step: nothing left to train")
            return
        step = self._compile()
        tracked: list[StepMetrics] = []
        since = self.seconds
        with progress("training", total=config.steps) as bar:
            bar.advance(self.start)
            for done in range(self.start + 1, config.steps + 1):
                began, cpu_began = time.perf_counter(), time.process_time()
                self.state, metrics = step(self.state, self.batches(int(self.state.sequence)), self.base)
                tracked.append(jax.device_get(metrics))
                self.seconds += time.perf_counter() - began
                self.cpu_seconds += time.process_time() - cpu_began
                bar.advance()
                self._check_finite(done, tracked[-1])
                if done % config.log_every == 0 or done == config.steps:
                    self._log(done, tracked, self.seconds - since)
                    bar.describe(f"training, loss {self.last['train/cross_entropy']:.3f}")
                    tracked, since = [], self.seconds
                if done % config.eval_every == 0 and done != config.steps:
                    self._log_held_out(done, self.evaluate())
                if done % config.checkpoint_every == 0 or done == config.steps:
                    clocks = {"seconds": self.seconds, "cpu_seconds": self.cpu_seconds}
                    self.checkpoints.save(done, self.state, {"identity": self.identity, **clocks})

    def evaluate(self) -> HeldOut:
        params = self.state.params
        return self._evaluator(params if self.base is None else merged(self.base, params), self._held_out)

    def summary(self, held_out: HeldOut) -> dict[str, Scalar]:
        """Logs the last evaluation and the table of expert load; returns the run's final figures."""
        self._log_held_out(self.config.steps, held_out)
        shares = load_shares(held_out.counts)
        rows = [[layer, expert, float(shares[layer, expert])] for layer, expert in np.ndindex(shares.shape)]
        self.tracker.table("expert_load", ["layer", "expert", "share"], rows)
        return {
            "held_out_loss": held_out.loss,
            "held_out_perplexity": held_out.perplexity,
            "held_out_tokens": held_out.tokens,
            **({"base_held_out_perplexity": self.untrained.perplexity} if self.untrained else {}),
            "min_expert_share": float(shares.min()),
            "max_expert_share": float(shares.max()),
            "num_params": sum(leaf.size for leaf in jax.tree.leaves(self.state.params)),
            "train_seconds": self.seconds,
            "train_cpu_seconds": self.cpu_seconds,
            "train_tokens": self.config.tokens_per_step * self.config.steps,
            "epochs": self.batches.epochs(int(self.state.sequence)),
        }

    def _first_state(self) -> TrainState:
        """Returns the newest checkpoint's state, with the clocks set to its time, or a fresh one."""
        if not self.config.resume:
            self.checkpoints.delete_all()
        fresh = init_state(self.config)
        step = self.checkpoints.latest
        if step is None:
            return fresh
        metadata = self.checkpoints.metadata(step)
        check_identity(metadata.get("identity", {}), self.identity, self.config.checkpoint_dir)
        logger.info("resuming after step %d from %s", step, self.config.checkpoint_dir)
        self.seconds = float(metadata.get("seconds", 0.0))
        self.cpu_seconds = float(metadata.get("cpu_seconds", 0.0))
        return self.checkpoints.load(step, fresh)

    def _compile(self) -> Any:
        """Returns the step for this run's shapes, compiled here so that no step's time holds it."""
        began = time.perf_counter()
        batch = self.batches(int(self.state.sequence))
        compiled = make_train_step(self.config).lower(self.state, batch, self.base).compile()
        logger.info("compiled the training step in %.1f s", time.perf_counter() - began)
        return compiled

    def _check_finite(self, step: int, metrics: StepMetrics) -> None:
        # The gradient's norm too: with a bad gradient the loss goes wrong only in the next step, and a
        # checkpoint may lie between.
        loss, norm = float(metrics.parts.loss), float(metrics.grad_norm)
        if not (math.isfinite(loss) and math.isfinite(norm)):
            raise ConfigError(
                f"the loss became {loss} (gradient norm {norm}) at step {step};"
                f" lower learning_rate ({self.config.learning_rate})"
            )

    def _log(self, step: int, tracked: list[StepMetrics], seconds: float) -> None:
        """Means over the steps since the last line."""
        parts = {
            name: float(np.mean([getattr(metrics.parts, name) for metrics in tracked]))
            for name in ("loss", "cross_entropy", "load_balance", "router_z")
        }
        chosen = np.sum([metrics.routing.chosen for metrics in tracked], axis=0)
        dropped = np.sum([metrics.routing.dropped for metrics in tracked])
        shares = load_shares(chosen)
        self.last = {
            **{f"train/{name}": value for name, value in parts.items()},
            "train/grad_norm": float(np.mean([metrics.grad_norm for metrics in tracked])),
            # The rate that the last of these steps used: the schedule counts from 0.
            "train/learning_rate": float(self._schedule(step - 1)),
            "train/tokens_per_s": self.config.tokens_per_step * len(tracked) / seconds,
            "train/epoch": self.batches.epochs(int(self.state.sequence)),
            "train/dropped_fraction": float(dropped / chosen.sum()),
            **{f"load/max_over_mean_layer{i}": float(s.max() * s.size) for i, s in enumerate(shares)},
            "load/min_share": float(shares.min()),
        }
        self.tracker.log(self.last, step)

    def _log_held_out(self, step: int, held_out: HeldOut) -> None:
        self.tracker.log({"held_out/loss": held_out.loss, "held_out/perplexity": held_out.perplexity}, step)
        logger.info("step %d: held-out perplexity %.3f", step, held_out.perplexity)
