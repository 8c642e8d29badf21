"""The shapes and sizes that a step and its cache are built for."""

from typing import NamedTuple

from moejax.core.config import LatentConfig, SpeculationConfig
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.step.sampler import SamplerMode


class CacheSpec(NamedTuple):
    """The key/value cache of an engine.

    Attributes:
        num_blocks: of each data-parallel group.
        block_size: tokens in a block.
        max_model_len: tokens of the longest sequence, prompt and output together.
        dtype: what keys and values are stored in.
        window: tokens that layers with a sliding window keep, in `window_blocks` blocks of their own; None:
            all.
    """

    num_blocks: int
    block_size: int
    max_model_len: int
    dtype: str
    window: int | None = None
    window_blocks: int = 0


DRAFTS, FOLLOWS = 1, 2


class StepKey(NamedTuple):
    """Shape bucket and options of a compiled step.

    Attributes:
        rows, tokens: S and T above; tokens = 0 computes no chunk.
        blocks: cache blocks read, a number of whole segments.
        owners: sequences that may share a block.
        mode: what the sampler must do.
        record: whether expert counts are returned.
        prompt_logprobs: likeliest tokens reported with the log-probability of each chunk token's next one;
            -1 where neither is.
        draft: `DRAFTS` if it makes drafts, `FOLLOWS` if it only has another model's cache follow; 0 else.
        tiled: the step is a tile (`Limits.tile`): S tokens, decoded or of prompts, one after another, each of
            which computes what it would beside any others. T is 0.
    """

    rows: int
    tokens: int
    blocks: int
    owners: int
    mode: SamplerMode
    record: bool
    prompt_logprobs: int
    draft: int = 0
    tiled: bool = False


class Limits(NamedTuple):
    """The sizes and options that no step changes.

    Attributes:
        slots: sequences that run at a time.
        block_size: tokens in a block.
        table_width: most blocks of one sequence.
        segment_ends: blocks before the end of each segment.
        kernels: implementation of the GPU kernels, "xla" for none. With kernels there is one segment, and
            block tables instead of lists of blocks.
        capture: whether steps return each token's routing.
        replay: (MoE layers, experts per token) where steps are told it.
        latent: the sizes of latents, where the cache holds them.
        kv_heads: key/value heads that a device has, or what counts as such with latents.
        states: whether sequences have states beside their blocks.
        context: the most keys that a query reads in any layer.
        queries: the most of a sequence whose context is cut. These are for kernels only, see
            `pallas_kernels.work_list`.
        window: tokens that layers with a sliding window keep, in blocks of their own; None: all.
        window_ends: blocks before the end of each of their segments.
        adapters: slots of LoRA adapters.
        drafter: how drafts are made on the device; None: they are not.
        tile: tokens of a tile, where steps are computed in these (`engine.deterministic`); 0: they are not.
        mask_words: 32-bit words of a row's mask, a bit for each token of the vocabulary.
        kv_policy: what sequences keep of their blocks.
        verified: only what verified sequences get is computed in tiles.
    """

    slots: int
    block_size: int
    table_width: int
    segment_ends: tuple[int, ...]
    kernels: str = "xla"
    capture: bool = False
    replay: tuple[int, int] | None = None
    latent: LatentConfig | None = None
    states: bool = False
    kv_heads: int = 1
    context: int = 1
    queries: int = 1
    window: int | None = None
    window_ends: tuple[int, ...] = ()
    adapters: int = 0
    drafter: SpeculationConfig | None = None
    tile: int = 0
    verified: bool = False
    mask_words: int = 0
    kv_policy: KvPolicyConfig = KvPolicyConfig()

    @property
    def places(self) -> int:
        """Counts the places of `last` (`moejax.engine.step.program.DeviceState`)."""
        drafts = self.drafter.k if self.drafter else 0
        return self.place(0, 1 + drafts + (1 + drafts) * self.mtp)

    @property
    def mtp(self) -> bool:
        """Tells whether the drafter continues the model's hidden states (`moejax.engine.step.mtp`)."""
        return self.drafter is not None and self.drafter.method == "mtp"

    def first_draft(self, slot: int, position: int) -> int:
        """Returns where `last` has the draft that was made beside the token that a slot's row at `position`
        sampled: a ring, since the next drafts continue one of a sequence's 1 + k latest rows."""
        assert self.drafter is not None
        return self.place(slot, 1 + self.drafter.k + position % (1 + self.drafter.k))

    def place(self, slot: int, draft: int = 0) -> int:
        """Returns where `last` has the token that a slot sampled last, or the so many-th draft after it."""
        return draft * (self.slots + 1) + slot

    def of_window(self, key: StepKey) -> "tuple[StepKey, Limits]":
        """Returns a step's shape and the limits as the layers with a sliding window have them."""
        assert self.window is not None
        segments = min(self.segment_ends.index(key.blocks) + 1, len(self.window_ends))
        limits = self._replace(segment_ends=self.window_ends, context=min(self.context, self.window))
        limits = limits._replace(kv_policy=KvPolicyConfig())
        return key._replace(blocks=self.window_ends[segments - 1]), limits
