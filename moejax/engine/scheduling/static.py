"""Static batching, the baseline beside continuous batching. No JAX here."""

from typing import Any

from moejax.core.config import StaticBatchingConfig
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.scheduler import Scheduler
from moejax.engine.scheduling.sequence import Sequence, decodes_next


class StaticScheduler(Scheduler):
    """The baseline, as a padded generation loop does it: takes a batch, computes its prompts padded to the
    longest, decodes until its last sequence ends, and only then takes the next. Rows that have ended are
    computed as padding, experts included. Blocks for the whole of every sequence are set aside, so nothing is
    preempted.

    Args:
        starts: for whom a batch waits, and how long; by default it takes whoever is there.
    """

    def __init__(self, *args: Any, starts: StaticBatchingConfig | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.starts = starts or StaticBatchingConfig()
        self._ended: list[Sequence] = []  # of this batch; they keep their blocks and slots until it is over
        self._batch_rows = 0
        self._reserved = 0

    def schedule(self) -> StepPlan | None:
        plan = StepPlan()
        self._tick()
        if not self.running:
            self._close_batch()
            while not self._batch_wait_s() and (sequence := self._admissible()):
                self._admit(sequence, plan)
        budget = self.max_num_batched_tokens
        for sequence in self.running:
            if budget > 0 and not decodes_next(sequence):
                budget -= self._chunk(plan, sequence, budget)
        if plan.chunks:
            longest = max(chunk.count for chunk in plan.chunks)
            plan.min_tokens = min(longest * self._batch_rows, self.max_num_batched_tokens)
        else:
            self._decode(plan, self._batch_rows)
            if plan.decodes:
                self._pad(plan)
        self._fork(plan)
        return plan if plan.decodes or plan.chunks else None

    def wait_s(self) -> float:
        return super().wait_s() or self._batch_wait_s()

    def _batch_wait_s(self) -> float:
        """Returns seconds until the next batch starts; 0 where enough wait or the oldest has waited."""
        enough = self.starts.batch_size or self.max_num_seqs
        if self.running or not self.admits or not 0 < self.num_waiting < enough:
            return 0.0
        return max(0.0, min(s.arrival for s in self.waiting()) + self.starts.max_wait_s - self.policy.now)

    def _pad(self, plan: StepPlan) -> None:
        """Has every row that has ended compute its last stored token again."""
        for sequence in self._ended:
            plan.decodes.append(sequence)
            plan.positions.append(sequence.computed - 1)
        plan.idle = len(self._ended)

    def holders(self) -> list[Sequence]:
        return [*self.running, *self._ended]

    def _end(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        if sequence.computed and not sequence.score:
            self._ended.append(sequence)
        else:
            self._give_back(sequence)
        if not self.running:
            self._close_batch()

    def _close_batch(self) -> None:
        for sequence in self._ended:
            self._give_back(sequence)
        self._ended = []
        self._batch_rows = self._reserved = 0

    def forget_device_state(self) -> None:
        self._close_batch()
        super().forget_device_state()

    def _admissible(self) -> Sequence | None:
        sequence = super()._admissible()
        if sequence is None or self._reserved + self._least_blocks(sequence) > self.allocator.num_blocks:
            return None
        return sequence

    def _admit(self, sequence: Sequence, plan: StepPlan) -> None:
        self._reserved += self._least_blocks(sequence)
        self._batch_rows += sequence.samples
        super()._admit(sequence, plan)

    def _least_blocks(self, sequence: Sequence) -> int:
        """Returns the blocks of each of its samples at full length."""
        return self._whole(sequence) * sequence.samples
