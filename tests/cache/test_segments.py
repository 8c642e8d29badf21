"""Slabs cover the pool without gap or overlap, and a step reads at most twice what it must."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.segments import ENDS, SlabLayout


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
def test_slabs_grow(num_blocks: int, sizes: tuple[int, ...]):
    layout = SlabLayout.of(num_blocks)
    assert layout.sizes == sizes and layout.num_blocks == num_blocks


@pytest.mark.parametrize(
    ("ends", "expected"),
    [([3, 10], (3, 10, 20)), ([20], (20,)), ([5, 30], (5, 20)), ([40], (20,)), ([], (8, 16, 20))],
)
def test_given_ends_are_kept_within_the_pool(ends: list[int], expected: tuple[int, ...]):
    assert SlabLayout.of(20, ends).ends == expected


layouts = st.builds(
    SlabLayout.of,
    st.integers(1, 3_000),
    st.none() | st.lists(st.integers(1, 3_000), min_size=1, max_size=6, unique=True).map(sorted),
)


@settings(deadline=None, derandomize=True)
@given(layout=layouts)
def test_every_block_has_one_place(layout: SlabLayout):
    """Laid one after another, the slabs are the pool."""
    assert all(size > 0 for size in layout.sizes) and sum(layout.sizes) == layout.num_blocks
    assert layout.ends == tuple(np.cumsum(layout.sizes))
    slab, index = layout.locate(np.arange(layout.num_blocks))
    assert slab.dtype == index.dtype == np.int32
    places = [(z, i) for z, size in enumerate(layout.sizes) for i in range(size)]
    assert list(zip(slab.tolist(), index.tolist(), strict=True)) == places


@settings(deadline=None, derandomize=True)
@given(layout=layouts, data=st.data())
def test_slabs_for_is_the_least_that_holds_the_blocks(layout: SlabLayout, data: st.DataObject):
    blocks = data.draw(st.integers(0, layout.num_blocks))
    slabs = layout.slabs_for(blocks)
    assert 1 <= slabs <= len(layout.sizes)
    assert layout.ends[slabs - 1] >= blocks
    assert slabs == 1 or layout.ends[slabs - 2] < blocks
    if blocks:
        assert layout.locate(np.asarray([blocks - 1]))[0] == slabs - 1


@settings(deadline=None, derandomize=True)
@given(num_blocks=st.integers(1, 5_000), data=st.data())
def test_slabs_read_at_most_twice_what_they_must(num_blocks: int, data: st.DataObject):
    layout = SlabLayout.of(num_blocks)
    blocks = data.draw(st.integers(1, num_blocks))
    assert layout.ends[layout.slabs_for(blocks) - 1] < max(2 * blocks, ENDS[0] + 1)
