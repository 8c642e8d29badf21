"""What is computed already of a sequence that waits, and how its table gets that. No JAX here."""

from collections import Counter
from typing import Any

from moejax.cache.prefix import NOTHING, Match, Node
from moejax.cache.store import BlockStore
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
    elif prefixes.config.load == "auto" and scheduler.store is not None:
        match = worth_loading(match, scheduler.swap.recompute_s(1), scheduler.store)
    # A block to be copied cannot be taken meanwhile; where all are needed, it is not copied.
    return match if scheduler.blocks_short(sequence, match) <= 0 else match.whole()


def _loaded(match: Match) -> list[Node]:
    """Returns the nodes of a match that are copied from the store."""
    nodes = [node for node in match.nodes if node.slot is not None and not match.takes(node)]
    return [*nodes, match.partial] if match.partial and match.partial.slot is not None else nodes


def worth_loading(match: Match, token_s: float, store: BlockStore) -> Match:
    """Returns as much of a match as is expected to be there sooner than it is computed, at `token_s` seconds
    a token; all of it where that is not known."""
    away, gains = set(_loaded(match)), [0.0]
    for node in match.path:
        tokens = match.extra if node is match.partial else len(node.tokens)
        gains.append(gains[-1] + tokens * token_s - (store.load_s(node.slot or 0) if node in away else 0))
    keep = len(match.path) if not token_s else max(range(len(gains)), key=lambda i: (gains[i], i))
    if keep == len(match.path):
        return match
    nodes = match.nodes[:keep]
    return Match(nodes, None, 0, sum(len(node.tokens) for node in nodes), match.shared)


def brought(scheduler: Any, sequence: Sequence, match: Match, store: BlockStore) -> bool | None:
    """Tells whether the next step can load all that a sequence will. Not yet: False, or it waits where
    nothing else runs. Never: None, and what is lost is forgotten, so that less is found."""
    swap, saved = scheduler.swap, set(scheduler.swap.saves)  # before anything is loaded
    if scheduler.prefixes is not None:
        saved |= scheduler.prefixes.saves.keys()
    nodes = {int(node.slot or 0): node for node in _loaded(match) if node.slot not in saved}
    swapped = [slot for slot in sequence.swapped[len(match.nodes) :] if slot not in saved]
    lost = set[int]()
    if swapped and swap.mode == "auto":
        if 0 < swap.recompute_s(sequence.preempted_at) < sum(map(store.load_s, swapped)):
            store.doubt()
            lost.update(swapped)
    found = set() if lost else store.lost([*nodes, *swapped], wait=not scheduler.running)
    if found is None:
        return False
    lost |= found
    for slot in lost.intersection(nodes):
        scheduler.prefixes.lose(nodes[slot])
    if not lost.isdisjoint(swapped):
        swap.counts["swaps_given_up"] += 1
        swap.forget(sequence)
    return None if lost else True


def reuse(scheduler: Any, sequence: Sequence, plan: StepPlan) -> None:
    """Gives a sequence the blocks of what is computed of it: shared, loaded, or copied."""
    allocator, prefixes = scheduler.allocator, scheduler.prefixes
    blocks, match = sequence.blocks, scheduler.match(sequence)
    store = scheduler.store
    if prefixes.config.load == "auto" and store is not None and sequence.not_looked_up is None:
        found = prefixes.match(sequence.identity, sequence.tokens[:-1])
        if not sequence.swapped and len(found.nodes) > len(match.nodes):
            prefixes.counts["not_loaded_tokens"] += found.tokens - match.tokens
            store.doubt()
    taken = {node: node.block for node in match.nodes if node.block is not None and match.takes(node)}
    copied = [node.block for node in match.path if node.block is not None and node not in taken]
    for block in (*taken.values(), *copied):
        allocator.hold(block)  # so that none is taken for another; the last until all are admitted

    def new_block() -> int:
        (block,) = allocator.grow(blocks, (len(blocks) + 1) * allocator.block_size)
        return int(block)

    sources, mine = Counter[str](), True
    for node in match.nodes:
        on_disk = store is not None and store.on_disk(node.slot) and node.slot not in prefixes.saves
        source = "disk" if on_disk else "host"
        sources["device" if node in taken or node.slot is None else source] += len(node.tokens)
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
    plan.held += copied
    sequence.computed = sequence.cached = match.tokens
    prefixes.use(match)
    again = sequence.preemptions > 0 or sequence.generated > 0  # resumed
    prefixes.count(sequence.prompt_len, sources, sequence.not_looked_up, again)
