"""The memory of prefixes by itself: what is found, what goes first, and its plain twin."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejax.cache.allocator import BlockAllocator
from moejax.cache.prefix import POLICIES, make_prefixes
from moejax.core.config import PrefixCacheConfig

SIZE = 4


def cache(blocks: int = 64, slots: int = 0, **options: Any) -> BlockAllocator:
    config = PrefixCacheConfig(enabled=True, **({"place": "device"} | options))
    return BlockAllocator(blocks, SIZE, make_prefixes(config, SIZE, slots))


def remember(allocator: BlockAllocator, tokens: list[int], whose: Any = 0) -> None:
    """As a sequence does that computes these tokens and ends."""
    assert allocator.prefixes is not None
    table: list[int] = []
    allocator.grow(table, len(tokens))
    allocator.prefixes.insert(whose, tokens, table, ended=True)
    allocator.release(table)
    allocator.check_integrity([])


def found(allocator: BlockAllocator, tokens: list[int], whose: Any = 0) -> int:
    assert allocator.prefixes is not None
    match = allocator.prefixes.match(whose, tokens)
    allocator.prefixes.use(match)
    return match.tokens


prompts = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=14), min_size=1, max_size=12)


@given(prompts, st.sampled_from(["device", "host"]))
def test_the_tree_finds_the_longest_prefix_and_the_twin_its_whole_blocks(asked: list[list[int]], place: Any):
    tree, blocks = (cache(256, 256, place=place, match=match) for match in ("tokens", "blocks"))
    for i, prompt in enumerate(asked):
        longest = max(
            (n for n in range(len(prompt) + 1) if any(p[:n] == prompt[:n] for p in asked[:i])), default=0
        )
        assert found(tree, prompt) == longest
        assert found(blocks, prompt) == longest // SIZE * SIZE
        for allocator in (tree, blocks):
            remember(allocator, prompt)


@given(prompts, st.sampled_from(tuple(POLICIES)), st.sampled_from(["device", "host"]), st.integers(4, 7))
def test_little_room_is_never_overdrawn(asked: list[list[int]], policy: Any, place: Any, room: int):
    """And what is found was remembered."""
    allocator = cache(room, room - 3, policy=policy, place=place)
    for i, prompt in enumerate(asked):
        length = found(allocator, prompt)
        assert not length or any(p[:length] == prompt[:length] for p in asked[:i])
        remember(allocator, prompt)
        assert allocator.num_free == room


@pytest.mark.parametrize(
    ("policy", "gone"), [("lru", "b"), ("lfu", "c"), ("slru", "b"), ("fifo", "a"), ("size", "d")]
)
def test_policies(policy: Any, gone: str):
    """Four prefixes, the last of two blocks; `a` is used most often, `c` last, and one block is wanted."""
    allocator = cache(5, policy=policy)
    names = {name: [i] * SIZE for i, name in enumerate("abc")} | {"d": [9] * 2 * SIZE}
    for tokens in names.values():
        remember(allocator, tokens)
    if policy == "slru":  # protects what was used again, `c` and `d` among it; `b` is the older of the others
        asked = ["a", "c", "d"]
    else:
        asked = ["b", "b", "a", "a", "a", "d", "d", "c"]
    for name in asked:
        found(allocator, names[name])
    if policy == "lru":
        assert asked[:2] == ["b", "b"]
    table: list[int] = []
    allocator.grow(table, 1)
    lost = {name for name, tokens in names.items() if found(allocator, tokens) < len(tokens)}
    assert lost == {gone}


def test_identities_do_not_meet():
    allocator = cache()
    remember(allocator, [1, 2, 3, 4, 5], "one")
    assert found(allocator, [1, 2, 3, 4, 5], "two") == 0
    assert found(allocator, [1, 2, 3, 4, 5], "one") == 5


def test_paths_may_be_long():
    allocator = cache(5_000)
    remember(allocator, list(range(4 * 4_000)))
    assert found(allocator, list(range(4 * 4_000))) == 16_000
    assert allocator.prefixes is not None
    allocator.prefixes.forget()
    assert list(allocator.prefixes.nodes()) == [] and allocator.num_free == 5_000
