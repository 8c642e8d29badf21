"""The shapes that steps are compiled for. Host arithmetic only: no JAX.

A step's shape is (rows, chunk tokens, cache blocks); each is padded up to the next bucket, so that few
programs serve all batches. Chunk tokens 0 is a step that only decodes.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from moejax.cache.slabs import SlabLayout
from moejax.core.config import EngineConfig

SMALLEST_CHUNK = 16


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """first, 2·first, 4·first, …, ending with `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


@dataclass(frozen=True)
class Buckets:
    """rows: sequences in a batch; tokens: chunk tokens; slabs: cache blocks."""

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    slabs: SlabLayout

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int) -> "Buckets":
        """From the configuration; the largest buckets always hold the configured limits."""
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        rows = config.seq_buckets or powers_of_two(1, seqs)
        chunk = config.token_buckets or powers_of_two(min(SMALLEST_CHUNK, tokens), tokens)
        return cls(_up_to(rows, seqs), _up_to(chunk, tokens), SlabLayout.of(num_blocks, config.block_buckets))

    def rows_for(self, rows: int) -> int:
        return self.rows[bisect_left(self.rows, rows)]

    def tokens_for(self, tokens: int) -> int:
        """0 for none."""
        return self.tokens[bisect_left(self.tokens, tokens)] if tokens else 0

    def reachable(
        self, max_prompt_len: int, max_total_len: int, block_size: int, samples: int = 1
    ) -> Iterator[tuple[int, int, int]]:
        """(rows, chunk tokens, slabs) that a workload can need, largest first.

        Args:
            max_prompt_len, max_total_len: of its longest request, in tokens; the second with the output.
            samples: the largest n of a request.
        """
        most_rows, budget = self.rows[-1], self.tokens[-1]
        per_sequence = -(-max_total_len // block_size)
        # Preempted sequences come back as prompts of up to their whole length.
        chunk = min(budget, most_rows * max_total_len)
        last_chunk = self.tokens_for(chunk)
        last_slab = self.slabs.slabs_for(min(self.slabs.num_blocks, most_rows * per_sequence))
        for slabs in range(last_slab, 0, -1):
            blocks = self.slabs.ends[slabs - 1]
            for rows in reversed(self.rows):
                smaller = self.rows[self.rows.index(rows) - 1] if rows != self.rows[0] else 0
                # A row has a block of its own, or shares one with the other samples of its request.
                if smaller + 1 > blocks * samples:
                    continue
                yield rows, 0, slabs
                for tokens in reversed([t for t in self.tokens if t <= last_chunk]):
                    yield rows, tokens, slabs


def _up_to(sizes: tuple[int, ...] | list[int], limit: int) -> tuple[int, ...]:
    """The sizes below `limit`, and `limit`."""
    return (*(size for size in sizes if size < limit), limit)
