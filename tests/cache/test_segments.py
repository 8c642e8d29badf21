"""Segments cover the pool without gap or overlap, and a step reads at most twice what it must."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.segments import ENDS, SegmentLayout


@pytest.mark.parametrize(
    ("num_blocks", "sizes"),
    [
        (1, (1,)),
        (8, (8,)),
        (9, (8, 1)),
        (16, (8, 8)),
        (17, (8, 8, 1)),
        (64, (8, 8, 16, 16, 16)),
        (100, (8, 8, 16, 16, 16, 32, 4)),
        (1024, (8, 8, 16, 16, 16, 32, 32, 64, 64, 256, 512)),
    ],
)
def test_segments_grow(num_blocks: int, sizes: tuple[int, ...]):
    layout = SegmentLayout.of(num_blocks)
    assert layout.sizes == sizes and layout.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("ends", "expected"),
    [([3, 10], (3, 10, 20)), ([20], (20,)), ([5, 30], (5, 20)), ([40], (20,)), ([], (8, 16, 20))],
)
def test_given_ends_are_kept_within_the_pool(ends: list[int], expected: tuple[int, ...]):
    assert SegmentLayout.of(20, ends).ends == expected


layouts = st.builds(
    SegmentLayout.of,
    st.integers(1, 3_000),
    st.none() | st.lists(st.integers(1, 3_000), min_size=1, max_size=6, unique=True).map(sorted),
)


@settings(derandomize=True)
@given(layout=layouts)
def test_every_block_has_one_place(layout: SegmentLayout):
    """Laid one after another, the segments are the pool."""
    assert all(size > 0 for size in layout.sizes) and sum(layout.sizes) == layout.num_blocks
    assert layout.ends == tuple(np.cumsum(layout.sizes))
    segment, index = layout.locate(np.arange(layout.num_blocks))
    assert segment.dtype == index.dtype == np.int32
    places = [(z, i) for z, size in enumerate(layout.sizes) for i in range(size)]
    assert list(zip(segment.tolist(), index.tolist(), strict=True)) == places


@settings(derandomize=True)
@given(layout=layouts, data=st.data())
def test_segments_for_is_the_least_that_holds_the_blocks(layout: SegmentLayout, data: st.DataObject):
    blocks = data.draw(st.integers(0, layout.num_blocks))
    segments = layout.segments_for(blocks)
    assert 1 <= segments <= len(layout.sizes)
    assert layout.ends[segments - 1] >= blocks
    assert segments == 1 or layout.ends[segments - 2] < blocks
    if blocks:
        assert layout.locate(np.asarray([blocks - 1]))[0] == segments - 1


@settings(derandomize=True)
@given(num_blocks=st.integers(1, 5_000), data=st.data())
def test_segments_read_at_most_twice_what_they_must(num_blocks: int, data: st.DataObject):
    layout = SegmentLayout.of(num_blocks)
    blocks = data.draw(st.integers(1, num_blocks))
    assert layout.ends[layout.segments_for(blocks) - 1] < max(2 * blocks, ENDS[0] + 1)
