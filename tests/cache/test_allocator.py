"""Blocks are conserved, handed out lowest first, shared by forks, and copied before a shared one is
written."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moejax.cache.allocator import BlockAllocator, OutOfBlocks


def test_growing_takes_the_lowest_free_blocks():
    allocator = BlockAllocator(8, 4)
    a: list[int] = []
    b: list[int] = []
    assert allocator.grow(a, 9) == [0, 1, 2] and allocator.grow(b, 1) == [3]
    allocator.release(a)
    assert a == [] and allocator.num_free == 7
    assert allocator.grow(b, 16) == [0, 1, 2] and b == [3, 0, 1, 2]
    allocator.check_integrity([a, b])


def test_growing_to_what_is_there_does_nothing():
    allocator, table = BlockAllocator(4, 4), []
    allocator.grow(table, 8)
    assert allocator.grow(table, 8) == allocator.grow(table, 5) == allocator.grow(table, 0) == []
    assert table == [0, 1] and allocator.num_used == 2


@pytest.mark.parametrize(("tokens", "blocks"), [(0, 0), (1, 1), (4, 1), (5, 2), (8, 2), (9, 3)])
def test_blocks_for(tokens: int, blocks: int):
    assert BlockAllocator(1, 4).blocks_for(tokens) == blocks


def test_appending_adds_a_block_only_at_its_first_position():
    allocator, table = BlockAllocator(4, 2), []
    sizes = []
    for position in range(5):
        assert allocator.append(table, position) is None
        sizes.append(len(table))
    assert sizes == [1, 1, 2, 2, 3]


def test_a_fork_shares_all_blocks_and_gets_a_copy_of_the_one_it_writes():
    allocator, parent = BlockAllocator(4, 4), []
    allocator.grow(parent, 6)
    child = allocator.fork(parent)
    assert child == parent and child is not parent and allocator.num_used == 2
    assert [allocator.refcount(block) for block in parent] == [2, 2]
    assert allocator.append(child, 6) == (1, 2)
    assert (parent, child) == ([0, 1], [0, 2])
    assert [allocator.refcount(block) for block in range(4)] == [2, 1, 1, 0]
    assert allocator.append(parent, 6) is None, "the last owner writes in place"
    allocator.check_integrity([parent, child])


def test_of_several_owners_all_but_the_last_copy():
    allocator, first = BlockAllocator(8, 4), []
    allocator.grow(first, 3)
    tables = [first, *(allocator.fork(first) for _ in range(3))]
    assert [allocator.append(table, 3) for table in tables] == [(0, 1), (0, 2), (0, 3), None]
    allocator.check_integrity(tables)


def test_full_shared_blocks_are_never_copied():
    allocator, parent = BlockAllocator(4, 4), []
    allocator.grow(parent, 8)
    child = allocator.fork(parent)
    assert allocator.append(parent, 8) is None and allocator.append(child, 8) is None
    assert (parent, child) == ([0, 1, 2], [0, 1, 3])


def test_a_shared_block_is_free_once_its_last_owner_is_gone():
    allocator, parent = BlockAllocator(2, 4), []
    allocator.grow(parent, 8)
    child = allocator.fork(parent)
    allocator.release(parent)
    assert allocator.num_free == 0
    allocator.release(child)
    assert allocator.num_free == 2


def _contents(allocator: BlockAllocator, *tables: list[int]) -> tuple:
    counts = [allocator.refcount(block) for block in range(allocator.num_blocks)]
    return allocator.num_free, counts, [list(table) for table in tables]


def test_too_few_blocks_change_nothing():
    allocator, a, b = BlockAllocator(3, 2), [], []
    allocator.grow(a, 3)
    allocator.grow(b, 2)
    before = _contents(allocator, a, b)
    with pytest.raises(OutOfBlocks, match="3 blocks wanted, 0 of 3 free"):
        allocator.grow(b, 8)
    with pytest.raises(OutOfBlocks):
        allocator.append(b, 2)
    shared = allocator.fork(a)
    with pytest.raises(OutOfBlocks, match="1 block wanted, 0 of 3 free"):
        allocator.append(shared, 3)
    allocator.release(shared)
    assert _contents(allocator, a, b) == before
    allocator.check_integrity([a, b])


# -- check_integrity finds each kind of damage ---------------------------------------------------------------


def _lose(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._free.remove(3)


def _free_twice(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._free.append(3)


def _free_in_use(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._free.insert(0, tables[0][0])


def _count_too_many(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._refcount[tables[0][0]] += 1


def _count_too_few(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._refcount[tables[0][0]] -= 1


def _count_a_free_one(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._refcount[3] = 1


def _table_shares_uncounted(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    tables[1][0] = tables[0][0]


def _table_is_lost(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    tables.pop()


def _table_holds_a_free_block(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    tables[1].append(4)


def _table_beyond_the_pool(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    tables[1].append(5)


def _table_before_the_pool(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    tables[1].append(-2)


def _free_beyond_the_pool(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._free.append(5)


def _heap_out_of_order(allocator: BlockAllocator, tables: list[list[int]]) -> None:
    allocator._free.reverse()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (_lose, "block 3 has refcount 0 and is not free"),
        (_free_twice, "free list twice"),
        (_free_in_use, "block 0 has refcount 2 and is free"),
        (_count_too_many, "block 0 has refcount 3 and is in 2 tables"),
        (_count_too_few, "block 0 has refcount 1 and is in 2 tables"),
        (_count_a_free_one, "block 3 has refcount 1 and is in 0 tables"),
        (_table_shares_uncounted, "block 0 has refcount 2 and is in 3 tables"),
        (_table_is_lost, "block 0 has refcount 2 and is in 1 tables"),
        (_table_holds_a_free_block, "block 4 has refcount 0 and is in 1 tables"),
        (_table_beyond_the_pool, r"blocks \[5\] do not exist"),
        (_table_before_the_pool, r"blocks \[-2\] do not exist"),
        (_free_beyond_the_pool, r"blocks \[5\] do not exist"),
        (_heap_out_of_order, "not a heap"),
    ],
)
def test_check_integrity_finds(damage, message: str):
    allocator = BlockAllocator(5, 4)
    tables: list[list[int]] = [[], []]
    allocator.grow(tables[0], 8)
    allocator.grow(tables[1], 4)
    tables.append(allocator.fork(tables[0]))
    allocator.check_integrity(tables)
    damage(allocator, tables)
    with pytest.raises(AssertionError, match=message):
        allocator.check_integrity(tables)


# -- against a model -----------------------------------------------------------------------------------------


@settings(max_examples=200, derandomize=True)
@given(num_blocks=st.integers(1, 12), block_size=st.integers(1, 5), data=st.data())
def test_any_sequence_of_calls_keeps_blocks_and_contents(
    num_blocks: int, block_size: int, data: st.DataObject
):
    """Beside the allocator, each owner's tokens are kept in a list of their own and in the blocks: what is
    read through a table is always what its owner wrote, whoever else wrote meanwhile."""
    allocator = BlockAllocator(num_blocks, block_size)
    memory: dict[tuple[int, int], int] = {}
    owners: list[tuple[list[int], list[int]]] = []  # (table, tokens)
    for number in range(data.draw(st.integers(1, 60))):
        action = data.draw(st.sampled_from(("new", "append", "append", "append", "fork", "release")))
        before = _contents(allocator, *(table for table, _ in owners))
        try:
            if action == "new" or not owners:
                table: list[int] = []
                tokens = [number] * data.draw(st.integers(1, 2 * block_size))
                used = {block for held, _ in owners for block in held}
                lowest = sorted(set(range(num_blocks)) - used)
                assert allocator.grow(table, len(tokens)) == lowest[: len(table)]
                for position, token in enumerate(tokens):
                    memory[table[position // block_size], position % block_size] = token
                owners.append((table, tokens))
                continue
            table, tokens = owners[data.draw(st.integers(0, len(owners) - 1))]
            if action == "append":
                position = len(tokens)
                if copy := allocator.append(table, position):
                    for offset in range(block_size):
                        memory[copy[1], offset] = memory.get((copy[0], offset), -1)
                memory[table[position // block_size], position % block_size] = number
                tokens.append(number)
            elif action == "fork":
                owners.append((allocator.fork(table), list(tokens)))
            else:
                allocator.release(table)
                owners = [owner for owner in owners if owner[0]]
        except OutOfBlocks:
            assert _contents(allocator, *(table for table, _ in owners)) == before
        allocator.check_integrity([table for table, _ in owners])
        assert allocator.num_free + allocator.num_used == num_blocks
        for table, tokens in owners:
            assert [memory[table[p // block_size], p % block_size] for p in range(len(tokens))] == tokens
    for table, _ in owners:
        allocator.release(table)
    assert allocator.num_free == num_blocks
