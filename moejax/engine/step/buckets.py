"""The shapes that steps are compiled for. Host arithmetic only: no JAX.

A step's shape is (rows, chunk tokens, cache blocks); each is padded up to the next bucket, so that few
programs serve all batches. Chunk tokens 0 is a step that only decodes.
"""

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

from moejax.cache.segments import SegmentLayout
from moejax.core.config import EngineConfig

SMALLEST_CHUNK = 16
SHORT_CHUNK = 64

CHUNK_BLOCKS = 128
"""Reading this many cache blocks costs little beside a chunk."""


def powers_of_two(first: int, last: int) -> tuple[int, ...]:
    """Returns first, 2·first, 4·first, …, ending with `last` itself."""
    sizes = []
    while first < last:
        sizes.append(first)
        first *= 2
    return (*sizes, last)


@dataclass(frozen=True)
class Buckets:
    """rows: sequences in a batch; tokens: chunk tokens; segments: cache blocks, of which a step reads the
    first `segment_counts[i]` segments.

    A step with chunk tokens has at least `chunk_rows` rows and `chunk_segments` segments: with their largest
    sizes it comes in few shapes, and what rows and blocks cost there is little beside the chunk.

    With `kept_blocks` prefixes wait in the cache, and a sequence's blocks may lie behind any of them. Up to
    `drafts` rows are drafts (`moejax.engine.scheduling.speculation`), only in steps without chunk tokens.
    """

    rows: tuple[int, ...]
    tokens: tuple[int, ...]
    segments: SegmentLayout
    segment_counts: tuple[int, ...]
    chunk_rows: int = 1
    chunk_segments: int = 1
    kept_blocks: bool = False
    drafts: int = 0

    @classmethod
    def of(cls, config: EngineConfig, num_blocks: int) -> "Buckets":
        """Makes buckets from the configuration; the largest always hold the configured limits."""
        seqs, tokens = config.max_num_seqs, config.max_num_batched_tokens
        adaptive = config.adaptive_batching
        rows = config.seq_buckets or (adaptive.sizes if adaptive.enabled else powers_of_two(1, seqs))
        chunk = config.token_buckets or powers_of_two(min(SMALLEST_CHUNK, tokens), tokens)
        segments = SegmentLayout.of(num_blocks, config.block_buckets)
        return cls(
            _with_drafts(_up_to(rows, seqs), config),
            _up_to(chunk, tokens),
            segments,
            tuple(range(1, len(segments.ends) + 1)),
            kept_blocks=config.prefix_cache.enabled and config.prefix_cache.place == "device",
            drafts=config.max_rows - seqs,
        )

    def rows_for(self, rows: int, tokens: int = 0) -> int:
        """Returns the bucket of rows of a step with that many chunk tokens."""
        return self.rows[bisect_left(self.rows, max(rows, self.chunk_rows) if tokens else rows)]

    def tokens_for(self, tokens: int) -> int:
        """Returns the bucket of a step's chunk tokens; 0 for none."""
        return self.tokens[bisect_left(self.tokens, tokens)] if tokens else 0

    def segments_for(self, blocks: int, tokens: int = 0) -> int:
        """Segments to read where the first `blocks` blocks matter, in a step with that many chunk tokens."""
        least = self.segments.segments_for(blocks)
        least = max(least, self.chunk_segments) if tokens else least
        return self.segment_counts[bisect_left(self.segment_counts, least)]

    def thinned(self, config: EngineConfig, max_total_len: int) -> "Buckets":
        """Returns fewer buckets for a workload whose every step is to be compiled ahead.

        The buckets that the configuration leaves open are reduced to the largest that the workload needs and
        one of about a quarter of it, with a prefix cache also one of a short chunk; those beyond its needs
        stay for what comes after it. Steps with chunk tokens have its largest rows only, and its largest
        segments unless these are many blocks. Adaptive batching keeps all rows and chunk tokens to move over.

        Args:
            max_total_len: of its longest request, in tokens.
        """
        last_tokens, last_segments = self._largest(max_total_len, config.block_size)
        rows, tokens, counts = self.rows, self.tokens, self.segment_counts
        moving = config.adaptive_batching.enabled
        if config.seq_buckets is None and not moving:
            seqs = rows[-1] - self.drafts
            rows = _with_drafts(_two(tuple(size for size in rows if size <= seqs), seqs), config)
        if config.token_buckets is None and not moving:
            tokens = _two(tokens, last_tokens)
            if config.prefix_cache.enabled:  # what is left of a prompt that was found
                tokens = tuple(sorted({*tokens, self.tokens_for(min(SHORT_CHUNK, last_tokens))}))
        if config.block_buckets is None:
            quarter = self.segments.segments_for(-(-self.segments.ends[last_segments - 1] // 4))
            counts = _two(counts, last_segments, quarter)
        chunk_segments = last_segments if self.segments.ends[last_segments - 1] <= CHUNK_BLOCKS else 1
        kept, drafts = self.kept_blocks, self.drafts
        seqs = rows[-1] - drafts
        return Buckets(rows, tokens, self.segments, counts, seqs, chunk_segments, kept, drafts)

    def reachable(
        self, max_total_len: int, block_size: int, samples: int = 1
    ) -> Iterator[tuple[int, int, int]]:
        """(rows, chunk tokens, segments) that a workload can need, largest first.

        Args:
            max_total_len: of its longest request, prompt and output, in tokens.
            samples: the largest n of a request.
        """
        last_tokens, last_segments = self._largest(max_total_len, block_size)
        for segments in reversed([count for count in self.segment_counts if count <= last_segments]):
            blocks = self.segments.ends[segments - 1]
            for rows in reversed(self.rows):
                smaller = self.rows[self.rows.index(rows) - 1] if rows != self.rows[0] else 0
                # A sequence has a block of its own, or shares one with the other samples of its request.
                filled = smaller + 1 - self.drafts <= blocks * samples
                if filled:
                    yield rows, 0, segments
                if segments >= self.chunk_segments and (
                    rows == self.chunk_rows
                    or (filled and self.chunk_rows < rows <= self.rows[-1] - self.drafts)
                ):
                    for tokens in reversed([t for t in self.tokens if t <= last_tokens]):
                        yield rows, tokens, segments

    def _largest(self, max_total_len: int, block_size: int) -> tuple[int, int]:
        """Returns the largest chunk tokens and segments that requests of this length can need."""
        most_rows = self.rows[-1] - self.drafts
        # Preempted sequences come back as prompts of up to their whole length.
        tokens = self.tokens_for(min(self.tokens[-1], most_rows * max_total_len))
        blocks = min(self.segments.num_blocks, most_rows * -(-max_total_len // block_size))
        blocks = self.segments.num_blocks if self.kept_blocks else blocks
        return tokens, self.segments_for(blocks)


def _two(sizes: tuple[int, ...], largest: int, quarter: int | None = None) -> tuple[int, ...]:
    """Returns, of rising sizes, one of at least a quarter of `largest`, `largest`, and all larger ones."""
    quarter = -(-largest // 4) if quarter is None else quarter
    small = sizes[bisect_left(sizes, quarter)]
    return tuple(size for size in sizes if size in (small, largest) or size > largest)


def _up_to(sizes: tuple[int, ...] | list[int], limit: int) -> tuple[int, ...]:
    """Returns the sizes below `limit`, and `limit`."""
    return (*(size for size in sizes if size < limit), limit)


def _with_drafts(rows: tuple[int, ...], config: EngineConfig) -> tuple[int, ...]:
    """Returns numbers of sequences, and of rows where each of so many has all its drafts."""
    each = 1 + config.speculation.most
    return tuple(sorted({*rows, *(min(size * each, config.max_rows) for size in rows)}))
