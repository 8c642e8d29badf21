"""Verified requests as the host sees them: decoded beside the others, then again in tiles. No JAX here.

    tokens       p p o o                 told: keys and values of all but the newest are of tiles
    tentative            t t t           sampled in steps that depend on the batch, one after another
    rows of tiles      o t t t           at once, once there are enough, or one may be the last
    sampled            t t x .           told: three tokens; what the fourth row samples is dropped

Tiles sample with the noise of plain decoding, as drafts' rows do (`moejax.engine.scheduling.speculation`):
what is told are their tokens and log-probabilities, and the keys and values that they have written over the
tentative ones are what counts (LLM-42, arXiv 2601.17768).
"""

from collections.abc import Iterable

from moejax.core.scheduling import SpeculationConfig
from moejax.engine.scheduling.plan import UNKNOWN, Draft
from moejax.engine.scheduling.sequence import Sequence
from moejax.engine.scheduling.speculation import Proposer, Speculation


class Tentative(Proposer):
    """Drafts what is tentative."""

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        return sequence.tentative[:most]


class Verification(Speculation):
    """Drafts the tentative tokens of the sequences that are verified; a row in tiles tells what follows each.

    Args:
        rows: of a verification, at most.
    """

    beside_prompts = overlaps = True  # tiles have one shape; who is verified waits, and the others do not

    def __init__(self, rows: int) -> None:
        super().__init__(SpeculationConfig(method="ngram", k=max(1, rows - 1)), Tentative())
        self.rows = rows

    def depth(self, sequence: Sequence) -> int:
        return min(self.rows - 1, super().depth(sequence))

    def wanted(self, running: Iterable[Sequence]) -> bool:
        return False

    def _due(self, sequence: Sequence) -> bool:
        count = len(sequence.tentative) + sequence.guessed
        return count >= self.depth(sequence) or any(map(sequence.stop_ids.__contains__, sequence.tentative))

    def tentative(self, sequence: Sequence) -> Draft | None:
        if not sequence.verified or self._due(sequence):
            return None
        known = (*sequence.tentative, *[UNKNOWN] * sequence.guessed)
        return Draft(known or (sequence.tokens[-1],), tentative=True)

    def waits(self, sequence: Sequence) -> bool:
        return sequence.guessed > 0 and self._due(sequence)
