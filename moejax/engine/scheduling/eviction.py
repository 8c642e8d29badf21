"""Which blocks of a running sequence are given up before it ends (`engine.kv_policy`). No JAX here.

A policy is defined by positions and by attention alone: not by chunks, batches, the loop or preemptions. With
block j holding positions [j·block_size, (j + 1)·block_size), b blocks in a budget, and the prompt being all
tokens that a sequence has when it is first admitted:

- "window": the query at p sees keys in [0, sinks) and (p - recent, p], of prompts and outputs alike. A block
  that no query to come sees is freed.
- "h2o": queries of the prompt, and the first after it, see all. From then on, as soon as the query at p would
  see more than b blocks, those with the least attention are freed, and no later query sees them. A block's
  attention is what queries up to p - 2 gave its keys, mean over heads and layers, summed; p - 1 is in flight
  in the overlapped loop, and does not count in the plain one either. Blocks with one of the `sinks` first or
  `recent` last tokens stay.
- "snapkv": queries of the prompt see all. Behind it, of the blocks between `sinks` and `recent`, each head of
  each layer keeps as many keys as fit into b blocks with the others, those that the prompt's last `observe`
  tokens attended to most, and the step that ends the prompt moves them into the first of these blocks
  (`moejax.ops.kv_by_head`). The other blocks are freed. The host need not know who chose what; chunks end
  where the prompt ends, and one that does has all tokens that are asked.

Keys keep their rotary positions. A preempted sequence is computed again with every query seeing what it saw,
by the last query that each block was left to. Layers with a sliding window have blocks of their own, of which
they see their window, whatever the policy.
"""

from dataclasses import dataclass, field

import numpy as np

from moejax.cache.allocator import BlockAllocator, WindowAllocator, first_seen
from moejax.core.config import EngineConfig, ModelConfig
from moejax.core.errors import refuse
from moejax.core.parallel import ParallelConfig
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.scheduling.plan import Chunk, StepPlan
from moejax.engine.scheduling.sequence import Sequence

FOREVER = 2**31 - 1
"""The last query that sees a block which nobody has given up."""


@dataclass(eq=False, slots=True)
class Kept:
    """What "h2o" and "snapkv" know of a sequence's blocks; it stays when the sequence is preempted. Attention
    is what the first asks for.

    Attributes:
        begin: tokens of its prompt.
        counted: queries before this position have told their attention, or are not asked.
        asked: the same of steps that are scheduled.
        last_query: of each block the last query that sees it.
        mass: float64, of each block the attention that it got.
        newest: what the last step adds to it, once queries follow that it may decide for.
        forks: of samples that started with it, while steps are in flight that it had before.
    """

    begin: int
    counted: int = 0
    asked: int = 0
    last_query: list[int] = field(default_factory=list)
    mass: np.ndarray = field(default_factory=lambda: np.zeros(0))
    newest: np.ndarray | None = None
    forks: "list[Kept]" = field(default_factory=list)

    def add(self, end: int, mass: np.ndarray) -> None:
        """Takes the attention `[blocks]` of queries before `end`, unless they have told it before."""
        if end > self.counted:
            self.settle()
            self.counted, self.newest = end, mass
        for fork in self.forks if end <= self.begin else ():
            fork.add(end, mass)

    def settle(self) -> None:
        """Counts the newest attention."""
        if self.newest is not None:
            if len(self.mass) < len(self.newest):
                self.mass = np.pad(self.mass, (0, len(self.newest) - len(self.mass)))
            self.mass[: len(self.newest)] += self.newest
            self.newest = None

    def fork(self) -> "Kept":
        """Returns the same for a fork, which learns with it what the prompt's last steps tell."""
        fork = Kept(
            self.begin, self.counted, self.asked, list(self.last_query), self.mass.copy(), self.newest
        )
        self.forks.append(fork)
        return fork


class Eviction:
    """Gives up the blocks of sequences that queries to come do not see: by a policy, and behind the sliding
    windows of layers with blocks of their own.

    Args:
        allocator: of the policy's blocks.
        windows: of those layers' blocks, where there are any.
        policy: None: all is kept.
    """

    def __init__(
        self, allocator: BlockAllocator, windows: WindowAllocator | None, policy: KvPolicyConfig | None
    ) -> None:
        self.allocator, self.windows = allocator, windows
        self.policy = None if policy is None or policy.method == "none" else policy

    def trim(self, sequence: Sequence) -> None:
        """Gives up what is behind a sequence whose chunk was computed."""
        if self.windows is not None:
            # The last one may be computed again, as padding of static batching.
            self.windows.trim(sequence.window_blocks, sequence.computed - 1)
        if self.policy is not None and self.policy.span is not None:
            self._leave_behind(sequence, sequence.computed)
        elif sequence.kept is not None:
            self._give_up(sequence, sequence.computed)

    def decode(self, sequence: Sequence, position: int) -> None:
        """Gives up what the query at `position`, which decodes, is not to see; before it takes a block."""
        if self.policy is None:
            return
        if self.policy.by_head:
            if position == sequence.kept.begin:  # a fork's, too
                self._give_up(sequence, position)
            return
        if not self.policy.weighs:
            self._leave_behind(sequence, position)
            return
        for index in self._decide(sequence, position):
            self.allocator.give_up(sequence.blocks, index)
        kept = self._kept(sequence)
        kept.asked = max(kept.asked, position + 1)

    def slide(self, sequence: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Does what `WindowAllocator.slide` does, where there are windows."""
        return [] if self.windows is None else self.windows.slide(sequence.window_blocks, start, end)

    def most(self, sequence: Sequence, count: int) -> int:
        """Returns how many of the next `count` tokens a chunk may have now."""
        if self.policy is None or not self.policy.by_head or sequence.score:
            return count
        start, begin = sequence.computed, self._kept(sequence).begin
        if start >= begin or not self._freed(begin):
            return count
        asked = max(start, begin - max(2, self.policy.observe))  # one token alone would be decoded
        end = min(start + count, begin)
        return end - start if end == begin or end <= asked else asked - start

    def chunk(self, chunk: Chunk) -> list[tuple[int, int]]:
        """Has a chunk tell its attention, and returns what `slide` does. The last token of one that comes
        back has not been decided about; its queries before see what they saw."""
        sequence, end = chunk.sequence, chunk.start + chunk.count
        if self.policy is not None and self.policy.by_head and not sequence.score:
            kept = self._kept(sequence)
            if freed := self._freed(kept.begin) if end == kept.begin else ():
                chunk.ends, kept.last_query = True, [FOREVER] * (freed.stop + 1)
                kept.last_query[freed.start : freed.stop] = [end - 1] * len(freed)
        if self.policy is not None and self.policy.weighs and not sequence.score:
            kept = self._kept(sequence)
            chunk.weigh_from, kept.asked = max(chunk.start, kept.asked), max(end, kept.asked)
            if chunk.last:
                self._decide(sequence, end - 1)
        return self.slide(sequence, chunk.start, end)

    def take(self, plan: StepPlan, mass: np.ndarray) -> None:
        """Takes in the attention `[rows, blocks]` of a step's queries."""
        ends = [position + 1 for position in plan.positions]
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            ends += [chunk.start + chunk.count] + [0] * len(forks)
        for sequence, end, told in zip(plan.sequences, ends, mass, strict=True):
            if sequence.kept is not None:
                sequence.kept.add(end, told)

    def fork(self, parent: Sequence, fork: Sequence) -> None:
        """Has a fork start as its parent."""
        if self.windows is not None:
            fork.window_blocks = self.windows.fork(parent.window_blocks)
        fork.kept = None if parent.kept is None else parent.kept.fork()

    def release(self, sequence: Sequence) -> None:
        """Gives up the blocks of windows."""
        if self.windows is not None:
            self.windows.release(sequence.window_blocks)

    def forget(self, sequence: Sequence) -> None:
        """Asks again for the attention of steps that failed."""
        if sequence.kept is not None:
            sequence.kept.asked, sequence.kept.forks = sequence.kept.counted, []

    def _kept(self, sequence: Sequence) -> Kept:
        if sequence.kept is None:
            assert self.policy is not None
            sequence.kept = Kept(len(sequence.tokens))
        return sequence.kept

    def _give_up(self, sequence: Sequence, position: int) -> None:
        """Gives up the blocks that queries from `position` on do not see."""
        for index in range(min(len(sequence.blocks), len(sequence.kept.last_query))):
            if sequence.kept.last_query[index] < position:
                self.allocator.give_up(sequence.blocks, index)

    def _freed(self, begin: int) -> range:
        """Returns the blocks that are free once the heads have chosen from a prompt of `begin` tokens."""
        assert self.policy is not None
        size = self.allocator.block_size
        last = first_seen(begin, self.policy.recent, size)
        return range(self.policy.budget // size - (begin // size + 1 - last), last)

    def _leave_behind(self, sequence: Sequence, position: int) -> None:
        assert self.policy is not None
        self.allocator.leave_behind(sequence.blocks, position, self.policy.recent, self.policy.sinks)

    def _decide(self, sequence: Sequence, position: int) -> list[int]:
        """Returns the blocks that the query at `position` is the first not to see. Asked again it finds that
        no more need go."""
        policy, kept, size = self.policy, self._kept(sequence), self.allocator.block_size
        assert policy is not None
        first = position == kept.begin + 1
        if not first and (position % size or position <= kept.begin):
            return []
        if kept.counted < position:
            kept.settle()
        kept.last_query += [FOREVER] * (position // size + 1 - len(kept.last_query))
        held = sum(last >= position for last in kept.last_query)
        may_go = range(self.allocator.blocks_for(policy.sinks), first_seen(position, policy.recent, size))
        mass = np.pad(kept.mass, (0, max(0, len(kept.last_query) - len(kept.mass))))
        lightest = sorted((b for b in may_go if kept.last_query[b] >= position), key=mass.__getitem__)
        gone = lightest[: max(0, held - policy.budget // size)]
        for index in gone:
            kept.last_query[index] = position - 1
        return gone


def check_kv_policy(
    engine: EngineConfig, parallel: ParallelConfig, config: ModelConfig, kernels: str, window: int | None
) -> None:
    """Raises `ConfigError` where a policy cannot be, or would not do what it says.

    Args:
        window: tokens that layers with a sliding window keep in blocks of their own; None: all.
    """
    policy, size = engine.kv_policy, engine.block_size
    longest = engine.max_model_len or config.max_position_embeddings
    sliding = any(w is not None and w < longest for w in config.sliding_windows)
    shared = 1 if config.latent else parallel.kv_split(config.num_kv_heads)
    stay = -(-policy.sinks // size) - (-(policy.recent - 1) // size) + 1
    refusals = {
        "engine.batching=static, whose rows keep what they have": engine.batching == "static",
        "engine.prefix_cache.enabled=true, which shares all of a prompt": engine.prefix_cache.enabled,
        f"engine.preemption={engine.preemption}, which moves all tokens": engine.preemption != "recompute",
        f"engine.speculation.method={engine.speculation.method}: wrong drafts cannot be evicted for": (
            engine.speculation.most > 0
        ),
        f"engine.deterministic={engine.deterministic}, whose tiles attend to all": (
            engine.deterministic != "none"
        ),
        f"engine.kernels={kernels}, which attend to whole contexts; use xla": kernels != "xla",
        "engine.window_cache=full: layers with a sliding window would lose what is in it; use auto": (
            sliding and window is None
        ),
        "a model whose layers all have sliding windows or states": (
            "blocks" not in config.cache_kinds(window)
        ),
        "a layout of several devices, which do not tell their attention": (
            policy.weighs and not parallel.is_single
        ),
        f"parallel.pp={parallel.pp}, which cuts chunks that end prompts": policy.by_head and parallel.pp > 1,
        "key heads that several devices share, which would keep different keys of one": (
            policy.by_head and shared < parallel.tensor_size
        ),
        f"engine.max_num_batched_tokens={engine.max_num_batched_tokens}: a chunk must hold the "
        f"{policy.observe} of engine.kv_policy.observe": (
            policy.by_head and max(2, policy.observe) > engine.max_num_batched_tokens
        ),
        f"engine.kv_policy.budget={policy.budget}: blocks of {size} tokens with engine.kv_policy.sinks and "
        f"recent are up to {stay}, which its {policy.budget // size} must exceed; raise it": (
            (policy.weighs or policy.by_head) and stay >= policy.budget // size
        ),
    }
    refuse(f"engine.kv_policy.method={policy.method}", policy.method != "none", refusals)
