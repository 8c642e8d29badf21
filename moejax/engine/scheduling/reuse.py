"""What is computed already of a sequence that waits, and how its table gets that. No JAX here."""

from collections import Counter
from typing import Any

from moejax.cache.prefix import NOTHING, Match
from moejax.engine.scheduling.plan import StepPlan
from moejax.engine.scheduling.sequence import Sequence


def find(scheduler: Any, sequence: Sequence) -> Match:
    """Finds what a `Scheduler`, which imports this, has computed of a sequence's tokens but the last."""
    prefixes = scheduler.prefixes
    if prefixes is None or sequence.identity is None or sequence.not_looked_up is not None:
        return NOTHING
    match = prefixes.match(sequence.identity, sequence.tokens[:-1])
    if sequence.swapped or sequence.imported:  # what is not in place is brought there
        match, had = match.in_place(), sequence.preempted_at if sequence.swapped else sequence.imported
        match = match._replace(tokens=max(match.tokens, had))
    # A block to be copied cannot be taken meanwhile; where all are needed, it is not copied.
    return match if scheduler.blocks_short(sequence, match) <= 0 else match.whole()


def reuse(scheduler: Any, sequence: Sequence, plan: StepPlan) -> None:
    """Gives a sequence the blocks of what is computed of it: shared, loaded, or copied."""
    allocator, prefixes = scheduler.allocator, scheduler.prefixes
    blocks, match = sequence.blocks, scheduler.match(sequence)
    taken = {node: node.block for node in match.nodes if node.block is not None and match.takes(node)}
    copied = [node.block for node in match.path if node.block is not None and node not in taken]
    for block in (*taken.values(), *copied):
        allocator.hold(block)  # so that none is taken for another; the last until it is copied

    def new_block() -> int:
        (block,) = allocator.grow(blocks, (len(blocks) + 1) * allocator.block_size)
        return int(block)

    sources, mine = Counter[str](), True
    for node in match.nodes:
        sources["device" if node in taken or node.slot is None else "host"] += len(node.tokens)
        if node in taken:
            blocks.append(taken[node])
            continue
        plan.fetch(node, new_block())
        mine &= node.block is None
        if mine:  # what follows another table's block may not outlive that
            prefixes.place(node, blocks[-1])
    if match.partial is not None:
        plan.fetch(match.partial, new_block())
        sources["partial"] += match.extra
    allocator.release(copied)
    sequence.computed = sequence.cached = match.tokens
    prefixes.use(match)
    again = sequence.preemptions > 0 or sequence.generated > 0  # resumed
    prefixes.count(sequence.prompt_len, sources, sequence.not_looked_up, again)
