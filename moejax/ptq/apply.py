"""Quantizes a model in place: `quantize_model`.

Data-free weights (round-to-nearest) are quantized one after another, each float weight released before the
next. With calibration the model goes through layer by layer: the calibration set's hidden states wait on the
host (in `work_dir`, if there is one), one layer's statistics are collected from its float weights, they are
quantized, and the set moves on through the quantized layer. So the most memory is the model, one layer's Gram
matrices and one batch.

The set moves on through the layer's DEQUANTIZED weights, in the model's dtype: what the quantized layer
computes, except that activations are not rounded where a format quantizes them too.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from moejax.core.errors import ConfigError
from moejax.core.files import content_hash
from moejax.core.quant import QuantConfig
from moejax.models.decoder import Decoder
from moejax.nn.param import iter_params, specs
from moejax.nn.quantized import quantized_weights
from moejax.ptq.batches import HiddenStates
from moejax.ptq.collect_statistics import StatisticsCollector
from moejax.ptq.fold import store
from moejax.ptq.layerwise import QuantizedStage, StageWork, expert_counts, scaling_method
from moejax.ptq.methods import Rounded, weight_report
from moejax.ptq.observers import advance
from moejax.ptq.on_load import QuantizeOnLoad, place_tensors, quant_report
from moejax.ptq.report import QuantReport, StageReport, WeightReport, resumed_report
from moejax.ptq.sites import Stage, stages_of
from moejax.ptq.store import WorkDir, hash_arrays
from moejax.quantization.arithmetic import dequantize
from moejax.quantization.formats import PARTS, QTensor
from moejax.quantization.rules import Chosen, resolve_rules
from moejax.sharding.spmd import SingleDevice

Progress = Callable[[float, str], None]
"""Called with the share that is done, 0 to 1, and what is being done."""


def quantize_model(
    model: Decoder, quant: QuantConfig, tokens: np.ndarray | None = None, *, progress: Progress | None = None
) -> QuantReport:
    """Puts quantized weights in the place of those that the rules name.

    Args:
        model: with its weights, on one device where anything calibrates. Changed in place; after an error it
            may be quantized in part.
        quant: what to do; `kv_cache` and `implementation` are not looked at.
        tokens: int32 `[S, L]`, calibration text (`moejax.ptq.text`); None where no method needs any.
        progress: called between steps, for a progress bar.

    Raises:
        ConfigError: rules or formats that do not fit; tokens missing, too long or beyond the vocabulary; a
            model that is abstract, quantized already, or split over devices where something calibrates;
            another run's `work_dir`.
    """
    begin, say = time.perf_counter(), rising(progress)
    shapes = {name: spec.matrix_shape for name, spec in specs(model).items()}
    _check_model(model)
    chosen = resolve_rules(quant, shapes) if quant.methods else {}
    stages = stages_of(model) if any(c.calibrated for c in chosen.values()) else []
    parts = [
        {name: chosen[stage.prefix + name] for name in stage.params() if stage.prefix + name in chosen}
        for stage in stages
    ]
    last = max((i for i, part in enumerate(parts) if any(c.calibrated for c in part.values())), default=-1)
    reports: list[StageReport] = []
    if last >= 0:
        run = _Run(model, quant, checked_tokens(tokens, model, quant), stages[: last + 1], parts, say)
        reports += run.all(_fingerprint(model, quant, tokens) if quant.calibration.work_dir else {})
    calibrated = {stages[i].prefix + name for i in range(last + 1) for name in parts[i]}
    reports += _data_free(model, quant, {p: c for p, c in chosen.items() if p not in calibrated}, say)
    say(1.0, "quantized")
    return quant_report([model], quant, reports, time.perf_counter() - begin)


def rising(progress: Progress | None) -> Progress:
    """Returns a bar that never goes back, though a layer's experts may take several passes."""
    most = 0.0

    def say(share: float, text: str) -> None:
        nonlocal most
        most = max(most, share)
        if progress is not None:
            progress(most, text)

    return say


def _data_free(
    model: Decoder, quant: QuantConfig, chosen: Mapping[str, Chosen], say: Progress
) -> list[StageReport]:
    """Quantizes weights without calibration; each float weight is released before the next is quantized."""
    if not chosen:
        return []
    rounding, place = QuantizeOnLoad(chosen, quant), SingleDevice()
    params = {path: param for path, param in iter_params(model) if path in chosen}
    for i, path in enumerate(chosen):
        say(i / len(chosen), f"quantizing {path}")
        param = params.pop(path)
        rounding.take(place, path, param, param[...])
        del param
        rounding.put([model])
    return [rounding.report()]


class _Run:
    """The walk through the stages, with calibration."""

    def __init__(
        self,
        model: Decoder,
        quant: QuantConfig,
        tokens: np.ndarray,
        stages: list[Stage],
        parts: list[dict[str, Chosen]],
        say: Progress,
    ) -> None:
        self.model, self.quant, self.tokens, self.say = model, quant, tokens, say
        self.stages, self.parts = stages, parts
        for stage, part in zip(stages, parts, strict=False):
            for site in stage.sites:
                scaling_method(site, part, stage.prefix)  # raises for a conflict before any work
        self.dtype = jnp.dtype(model.config.dtype)
        self.shape = (*tokens.shape, model.config.hidden_size)
        self.batch_size = min(quant.calibration.batch_size, len(tokens))

    def all(self, fingerprint: Mapping[str, str]) -> list[StageReport]:
        """Quantizes every stage, or reads it from `work_dir`, and returns their reports."""
        folder = self.quant.calibration.work_dir
        work = WorkDir(folder, fingerprint) if folder else None
        try:
            reports = self._resumed(work)
            hidden = self._start(work, len(reports))
            for number in range(len(reports), len(self.stages)):
                report, hidden = self._stage(number, hidden, work)
                reports.append(report)
            if work is not None:
                work.remove_hidden()
        finally:
            if work is not None:
                work.close()
        return reports

    def _resumed(self, work: WorkDir | None) -> list[StageReport]:
        """Takes over the stages that an earlier run has finished."""
        reports: list[StageReport] = []
        while work is not None and len(reports) < len(self.stages):
            stored = work.load(len(reports))
            if stored is None:
                break
            arrays, values = stored
            stage, part = self.stages[len(reports)], self.parts[len(reports)]
            params = stage.params()
            for name in values["folded_params"]:
                params[name].set_value(jnp.asarray(arrays[f"param {name}"]))
            tensors = {}
            for name, one in part.items():
                saved = {
                    p: jnp.asarray(arrays[key]) for p in PARTS if (key := f"tensor {name} {p}") in arrays
                }
                D = params[name].get_metadata("spec").canonical_shape[-2]
                tensors[stage.prefix + name] = QTensor.of(saved, one.format, D)
            place_tensors([self.model], tensors)
            reports.append(resumed_report(values["report"]))
        return reports

    def _start(self, work: WorkDir | None, done: int) -> HiddenStates:
        """Returns the hidden states that the first stage still to do reads."""
        if done == len(self.stages):
            return HiddenStates(np.zeros((0, *self.shape[1:]), self.dtype), 1)
        if done:
            assert work is not None
            return work.open_hidden(done - 1, self.shape, self.dtype, self.batch_size)
        return embedded(self.model, self.tokens, self.batch_size)

    def _stage(
        self, number: int, hidden: HiddenStates, work: WorkDir | None
    ) -> tuple[StageReport, HiddenStates]:
        """Quantizes one stage and moves the calibration set through it."""
        begin, stage, part = time.perf_counter(), self.stages[number], self.parts[number]
        total = len(self.stages)

        def batched(share: float) -> None:
            # Statistics, rounding and moving on take about as long as each other.
            self.say((number + share / 3) / total, f"calibrating {stage.name}")

        collector = StatisticsCollector(stage, part, self.quant.calibration, hidden, batched)
        collector.run()
        self.say((number + 1 / 3) / total, f"quantizing {stage.name}")
        quantized = StageWork(stage, part, self.quant, collector).run()
        counts, cold = expert_counts(collector)
        del collector  # and the Gram matrices with it
        weights, notes, changed = self._install(stage, part, quantized)
        out = self._advance(number, stage, hidden, work) if number + 1 < total else hidden
        tensors = {stage.prefix + name: one.tensor for name, one in quantized.rounded.items()}
        place_tensors([self.model], tensors)
        report = StageReport(
            stage.name,
            hidden.num_tokens,
            counts,
            cold,
            self.quant.calibration.fallback if cold else None,
            quantized.folded,
            weights,
            [*quantized.notes, *notes],
            time.perf_counter() - begin,
        )
        if work is not None:
            self._save(work, number, report, changed, quantized.rounded)
        return report, out

    def _install(
        self, stage: Stage, part: Mapping[str, Chosen], quantized: QuantizedStage
    ) -> tuple[list[WeightReport], list[str], list[str]]:
        """Gives the stage its folded parameters and, for now, its dequantized weights.

        Returns:
            the reports of the weights, notes on them, and the names of the parameters that folding changed.
        """
        params, weights, notes = stage.params(), [], []
        sizes = {name: params[name][...].nbytes for name in quantized.rounded}
        changed = quantized.folds.write(params, leave=quantized.rounded)
        for name, one in quantized.rounded.items():
            report, more = weight_report(stage.prefix + name, part[name], one, sizes[name])
            weights.append(report)
            notes += more
            store(params[name], dequantize(one.tensor, params[name].get_metadata("spec").dtype))
        return weights, notes, changed

    def _advance(self, number: int, stage: Stage, hidden: HiddenStates, work: WorkDir | None) -> HiddenStates:
        path = None if work is None else work.hidden_path(number)
        out = HiddenStates.empty(self.shape, self.dtype, self.batch_size, path)
        graph, state = nnx.split(stage.module)
        for batch in hidden.batches():
            out.put(batch, advance(graph, state, batch.x, batch.valid, stage.share))
            share = (number + (2 + batch.rows.stop / len(hidden.values)) / 3) / len(self.stages)
            self.say(share, f"running {stage.name}, quantized")
        if work is not None:
            work.commit_hidden(number, out)
        return out

    def _save(
        self,
        work: WorkDir,
        number: int,
        report: StageReport,
        changed: list[str],
        rounded: Mapping[str, Rounded],
    ) -> None:
        params = self.stages[number].params()
        arrays: dict[str, Any] = {f"param {name}": params[name][...] for name in changed}
        for name, one in rounded.items():
            for p in PARTS:
                array = getattr(one.tensor, p)
                if array is not None:
                    arrays[f"tensor {name} {p}"] = array
        work.save(number, arrays, {"report": dataclasses.asdict(report), "folded_params": changed})


def _check_model(model: Decoder) -> None:
    for name, param in iter_params(model):
        if isinstance(param.get_value(), jax.ShapeDtypeStruct):
            raise ConfigError(f"quantize: {name} has no values yet; load or initialise the model first")
    for name, _ in quantized_weights(model):
        raise ConfigError(
            f"quantize: {name} is quantized already; load the full-precision checkpoint, or set "
            "quant.method=none"
        )


def embedded(model: Decoder, tokens: np.ndarray, batch_size: int) -> HiddenStates:
    """Returns what the first layer reads of tokens `[S, L]`."""
    shape = *tokens.shape, model.config.hidden_size
    hidden = HiddenStates(np.empty(shape, jnp.dtype(model.config.dtype)), batch_size)
    for start in range(0, len(tokens), batch_size):
        rows = slice(start, start + batch_size)
        hidden.values[rows] = np.asarray(model.embed(jnp.asarray(tokens[rows])))
    return hidden


def checked_tokens(tokens: np.ndarray | None, model: Decoder, quant: QuantConfig) -> np.ndarray:
    """Returns calibration tokens that the model can run. Raises `ConfigError` as `quantize_model` does."""
    config, most = model.config, model.config.max_position_embeddings
    if tokens is None:
        raise ConfigError(
            f"quant.method={quant.what}, quant.format={quant.format}: calibration needs text; pass tokens "
            "(moejax.ptq.text.calibration_tokens)"
        )
    tokens = np.asarray(tokens)
    if tokens.ndim != 2 or tokens.size == 0 or not np.issubdtype(tokens.dtype, np.integer):
        raise ConfigError(
            f"calibration tokens must be integers [samples, length], got {tokens.dtype} {list(tokens.shape)}"
        )
    if tokens.min() < 0 or tokens.max() >= config.vocab_size:
        raise ConfigError(
            f"calibration tokens lie in {tokens.min()}..{tokens.max()}, but the model's vocabulary has "
            f"{config.vocab_size}; encode the text with the model's own tokenizer"
        )
    if tokens.shape[1] > most:
        raise ConfigError(
            f"quant.calibration.seq_len={tokens.shape[1]} is more than the model's {most} positions; lower it"
        )
    split = any(layer.moe is not None and layer.moe.replicas is not None for layer in model.in_order())
    split |= any(len(param.get_value().sharding.device_set) > 1 for _, param in iter_params(model))
    if split or model.axes.sizes or not (model.is_first and model.is_last):
        raise ConfigError(
            "quantize: calibration runs on one device; quantize and save the model there, then load the "
            "quantized directory on the mesh"
        )
    return tokens.astype(np.int32)


def _fingerprint(model: Decoder, quant: QuantConfig, tokens: Any) -> dict[str, str]:
    """Returns the values that must agree for an interrupted run to be resumed."""
    settings = dataclasses.replace(
        quant,
        kv_cache="auto",
        implementation="auto",
        calibration=dataclasses.replace(quant.calibration, work_dir=None, text="auto", seed=0),
    )
    return {
        "model": content_hash(model.config),
        "weights": hash_arrays({name: param[...] for name, param in iter_params(model)}),
        "quant": content_hash(settings),
        "tokens": hash_arrays({"tokens": np.asarray(tokens)}),
        "jax": jax.__version__,
    }
