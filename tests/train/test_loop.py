"""Training runs: they learn, they resume bit for bit, and they refuse what does not fit."""

import dataclasses
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moejax.core.errors import CheckpointError, ConfigError
from moejax.train.config import TrainConfig
from moejax.train.data import TrainingText
from moejax.train.loop import TrainResult, check_identity, run_identity, train
from moejax.train.step import add_noise, init_state, make_eval_step, make_train_step, model_config
from tests.numerics import assert_close, tolerance

from .small import VOCAB, Recorder, small_config, small_text


@pytest.fixture(scope="module")
def text() -> TrainingText:
    return small_text()


Whole = tuple[Path, TrainResult, Recorder]


@pytest.fixture(scope="module")
def whole(text: TrainingText, tmp_path_factory: pytest.TempPathFactory) -> Whole:
    """All steps without a break: the folder, the result and what was tracked."""
    folder, tracker = tmp_path_factory.mktemp("whole"), Recorder()
    return folder, train(small_config(folder), tracker, text), tracker


def _copy_of(whole: Whole, folder: Path) -> Path:
    """A folder with the finished run's checkpoints."""
    shutil.copytree(whole[0] / "checkpoints", folder / "checkpoints")
    return folder


def _assert_same_bits(ours: Any, theirs: Any) -> None:
    assert str(jax.tree.structure(ours)) == str(jax.tree.structure(theirs))
    for (path, a), (_, b) in zip(
        jax.tree_util.tree_leaves_with_path(ours), jax.tree_util.tree_leaves_with_path(theirs), strict=True
    ):
        name = jax.tree_util.keystr(path)
        assert a.dtype == b.dtype and a.shape == b.shape, name
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes(), f"{name} differs"


class _Stop(Exception):
    pass


class _Stopping(Recorder):
    """Ends the run when a step is logged, as a kill would, between two checkpoints."""

    def __init__(self, after: int) -> None:
        super().__init__()
        self.after = after

    def log(self, metrics: Any, step: int | None = None) -> None:
        super().log(metrics, step)
        if step == self.after:
            raise _Stop


def test_the_loss_falls(whole: Whole) -> None:
    _, result, tracker = whole
    losses = [value for _, value in tracker.series("train/cross_entropy")]
    assert losses[0] > 5.0 and losses[-1] < 0.8 * losses[0]
    held_out = [value for _, value in tracker.series("held_out/loss")]
    assert held_out[-1] < held_out[0]
    assert result.held_out.perplexity == pytest.approx(np.exp(held_out[-1]))


def test_what_is_logged(whole: Whole) -> None:
    _, result, tracker = whole
    assert [step for step, _ in tracker.series("train/loss")] == list(range(1, 25))
    assert [step for step, _ in tracker.series("held_out/perplexity")] == [12, 24]
    row = dict(tracker.rows[-2][1])
    for name in ("grad_norm", "learning_rate", "tokens_per_s", "load_balance", "router_z", "epoch"):
        assert row[f"train/{name}"] > 0
    assert 0 <= row["train/dropped_fraction"] < 1
    assert row["load/max_over_mean_layer0"] >= 1 and 0 <= row["load/min_share"] <= 0.25
    assert len(tracker.tables["expert_load"]) == 1 + 4
    assert tracker.final["held_out_tokens"] == len(result.text.held_out) - 1
    assert result.held_out.counts.sum(1).tolist() == [2 * (len(result.text.held_out) - 1)]


def test_a_resumed_run_is_bit_exact(whole: Whole, text: TrainingText, tmp_path: Path) -> None:
    _, result, tracker = whole
    config = small_config(tmp_path)
    first, second = _Stopping(after=13), Recorder()
    with pytest.raises(_Stop):
        train(config, first, text)
    resumed = train(config, second, text)
    assert resumed.resumed_from == 8
    _assert_same_bits(resumed.state, result.state)
    whole_losses = dict(tracker.series("train/loss"))
    for step, loss in (*first.series("train/loss"), *second.series("train/loss")):
        assert loss == whole_losses[step], f"step {step}"
    assert resumed.held_out.loss == result.held_out.loss


def test_a_finished_run_trains_no_more(whole: Whole, text: TrainingText) -> None:
    folder, result, _ = whole
    tracker = Recorder()
    again = train(small_config(folder), tracker, text)
    assert again.resumed_from == 24 and not tracker.series("train/loss")
    assert again.seconds == result.seconds and again.cpu_seconds == result.cpu_seconds
    _assert_same_bits(again.state, result.state)


def test_a_fresh_start_forgets_the_checkpoints_and_repeats_the_run(
    whole: Whole, text: TrainingText, tmp_path: Path
) -> None:
    config = small_config(_copy_of(whole, tmp_path), resume=False, checkpoint_every=4, keep=3)
    fresh = train(config, Recorder(), text)
    assert fresh.resumed_from == 0
    _assert_same_bits(fresh.state, whole[1].state)
    assert sorted(int(path.name) for path in (tmp_path / "checkpoints").iterdir()) == [16, 20, 24]


def test_another_configuration_is_refused_by_its_keys(whole: Whole, text: TrainingText) -> None:
    changed = small_config(whole[0], learning_rate=0.5, seed=3, log_every=7, keep=9)
    with pytest.raises(CheckpointError) as caught:
        train(changed, Recorder(), text)
    message = str(caught.value)
    assert "learning_rate (0.02 there, 0.5 here), seed (0 there, 3 here)" in message
    assert "log_every" not in message and "keep" not in message and "\n" not in message
    assert "resume=false" in message


def test_identity_covers_the_model_and_the_text(tmp_path: Path) -> None:
    identity = {**run_identity(small_config(tmp_path)), "text": "a"}
    assert identity["model.num_experts"] == 4 and "checkpoint_dir" not in identity
    check_identity(identity, dict(identity), "here")
    with pytest.raises(CheckpointError, match="another Python version"):
        check_identity(identity, {**identity, "text": "b"}, "here")


def test_a_damaged_checkpoint_is_one_line(whole: Whole, text: TrainingText, tmp_path: Path) -> None:
    config = small_config(_copy_of(whole, tmp_path))
    shutil.rmtree(tmp_path / "checkpoints" / "24" / "state")
    with pytest.raises(CheckpointError, match="not a readable checkpoint") as caught:
        train(config, Recorder(), text)
    assert "\n" not in str(caught.value)


def test_a_folder_that_holds_something_else_is_left_alone(text: TrainingText, tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "thesis.tex").write_text("do not delete")
    with pytest.raises(ConfigError, match=r"holds 'thesis\.tex'"):
        train(small_config(tmp_path, resume=False), Recorder(), text)


def test_a_loss_that_is_no_number_ends_the_run(text: TrainingText, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"the loss became \S+ \(gradient norm \S+\) at step \d+; lower"):
        train(small_config(tmp_path, learning_rate=1e30, warmup_steps=0), Recorder(), text)


def _two_layers(config: TrainConfig) -> TrainConfig:
    return dataclasses.replace(config, model=dataclasses.replace(config.model, num_hidden_layers=2))


def test_training_drops_and_counts_while_evaluation_does_not(tmp_path: Path) -> None:
    config = _two_layers(small_config(tmp_path, capacity_factor=0.5, token_noise=0.0))
    state, batch = init_state(config), np.zeros((4, 33), np.int32)
    scored = np.ones((4, 32), bool)
    sums = make_eval_step(model_config(config))(state.params, batch, scored)
    assert sums.counts.sum(1).tolist() == [4 * 32 * 2] * 2
    _, metrics = make_train_step(config)(state, batch)
    # All tokens are alike, so two experts are asked for all 128 and have room for 32 each.
    assert metrics.routing.chosen.sum(1).tolist() == [256, 256]
    assert metrics.routing.dropped[0] == 256 - 2 * 32


def test_with_room_for_all_training_and_evaluation_agree(text: TrainingText, tmp_path: Path) -> None:
    config = small_config(tmp_path, capacity_factor=2.0, token_noise=0.0)  # E / k: nothing can overflow
    state = init_state(config)
    batch = np.stack([text.train[0][i : i + 33] for i in range(4)])
    sums = make_eval_step(model_config(config))(state.params, batch, np.ones((4, 32), bool))
    _, metrics = make_train_step(config)(state, batch)
    assert metrics.routing.dropped.tolist() == [0]
    assert_close(metrics.parts.cross_entropy, sums.nats / 128.0, tolerance(VOCAB, 16, 128))


def test_noise_replaces_its_share_of_the_inputs() -> None:
    tokens = jnp.full((64, 64), 7, jnp.int32)
    noisy = np.asarray(add_noise(tokens, 0.25, VOCAB, jax.random.key(0)))
    assert 0.2 < (noisy != 7).mean() < 0.3
    assert noisy.min() >= 3 and noisy.max() < VOCAB
    again = np.asarray(add_noise(tokens, 0.25, VOCAB, jax.random.key(0)))
    np.testing.assert_array_equal(noisy, again)


_CHILD = """
import sys
from pathlib import Path
from tests.train.small import Recorder, small_config, small_text
from moejax.train.loop import train
folder = Path(sys.argv[1])
config = small_config(folder, steps=400, checkpoint_every=5, eval_every=400)
result = train(config, Recorder(), small_text())
import jax, numpy as np
np.savez(folder / "end.npz", *[np.asarray(x) for x in jax.tree.leaves(result.state)])
print(result.resumed_from)
"""


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    """SIGKILL in the midst of steps and saves, twice; then the same bits as without."""
    root = Path(__file__).resolve().parents[2]

    def start(folder: Path) -> subprocess.Popen[str]:
        folder.mkdir(exist_ok=True)
        return subprocess.Popen(
            [sys.executable, "-c", _CHILD, str(folder)], cwd=root, text=True, stdout=subprocess.PIPE
        )

    killed = tmp_path / "killed"
    for at_least in (20, 100):
        child = start(killed)
        while _newest(killed) < at_least:
            assert child.poll() is None
            time.sleep(0.02)
        os.kill(child.pid, signal.SIGKILL)
        child.communicate()
    child = start(killed)
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0 and int(out.strip()) >= 100
    child = start(tmp_path / "whole")
    out, _ = child.communicate(timeout=300)
    assert child.returncode == 0 and int(out.strip()) == 0
    ours, theirs = np.load(killed / "end.npz"), np.load(tmp_path / "whole" / "end.npz")
    assert ours.files == theirs.files
    for name in ours.files:
        assert ours[name].tobytes() == theirs[name].tobytes(), name


def _newest(folder: Path) -> int:
    checkpoints = folder / "checkpoints"
    names = [p.name for p in checkpoints.iterdir()] if checkpoints.is_dir() else []
    return max((int(name) for name in names if name.isdigit()), default=0)
