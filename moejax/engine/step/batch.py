"""From a plan to the arrays of one step: built on the host as one buffer, taken apart on the device.

One int32 buffer a step is one transfer; fields that are not integers travel as their bits. The flat batch has
a place for every row's decoded token and then the chunks:

    flat index   0 1 … S-1 | S … S+T-1
                 decodes   | chunk tokens of all sequences, one after another

In a tile (`StepKey.tiled`) chunk tokens follow the decodes at once, among the S places.
"""

import functools
import math
from collections.abc import Container
from collections.abc import Sequence as Items
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moejax.cache.segments import SegmentLayout
from moejax.engine.pipeline.microbatches import tiles_of
from moejax.engine.requests.api import SamplingParams
from moejax.engine.routing.replay import RoutingReplay
from moejax.engine.scheduling.plan import UNKNOWN, Draft, Plan, StepPlan
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step import attention_kernels, attention_xla
from moejax.engine.step.buckets import Buckets
from moejax.engine.step.limits import DRAFTS, FOLLOWS, Limits, StepKey
from moejax.engine.step.sampler import SamplerMode, SamplingArrays, common_mode, sampling_values
from moejax.engine.step.tables import BlockTables
from moejax.moe.router import Replay
from moejax.ops.kernel_attention import KernelPlan
from moejax.ops.paged_attention import AttentionPlan


class Batch(NamedTuple):
    """One step's arrays on the device; S rows, T chunk tokens.

    Attributes:
        slot: int32 `[S]`, place of each row in the per-sequence state; the one past the last for padding. Of
            a row that drafts the draft's place.
        token: int32 `[S]`, what a row decodes; -1 - i: what `DeviceState.last` has at i.
        position: int32 `[S]`, where; -1 for a row that does not decode.
        logit: int32 `[S]`, flat index that a row samples from.
        step: int32 `[S]`, tokens that it has generated before.
        sample: int32 `[S]`, 1 for a row that samples.
        rope_len: int32 `[S + T]`, sequence length that each token's rotary base is for.
        chunk_token, chunk_position: int32 `[T]`; position -1 for padding. In a tile `token` and `position`
            have chunks' as well, and what is `[T]` below is `[S]`.
        attention: which blocks to write and read.
        window: the same of layers with a sliding window, where these have blocks of their own.
        sampling: the rows' parameters, None for a greedy step without penalties.
        bias_token, bias_value, bias_if: int32 `[S, N]`, see `add_biases`; only with biases.
        mask: int32 `[S, ceil(V / 32)]`, a bit for each token that a row may sample; only with `mode.masked`.
        draft: int32 `[S]`, the draft that a row's token is to be, as in `token`, or -1 for none; only with
            `mode.rejection`.
        chunk_row: int32 `[T]`, row of each chunk token; with `fresh` `[S]` (1: a row has seen nothing before
            this step), `seen_as` `[S]` (the row that has seen what it has, a fork's parent) and `prompt_len`
            `[S]`; only with penalties, and the last three with chunks where sequences have states.
        target: int32 `[T]`, next prompt token of each chunk token; only with scores.
        replay: `[S + T, L, k]`, what each token's routers are to choose; only where a trace is replayed.
        adapter: int32 `[S + T]`, the slot of each token's LoRA adapter, the one past the last for none; only
            where there are slots.
    """

    slot: jax.Array
    token: jax.Array
    position: jax.Array
    logit: jax.Array
    step: jax.Array
    sample: jax.Array
    rope_len: jax.Array
    chunk_token: jax.Array | None
    chunk_position: jax.Array | None
    attention: AttentionPlan | KernelPlan
    window: AttentionPlan | KernelPlan | None
    sampling: SamplingArrays | None
    bias_token: jax.Array | None
    bias_value: jax.Array | None
    bias_if: jax.Array | None
    mask: jax.Array | None
    draft: jax.Array | None
    chunk_row: jax.Array | None
    fresh: jax.Array | None
    seen_as: jax.Array | None
    prompt_len: jax.Array | None
    target: jax.Array | None
    replay: Replay | None
    adapter: jax.Array | None


def metadata_of(limits: Limits) -> ModuleType:
    """Returns the module that lays out what attention must be told of a step."""
    return attention_xla if limits.kernels == "xla" else attention_kernels


@functools.lru_cache(maxsize=4096)
def layout(key: StepKey, limits: Limits) -> tuple[dict[str, tuple[int, tuple[int, ...]]], int]:
    """Returns (offset, shape) in the buffer by field, and the buffer's length."""
    S, T = key.rows, key.tokens
    if limits.kv_policy.method == "none":  # else tables have entries for what is gone
        limits = limits._replace(table_width=min(limits.table_width, key.blocks))
    shapes: dict[str, tuple[int, ...]] = dict.fromkeys(
        ("slot", "token", "position", "logit", "step", "sample"), (S,)
    )
    shapes |= {"rope_len": (S + T,)}
    if T:
        shapes |= dict.fromkeys(("chunk_token", "chunk_position"), (T,))
    shapes |= metadata_of(limits).shapes(key, limits)
    if limits.window is not None:
        own = metadata_of(limits).shapes(*limits.of_window(key))
        shapes |= {WINDOW + name: shape for name, shape in own.items()}
    if not key.mode.greedy or key.mode.penalty:
        shapes |= dict.fromkeys(SamplingArrays._fields, (S,))
    if key.mode.penalty or (limits.states and T):
        shapes |= dict.fromkeys(("fresh", "seen_as", "prompt_len"), (S,))
    if key.mode.penalty and (T or key.tiled):
        shapes["chunk_row"] = (T or S,)
    if key.mode.biases:
        shapes |= dict.fromkeys(("bias_token", "bias_value", "bias_if"), (S, key.mode.biases))
    if key.mode.masked:
        shapes["mask"] = (S, limits.mask_words)
    if key.mode.rejection:
        shapes["draft"] = (S,)
    if key.prompt_logprobs >= 0:
        shapes["target"] = (T or S,)
    if limits.adapters:
        shapes["adapter"] = (S + T,)
    if limits.replay is not None:
        shapes |= dict.fromkeys(("replay_ids", "replay_weights"), (S + T, *limits.replay))
    fields, offset = {}, 0
    for name, shape in shapes.items():
        fields[name] = (offset, shape)
        offset += math.prod(shape)
    return fields, offset


@jax.named_scope("inputs")
def unpack(buffer: jax.Array, key: StepKey, limits: Limits) -> Batch:
    """Returns the step's arrays, inside a trace."""
    fields, _ = layout(key, limits)

    def take(name: str) -> jax.Array:
        offset, shape = fields[name]
        return jax.lax.slice(buffer, (offset,), (offset + math.prod(shape),)).reshape(shape)

    sampling = None
    if "seed" in fields:
        sampling = SamplingArrays(
            *(
                jax.lax.bitcast_convert_type(take(name), _SAMPLING_DTYPES[name])
                for name in SamplingArrays._fields
            )
        )
    replay = None
    if limits.replay is not None:
        weights = jax.lax.bitcast_convert_type(take("replay_weights"), jnp.float32)
        replay = Replay(take("replay_ids"), weights)
    # A field that this step has no use for is in no place of the buffer.
    arrays: dict[str, Any] = {name: take(name) if name in fields else None for name in Batch._fields}
    attention, window = metadata_of(limits).unpack(take, key, limits), None
    if limits.window is not None:
        own = limits.of_window(key)
        window = metadata_of(limits).unpack(lambda name: take(_window_name(name, fields)), *own)
    parts = {"attention": attention, "window": window, "sampling": sampling, "replay": replay}
    return Batch(**arrays | parts)


WINDOW = "window_"
"""Begins the names of fields that the layers with a sliding window have beside the others' own."""


def _window_name(name: str, fields: Container[str]) -> str:
    """Returns the field that stands for `name` in these layers: some are the batch's."""
    return WINDOW + name if WINDOW + name in fields else name


_SAMPLING_DTYPES = dict.fromkeys(SamplingArrays._fields, jnp.float32)
_SAMPLING_DTYPES |= {"top_k": jnp.int32, "seed": jnp.uint32}


class BatchBuilder:
    """Builds the buffer of each plan. Keeps nothing between steps.

    Args:
        buckets: what shapes are padded to.
        limits: see `Limits`.
        replay: the trace that is replayed, where `limits` say so.

    `warm_modes` are the sampler modes that warm-up has compiled. A batch runs in the first of them that does
    all it needs, in its own least mode where there is none; `warm_prompt_logprobs` likewise, by size, and
    `warm_owners`. With `record_all` every step records its routing; with `counting` every step counts it,
    whether anybody asked or not, so that one program serves both.
    """

    def __init__(self, buckets: Buckets, limits: Limits, replay: RoutingReplay | None = None) -> None:
        self.buckets = buckets
        self.limits = limits
        self.windows = SegmentLayout.of(limits.window_ends[-1], limits.window_ends) if limits.window else None
        self.replay = replay
        self.warm_modes: list[SamplerMode] = []
        self.warm_prompt_logprobs: list[int] = []
        self.warm_owners: list[int] = []
        self.record_all = self.counting = False

    def key(self, plan: Plan) -> StepKey:
        """Returns the least bucket that holds a plan."""
        return self.common([self._key(group, self._tables(group)) for group in plan.groups])

    def parts(self, plan: Plan) -> list[Plan]:
        """Returns the plans that a plan is computed as: its tiles, where there are any."""
        tile = self.limits.tile
        return [part.plan for part in tiles_of(plan, tile, self.limits.verified)] if tile else [plan]

    def build(self, plan: Plan, key: StepKey | None = None) -> tuple[StepKey, np.ndarray]:
        """Returns the bucket and the int32 buffer of a plan; data-parallel groups' buffers follow each other,
        and they share their bucket.

        Args:
            key: a bucket that holds the plan; None: the least.
        """
        plans = plan.groups
        tables_of = [self._tables(plan) for plan in plans]
        if key is None:
            key = self.common([self._key(*both) for both in zip(plans, tables_of, strict=True)])
        length = layout(key, self.limits)[1]
        buffer = np.zeros(len(plans) * length, np.int32)
        for i, (plan, tables) in enumerate(zip(plans, tables_of, strict=True)):
            self._fill(buffer[i * length : (i + 1) * length], plan, key, tables)
        return key, buffer

    def _tables(self, plan: StepPlan) -> list[BlockTables]:
        """Returns the tables of all tokens, and those of the window where there are any."""
        evicts, window = self.limits.kv_policy.method != "none", self.limits.window
        tables = [BlockTables(plan, self.buckets.segments, evicts=evicts)]
        if window is not None:
            assert self.windows is not None
            tables.append(BlockTables(plan, self.windows, window, self.limits.block_size))
        return tables

    def _key(self, plan: StepPlan, tables: list[BlockTables]) -> StepKey:
        rows, owned = plan.sequences, tables[0].ids
        if plan.tiled:
            return self.tile(
                self._mode([sequence for _, sequence in plan.sampling_rows()], rows),
                self.record_all or self.counting or any(s.record for s in rows),
                self._prompt_logprobs(plan),
            )
        # Kernels read through block tables, which do not care who else has a block.
        shared = int(np.bincount(owned).max()) if len(owned) and self.limits.kernels == "xla" else 1
        tokens = plan.chunk_tokens
        computed = max(tokens, plan.min_tokens) if tokens else 0
        # Of a window's blocks a step reads as many, see `Limits.of_window`.
        segments = self.buckets.segments_for(max(table.end for table in tables), tokens)
        return StepKey(
            rows=self.buckets.rows_for(len(rows), tokens),
            tokens=self.buckets.tokens_for(computed),
            blocks=self.buckets.segments.ends[segments - 1],
            owners=self._owners(1 << (shared - 1).bit_length()),
            mode=self._mode([sequence for _, sequence in plan.sampling_rows()], rows),
            record=self.record_all or self.counting or any(s.record for s in rows),
            prompt_logprobs=self._prompt_logprobs(plan),
            draft=DRAFTS if plan.drafting else 0,
        )

    def tile(self, mode: SamplerMode, record: bool, prompt_logprobs: int) -> StepKey:
        """Returns the step of a tile. Whatever it reads of the cache, its program is that for all of it."""
        return StepKey(
            self.limits.tile, 0, self.limits.segment_ends[-1], 1, mode, record, prompt_logprobs, tiled=True
        )

    def common(self, keys: Items[StepKey]) -> StepKey:
        """Returns the least bucket that holds all of these."""
        common = keys[0]
        if len(keys) > 1:
            largest = StepKey(*map(max, *keys))
            common = largest._replace(mode=self._compiled(common_mode({key.mode for key in keys})))
        return self.drafting(common) if common.draft else common

    def drafting(self, key: StepKey) -> StepKey:
        """Returns the step that drafts for one: nobody records or reports of it. A draft is drawn with the
        noise with which it is verified, where that is how they are compared, and else is the likeliest."""
        assert self.limits.drafter is not None
        mode = key.mode._replace(penalty=False, logprobs=-1)
        if self.limits.drafter.acceptance == "rejection":
            mode = SamplerMode(biases=mode.biases)
        if self.limits.mtp:  # which drafts for rows that biases and masks are not known of yet
            mode = mode._replace(biases=0, masked=False)
        return key._replace(mode=mode, record=False, draft=DRAFTS)

    def following(self, key: StepKey) -> StepKey:
        """Returns the step that only stores keys and values where another one samples, too; of an MTP layer
        the step that does so after it, and makes the first drafts."""
        mode = self.drafting(key).mode if self.limits.mtp else SamplerMode()
        return key._replace(mode=mode, record=False, prompt_logprobs=-1, draft=FOLLOWS)

    def _fill(self, buffer: np.ndarray, plan: StepPlan, key: StepKey, tables: list[BlockTables]) -> None:
        """Writes a plan into its part of the buffer, all zero before."""
        rows = plan.sequences
        fields, _ = layout(key, self.limits)
        views = {
            name: buffer[offset : offset + math.prod(shape)].reshape(shape)
            for name, (offset, shape) in fields.items()
        }
        first = first_chunk_token(plan, key)
        self._rows(views, plan, rows, first)
        if key.tokens or key.tiled:
            self._chunks(views, plan, key, first)
        metadata_of(self.limits).fill(views, plan, key, self.limits, tables[0])
        if self.limits.window is not None:
            own = {name.removeprefix(WINDOW): view for name, view in views.items() if name.startswith(WINDOW)}
            metadata_of(self.limits).fill(own, plan, *self.limits.of_window(key), tables[1])
        if "seed" in views:
            _fill_sampling(views, rows)
        if "seen_as" in views:
            _fill_seen(views, plan)
        if key.mode.biases:
            _fill_biases(views, plan)
        if key.mode.masked:
            _fill_masks(views["mask"], plan)
        if self.limits.adapters:
            self._adapters(views["adapter"], plan, first)
        if key.mode.rejection:
            views["draft"][:] = -1
            for row, draft in plan.judged.items():
                views["draft"][row] = self._token(draft, plan.decodes[row])
        if self.replay is not None:
            self.replay.fill(views, plan, first)
        if key.draft and self.limits.mtp:
            self._after_hidden(views, plan, key)

    def empty(self, key: StepKey) -> np.ndarray:
        """Returns a buffer that computes nothing and writes nothing, to rehearse a step."""
        fields, length = layout(key, self.limits)
        buffer = np.zeros(length, np.int32)
        blank = {"slot": self.limits.slots, "position": -1, "chunk_position": -1}
        of_attention = metadata_of(self.limits).BLANK
        blank |= of_attention | {WINDOW + name: value for name, value in of_attention.items()}
        for name, value in blank.items():
            if name in fields:
                offset, shape = fields[name]
                buffer[offset : offset + math.prod(shape)] = value
        return buffer

    def _mode(self, sampling: Items[Sequence], rows: Items[Sequence]) -> SamplerMode:
        """Returns the least mode that serves every sequence that samples, or a compiled one that does."""
        modes: set[SamplerMode] = {s.mode for s in sampling}
        least = common_mode(modes)
        # A part of a prompt samples nothing, but its tokens have been seen.
        if any(s.mode.penalty for s in rows):
            least = least._replace(penalty=True)
        return self._compiled(least)

    def _prompt_logprobs(self, plan: StepPlan) -> int:
        """Returns the fewest likeliest tokens that serve every chunk, or a compiled number that does."""
        least = max((chunk.sequence.prompt_logprobs for chunk in plan.chunks if chunk.scored), default=-1)
        return min((count for count in self.warm_prompt_logprobs if count >= least), default=least)

    def _owners(self, least: int) -> int:
        return min((count for count in self.warm_owners if count >= least), default=least)

    def _compiled(self, least: SamplerMode) -> SamplerMode:
        return next((mode for mode in self.warm_modes if common_mode({mode, least}) == mode), least)

    def _rows(self, views: dict[str, np.ndarray], plan: StepPlan, rows: list[Sequence], end: int) -> None:
        D, n = len(plan.decodes), len(rows)
        views["slot"][:n] = [self.limits.place(s.slot, plan.drafting) for s in rows]
        views["slot"][n:] = self.limits.slots
        views["token"][:D] = [
            s.tokens[p] if p < len(s.tokens) else -1 - s.slot
            for s, p in zip(plan.decodes, plan.positions, strict=True)
        ]
        for row, draft in plan.drafts.items():
            views["token"][row] = self._token(draft, plan.decodes[row])
        views["position"][:D] = plan.positions
        views["position"][D:] = -1
        views["rope_len"][:D] = [
            max(s.prompt_len, p + 1) for s, p in zip(plan.decodes, plan.positions, strict=True)
        ]
        # What a row has generated before the token that it samples.
        views["step"][:D] = [p + 1 - s.prompt_len for s, p in zip(plan.decodes, plan.positions, strict=True)]
        views["step"][D:n] = [s.generated - 1 for s in rows[D:]]
        views["logit"][:D] = range(D)
        views["sample"][:D] = 1
        row = D
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            end += chunk.count
            after = row + 1 + len(forks)
            views["logit"][row:after] = end - 1
            views["sample"][row:after] = chunk.last and not chunk.sequence.score
            row = after

    def _adapters(self, slots: np.ndarray, plan: StepPlan, rows: int) -> None:
        """Fills in each token's slot, int32 `[S + T]`."""
        slots[:] = self.limits.adapters
        chunks = [chunk.sequence for chunk in plan.chunks for _ in range(chunk.count)]
        for first, sequences in ((0, plan.sequences), (rows, chunks)):
            for place, sequence in enumerate(sequences, first):
                if sequence.adapter is not None:
                    slots[place] = sequence.adapter.slot

    def _after_hidden(self, views: dict[str, np.ndarray], plan: StepPlan, key: StepKey) -> None:
        """Makes the model's batch one of its MTP layer: beside what the model put out for a token stands the
        token after it, which is known, or -1 - i for what row i has just sampled; and one more is drafted."""
        views["step"][: len(plan.sequences)] += 1
        if key.draft != FOLLOWS:
            return
        row = len(plan.decodes)
        views["token"][:row] = -1 - np.arange(row)
        places, start = list(zip(plan.decodes, plan.positions, strict=True)), 0
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            end = chunk.start + chunk.count
            after = [*chunk.sequence.tokens[chunk.start + 1 : end + 1], -1 - row][: chunk.count]
            views["chunk_token"][start : start + chunk.count] = after
            places += [(sequence, end - 1) for sequence in (chunk.sequence, *forks)]
            start, row = start + chunk.count, row + 1 + len(forks)
        views["slot"][:row] = [self.limits.first_draft(s.slot, position) for s, position in places]

    def _token(self, draft: Draft, sequence: Sequence) -> int:
        if self.limits.mtp and draft.tokens == (UNKNOWN,):
            return -1 - self.limits.first_draft(sequence.slot, len(sequence.tokens) - 2)
        number = 0 if draft.tentative else len(draft.tokens)
        return draft.token if draft.token != UNKNOWN else -1 - self.limits.place(sequence.slot, number)

    def _chunks(self, views: dict[str, np.ndarray], plan: StepPlan, key: StepKey, place: int) -> None:
        """Fills in the chunks' tokens, the first of them at a flat `place`, and positions."""
        S, D, rope = key.rows, len(plan.decodes), views["rope_len"][place:]
        if key.tiled:
            after = {
                name: views[name][D:]
                for name in ("token", "position", "chunk_row", "target")
                if name in views
            }
            if "chunk_row" in views:
                views["chunk_row"][:D] = range(D)
            views = after | {"chunk_token": after["token"], "chunk_position": after["position"]}
        views["chunk_position"][:] = -1
        if "chunk_row" in views:
            views["chunk_row"][:] = S  # nobody has seen the tokens of padding
        start, row = 0, D
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            sequence, first, end = chunk.sequence, chunk.start, chunk.start + chunk.count
            views["chunk_token"][start : start + chunk.count] = sequence.tokens[first:end]
            positions = np.arange(first, end)
            views["chunk_position"][start : start + chunk.count] = positions
            rope[start : start + chunk.count] = np.maximum(positions + 1, sequence.prompt_len)
            if key.prompt_logprobs >= 0:
                targets = sequence.tokens[first + 1 : end + 1]
                views["target"][start : start + len(targets)] = targets
            if "chunk_row" in views:
                views["chunk_row"][start : start + chunk.count] = row
            start, row = start + chunk.count, row + 1 + len(forks)
        # Static batching's padding is computed like a token, though it has no place in the cache.
        views["chunk_position"][start : plan.min_tokens] = 0


def first_chunk_token(plan: StepPlan, key: StepKey) -> int:
    """Returns the flat index of a plan's first chunk token."""
    return len(plan.decodes) if key.tiled else key.rows


def _fill_sampling(views: dict[str, np.ndarray], rows: list[Sequence]) -> None:
    """Fills in the rows' parameters; padding rows are greedy."""
    padding = len(views["slot"]) - len(rows)
    params = [s.params for s in rows] + [_GREEDY] * padding
    values = sampling_values(params, [s.seed for s in rows] + [0] * padding)
    for name, value in values.items():
        views[name][:] = value.view(np.int32)


def _fill_seen(views: dict[str, np.ndarray], plan: StepPlan) -> None:
    """Fills in what each row has seen: its slot's set, its parent's, or nothing yet."""
    views["seen_as"][:] = np.arange(len(views["seen_as"]))
    views["prompt_len"][: len(plan.sequences)] = [s.prompt_len for s in plan.sequences]
    row = len(plan.decodes)
    for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
        views["fresh"][row] = chunk.first
        views["seen_as"][row + 1 : row + 1 + len(forks)] = row
        row += 1 + len(forks)


def _fill_biases(views: dict[str, np.ndarray], plan: StepPlan) -> None:
    """Fills in the biases that hold. The token that a row decodes may be known to the device alone: whether
    one holds after that is left to it. Entries that stay zero add nothing."""
    values = views["bias_value"].view(np.float32)
    for row, s in plan.sampling_rows():
        decodes, column = row < len(plan.decodes), 0
        end = plan.positions[row] if decodes else len(s.tokens)
        known = plan.known(row, s)
        number = end + 2 - s.prompt_len if decodes else s.generated  # of the token that it samples
        for token, value, after, until in s.biases:
            condition = -1
            if after and decodes and end >= s.prompt_len:
                after, condition = after[:-1], after[-1]
            output = tuple(known[max(s.prompt_len, end - len(after)) : end])
            if output == after and (until is None or number <= until):
                views["bias_token"][row, column], values[row, column] = token, value
                views["bias_if"][row, column] = condition
                column += 1


def _fill_masks(mask: np.ndarray, plan: StepPlan) -> None:
    """Fills in which tokens each row may sample: all, where nothing is said."""
    mask[:] = -1
    for row, s in plan.sampling_rows():
        if s.constraint is not None:
            end = plan.positions[row] + 1 if row < len(plan.decodes) else len(s.tokens)
            mask[row] = s.constraint.words(plan.known(row, s)[s.prompt_len : end])


_GREEDY = SamplingParams(temperature=0.0)
