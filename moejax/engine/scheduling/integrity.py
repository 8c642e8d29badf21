"""Checks of a scheduler's whole state, which tests make between its steps. No JAX here."""

from typing import Any

from moejax.engine.scheduling.sequence import State


def check_scheduler(scheduler: Any) -> None:
    """Checks the whole state of a `Scheduler`, which imports this; see `BlockAllocator.check_integrity`.

    Raises:
        AssertionError: what is wrong.
    """
    allocator, running, free = scheduler.allocator, scheduler.running, scheduler.free_slots
    holders, most = scheduler.holders(), scheduler.max_num_seqs
    allocator.check_integrity(s.blocks for s in holders)
    if scheduler.windows is not None:
        scheduler.windows.check_integrity(s.window_blocks for s in holders)
    slots = sorted(s.slot for s in holders) + list(free)
    reserved = sum(len(s.forks) for s in running)
    if len(set(slots)) != len(slots) or set(slots) != set(range(most)):
        raise AssertionError(f"slots {slots} are not each of 0..{most - 1} once")
    if reserved > len(free):
        raise AssertionError(f"{reserved} slots promised to forks, {len(free)} free")
    keys = [scheduler.policy.key(s) for s in running]
    if keys != sorted(keys) and not scheduler.policy.moves:
        raise AssertionError("running sequences are out of order")
    for s in running:
        if s.state is not State.RUNNING or not 0 <= s.computed <= s.length:
            raise AssertionError(f"{s!r} should be running")
        if len(s.blocks) * allocator.block_size < s.computed:
            raise AssertionError(f"{s!r} has computed past its {len(s.blocks)} blocks")
    queued = scheduler.waiting()
    if any(s.blocks or s.slot != -1 or s.computed for s in queued):
        raise AssertionError("a waiting sequence owns blocks or a slot")
    scheduler.swap.check_integrity(queued, allocator.block_size)
    if scheduler.store is not None:
        scheduler.store.check_integrity()
    if len(set(map(id, queued))) != len(queued) or scheduler.num_waiting != sum(s.samples for s in queued):
        raise AssertionError(f"{scheduler.num_waiting} samples counted as waiting, {len(queued)} queued")
