"""A runner without a model: checks what it is asked to do and samples by hashing. No JAX here.

Its cache holds, for each position, a hash of all tokens up to there, as a real cache's keys depend on all
tokens up to theirs. A token is sampled from all positions up to its own, read through the block table: a
wrong block, a missed copy, a lost write or one into another's block, however far back, gives another token
than the same request alone would get. Where a policy evicts keys, what a position holds depends on those
alone that its query sees, and blocks get whole numbers as their attention.
"""

import numpy as np

from moejax.cache.allocator import GONE
from moejax.cache.store import BlockStore
from moejax.core.scheduling import KvPolicyConfig
from moejax.engine.scheduling.plan import Chunk, Plan, StepPlan
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.step.runner import StepResult
from tests.plain.evicted import between

_NEVER = -(2**63)  # a place of a block in the store that was never written


class FakeRunner:
    """Deterministic tokens in [0, vocab_size) from a sequence's tokens, seed and length.

    Args:
        num_blocks, block_size: of the cache.
        vocab_size: tokens are drawn from [0, vocab_size).
        fail_at: launches (counted from 0) that raise `RuntimeError`, to test what the engine does then.
        window: tokens that sequences keep in blocks of windows, which must hold what the others hold of them.
        policy: what sequences keep of their blocks; None: all. `told` has what each query told, by order of
            its sequence and position.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int = 1000,
        fail_at: frozenset[int] = frozenset(),
        window: int | None = None,
        policy: KvPolicyConfig | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.fail_at, self.window, self.policy = fail_at, window, policy
        self.told: dict[tuple[int, int], dict[int, int]] = {}
        self.launches = 0
        self.store: BlockStore | None = None  # of one group's blocks, where the host has no room for all
        self.reset()

    def reset(self) -> None:
        self._groups: list[FakeDevice] = []
        if self.store is not None:
            self.store.reset()

    def launch(self, plan: Plan) -> StepResult:
        number, self.launches = self.launches, self.launches + 1
        if number in self.fail_at:
            raise RuntimeError(f"step {number} fails on purpose")
        while len(self._groups) < len(plan.groups):
            sizes = self.num_blocks, self.block_size, self.vocab_size, self.window
            self._groups.append(FakeDevice(*sizes, self.policy))
            self._groups[-1].store = self.store
        tokens: list[int] = []
        for device, part in zip(self._groups, plan.groups, strict=True):
            tokens += device.step(part)
        mass = None
        if self.policy is not None and self.policy.weighs:
            mass = self._groups[0].weigh(plan.groups[0], self.told)
        return StepResult(tokens, padded_tokens=plan.num_tokens, mass=mass)

    def save(self, plan: Plan) -> None:
        for device, part in zip(self._groups, plan.groups, strict=True):
            device.transport(part)
        if self.store is not None:
            self.store.begin()

    def ready(self, handle: StepResult) -> bool:
        return True

    def collect(self, handle: StepResult) -> StepResult:
        return handle


class FakeDevice:
    """The cache of one data-parallel group."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        vocab_size: int,
        window: int | None = None,
        policy: KvPolicyConfig | None = None,
    ) -> None:
        self.num_blocks, self.block_size, self.vocab_size = num_blocks, block_size, vocab_size
        self.window, self.policy = window, policy
        self._windows: dict[int, list[int | None]] = {}
        self._cache: dict[int, list[int | None]] = {}
        self._last: dict[int, int] = {}
        self._host: dict[int, list[int | None]] = {}
        self.store: BlockStore | None = None

    def transport(self, plan: StepPlan) -> None:
        """Copies blocks to the host's store and back."""
        for block, slot in plan.saves:
            self._host[slot] = list(self._block(block))
            if self.store is not None:
                values = [_NEVER if value is None else value for value in self._block(block)]
                self.store.put([slot], [np.array([values], np.int64)])
        for slot, block in plan.loads:
            if slot not in self._host:
                raise AssertionError(f"slot {slot} is loaded, and nothing was saved there")
            self._cache[block] = list(self._host[slot])
            if self.store is not None:
                values = self.store.get([slot])[0][0].tolist()
                self._cache[block] = [None if value == _NEVER else value for value in values]

    def step(self, plan: StepPlan) -> list[int]:
        """Returns a token for each row; 0 for those that sample nothing."""
        self.transport(plan)
        for source, destination in plan.copies:
            self._cache[destination] = list(self._block(source))
        for source, destination in plan.window_copies:
            self._windows[destination] = list(self._windows[source])
        tokens = [0] * len(plan.sequences)
        queries = list(zip(plan.decodes, plan.positions, strict=True))
        drafts = {(plan.decodes[row], plan.positions[row]): draft.token for row, draft in plan.drafts.items()}
        for chunk in plan.chunks:
            queries += [(chunk.sequence, chunk.start + i) for i in range(chunk.count)]
        for sequence, position in queries:
            self._store(sequence, position, drafts.get((sequence, position)))
        for sequence, position in queries if self.window is not None else ():
            self._look_through_window(sequence, position)
        for row, sequence in plan.sampling_rows():
            # A row sees what is stored up to its own position, and of what follows nothing.
            seen = plan.positions[row] + 1 if row < len(plan.decodes) - plan.idle else sequence.computed
            step = seen - sequence.prompt_len
            tokens[row] = hash((self._attend(sequence, seen), sequence.seed, step)) % self.vocab_size
        for row, sequence in plan.sampling_rows():
            # The device keeps no draft's: whose step has drafts is known to the host before the next one.
            self._last[sequence.slot] = -1 if row in plan.drafts else tokens[row]
        for chunk in plan.chunks:
            self._keep(chunk)
        return tokens

    def _keep(self, chunk: Chunk) -> None:
        """Changes what blocks hold from which heads are to choose, once, when their prompt ends."""
        if self.policy is None or not self.policy.by_head or chunk.sequence.score:
            return
        sequence, begin, end = chunk.sequence, chunk.sequence.prompt_len, chunk.start + chunk.count
        may_go, stay = between(self.policy, self.block_size, begin)
        assert chunk.ends == (end == begin and stay < len(may_go))
        if chunk.ends:
            assert chunk.count >= min(begin, self.policy.observe), "the prompt's last queries are cut"
            for index in may_go[:stay]:
                block = self._block(sequence.blocks[index])
                block[:] = [hash((value, "chosen")) for value in block]

    def _block(self, block: int) -> list[int | None]:
        if not 0 <= block < self.num_blocks:
            raise AssertionError(f"block {block} does not exist")
        return self._cache.setdefault(block, [None] * self.block_size)

    def _store(self, sequence: Sequence, position: int, draft: int | None = None) -> None:
        """Writes a position's hash."""
        known = position < len(sequence.tokens)
        token = sequence.tokens[position] if known else draft
        if token is None:
            token = self._last[sequence.slot]
            assert token >= 0, f"{sequence!r} decodes what a step with drafts has sampled, which nobody read"
        before: int | None = -1 if sequence.identity is None else hash(sequence.identity)
        if position and self.policy is not None:
            before = hash((before, self._attend(sequence, position, position)))
        elif position:
            index, offset = divmod(position - 1, self.block_size)
            before = self._block(sequence.blocks[index])[offset]
            if before is None:
                raise AssertionError(f"{sequence!r} reads position {position - 1}, which was never written")
        index, offset = divmod(position, self.block_size)
        stored = hash((before, token))
        self._block(sequence.blocks[index])[offset] = stored
        if self.window is not None:
            block = sequence.window_blocks[index]
            self._windows.setdefault(block, [None] * self.block_size)[offset] = stored

    def _look_through_window(self, sequence: Sequence, position: int) -> None:
        """What a query at `position` sees of the window is what all blocks hold there."""
        assert self.window is not None
        for seen in range(max(0, position - self.window + 1), position + 1):
            index, offset = divmod(seen, self.block_size)
            if sequence.blocks[index] == GONE:
                continue
            block = self._windows.get(sequence.window_blocks[index], [None] * self.block_size)
            if block[offset] != self._block(sequence.blocks[index])[offset]:
                raise AssertionError(f"{sequence!r} sees something else at {seen} through its window")

    def weigh(self, plan: StepPlan, told: dict[tuple[int, int], dict[int, int]]) -> np.ndarray:
        """Returns the attention that each row's queries gave each block, whole numbers that depend on what
        the block's first place holds."""
        mass = np.zeros((len(plan.sequences), self.num_blocks + 64))
        rows = [(row, s, [p]) for row, (s, p) in enumerate(zip(plan.decodes, plan.positions, strict=True))]
        row = len(plan.decodes)
        for chunk, forks in zip(plan.chunks, plan.forks, strict=True):
            asked = range(chunk.weigh_from, chunk.start + chunk.count)
            rows.append((row, chunk.sequence, [] if chunk.sequence.kept is None else list(asked)))
            row += 1 + len(forks)
        for row, sequence, positions in rows:
            for position in positions:
                blocks = {p // self.block_size for p in self._seen(sequence, position)}
                given = {b: hash((self._block(sequence.blocks[b])[0], position)) % 5 for b in blocks}
                told[sequence.order, position] = given
                for block, weight in given.items():
                    mass[row, block] += weight
        return mass

    def _seen(self, sequence: Sequence, query: int) -> list[int]:
        """Returns the positions that a query sees under the policy."""
        assert self.policy is not None
        if self.policy.span is not None:
            sinks, recent = self.policy.span
            return [p for p in range(query + 1) if p < sinks or p > query - recent]
        last = sequence.kept.last_query if sequence.kept is not None else []
        size = self.block_size
        return [p for p in range(query + 1) if p // size >= len(last) or last[p // size] >= query]

    def _attend(self, sequence: Sequence, seen: int, query: int | None = None) -> int:
        """Hashes what its first positions hold, once this step's are written; with a policy of these what the
        query sees, the last of them unless it is given."""
        if self.policy is not None:
            at = [p for p in self._seen(sequence, seen - 1 if query is None else query) if p < seen]
            values = [self._block(sequence.blocks[p // self.block_size])[p % self.block_size] for p in at]
            assert None not in values, f"{sequence!r} reads a position that was never written"
            return hash(tuple(values))
        hashes = [value for block in sequence.blocks for value in self._block(block)][:seen]
        if None in hashes:
            raise AssertionError(f"{sequence!r} reads position {hashes.index(None)}, which was never written")
        return hash(tuple(hashes))
