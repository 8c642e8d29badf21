"""Memory of computed prefixes: a tree of cache blocks, found by their tokens. Host bookkeeping only: no JAX.

A node is one block's tokens under all tokens before it, so that a path from a root is a prefix whose keys
and values are stored (RadixAttention, arXiv 2312.07104). Each identity has a root of its own: what does not
depend on the tokens alone is never shared across identities.

    root ── [the cat sat on] ── [the mat and slept.]      whole blocks, shared as they are
                     └───────── [the roof]                a block's first tokens: copied by who goes on

A node is live while a sequence's table holds its block. Afterwards it is kept: in its block, which counts
as free and is taken back when no other is left ("device"), or in a slot of a store on the host, so that idle
prefixes leave the pool to those that run ("host"). Leaves go first, in the policy's order.
"""

import heapq
import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from moejax.core.config import PrefixCacheConfig

PROTECTED_SHARE = 0.8
"""Of the blocks, how many nodes that were hit may be protected by "slru" (Karedla et al., 1994)."""


class Blocks(Protocol):
    """The part of `moejax.cache.allocator.BlockAllocator` that the tree asks."""

    num_blocks: int

    def refcount(self, block: int) -> int: ...

    def discard(self, block: int) -> None: ...


@dataclass(eq=False, slots=True)
class Node:
    """One block's tokens.

    Attributes:
        tokens: at most a block's; fewer only in a leaf. A root has none, but an identity.
        children: by their first token.
        block: where it is in the pool; None where it is in the store alone.
        slot: where it is in the store; None where it is in the pool alone.
        live: a table holds its block.
        fresh: its block is written by the step that is being scheduled: readable, but not yet to be copied.
        pinned: given up only if those that run would have no room.
        protected: see the policy "slru".
        hits, born, used: how often it was found, and when it was made and found last, by the tree's count.
        used_at: seconds, when it was made or found last.
        stamp: of its newest entry among the leaves.
    """

    parent: "Node | None"
    tokens: tuple[int, ...]
    identity: Hashable = None
    depth: int = 0
    children: "dict[int, list[Node]]" = field(default_factory=dict)
    block: int | None = None
    slot: int | None = None
    live: bool = False
    fresh: bool = False
    pinned: bool = False
    protected: bool = False
    hits: int = 0
    born: int = 0
    used: int = 0
    used_at: float = 0.0
    stamp: int = 0


class Match(NamedTuple):
    """The longest known prefix: whole blocks, and then the first `extra` tokens of `partial`'s. Where live
    blocks are not `shared`, they are copied."""

    nodes: list[Node]
    partial: Node | None
    extra: int
    tokens: int
    shared: bool = True

    @property
    def path(self) -> list[Node]:
        return [*self.nodes, self.partial] if self.partial else self.nodes

    @property
    def in_pool(self) -> int:
        """Counts whole blocks that need no room of their own."""
        return sum(self.takes(node) for node in self.nodes)

    def takes(self, node: Node) -> bool:
        """Tells whether a table takes a whole block as it is. What follows another table's block may not
        outlive that, so where the first is copied, all are."""
        return node.block is not None and (self.shared or not self.nodes[0].live)

    @property
    def waits(self) -> bool:
        """Tells whether a block is to be copied that the step that is being scheduled writes."""
        return not self.shared and any(node.fresh for node in self.nodes)

    @property
    def kept_in_pool(self) -> int:
        """Counts blocks that count as free and cannot be taken by who is to share or copy them."""
        return sum(node.block is not None and not node.live for node in self.path)

    def in_place(self) -> "Match":
        """Returns the first whole blocks alone, those that are written and that a table takes as they are."""
        nodes = list(itertools.takewhile(lambda node: self.takes(node) and not node.fresh, self.nodes))
        return Match(nodes, None, 0, sum(len(node.tokens) for node in nodes), self.shared)

    def whole(self) -> "Match":
        """Returns the whole blocks alone."""
        return Match(self.nodes, None, 0, self.tokens - self.extra, self.shared)


NOTHING = Match([], None, 0, 0)

POLICIES: dict[str, Callable[[Node], tuple[int, ...]]] = {
    "lru": lambda node: (node.used,),
    "lfu": lambda node: (node.hits, node.used),
    "slru": lambda node: (node.protected, node.used),
    "fifo": lambda node: (node.born,),
    # Blocks are of one size: the longest prefix is the largest.
    "size": lambda node: (-node.depth, node.used),
}


class PrefixTree:
    """Finds the longest stored prefix of a prompt, to the token.

    Args:
        config: policy, place and age; its `place` is "device" or "host".
        block_size: tokens in a block.
        slots: blocks that the store on the host has room for; 0 with place "device".
        shared: several tables may hold a block. Attention in plain XLA meets every block it reads with as
            many queries as any block has readers, so there each has its own.

    Attributes:
        saves: slot → block that is still to be copied there, before anything is written to the block again.
        counts: tokens and requests by what became of them, see `LLM.stats`.
    """

    def __init__(
        self, config: PrefixCacheConfig, block_size: int, slots: int = 0, shared: bool = True
    ) -> None:
        self.config, self.block_size, self.num_slots, self.shared = config, block_size, slots, shared
        self._rank = POLICIES[config.policy]
        self._to_host = config.place == "host"
        self._clock = itertools.count(1)
        self.counts: Counter[str] = Counter()
        self.allocator: Blocks | None = None  # set by the allocator that it is given to
        self._of_block: dict[int, Node] = {}
        self.clear()

    def clear(self) -> None:
        """Forgets everything; blocks that were kept are free."""
        for block, node in self._of_block.items():
            if not node.live and self.allocator is not None:
                self.allocator.discard(block)
        self._of_block = {}
        self._roots: dict[Hashable, Node] = {}
        self._leaves: list[tuple[Any, int, Node]] = []  # a heap with outdated entries
        self._fresh: list[Node] = []
        self._protected: dict[Node, None] = {}
        self._free_slots = list(range(self.num_slots))
        self.saves: dict[int, int] = {}

    def forget(self) -> None:
        """Forgets all that no table holds."""
        for node in reversed(list(self.nodes())):
            if not node.live and not node.children:
                self._drop(node)

    @property
    def num_kept(self) -> int:
        """Counts nodes that no table holds."""
        return sum(not node.live for node in self.nodes())

    def nodes(self) -> Iterator[Node]:
        """Returns all nodes, parents before their children."""
        return _below(self._roots.values())

    # -- looking up --------------------------------------------------------------------------------------

    def match(self, identity: Hashable, tokens: Sequence[int]) -> Match:
        """Returns the longest stored prefix of these tokens; changes nothing but what is too old."""
        node = self._roots.get(identity)
        nodes: list[Node] = []
        size, at = self.block_size, 0
        while node is not None:
            child, common = self._longest(node, tokens[at : at + size])
            if child is None:
                break
            if common < size:
                ready, extra = (None, 0) if child.fresh else (child, common)
                return Match(nodes, ready, extra, at + extra, self.shared)
            nodes.append(child)
            node, at = child, at + size
        return Match(nodes, None, 0, at, self.shared)

    def _longest(self, node: Node, tokens: Sequence[int]) -> tuple[Node | None, int]:
        """Returns the child that shares most first tokens, and how many; None where none shares any."""
        best, most = None, 0
        wanted = tuple(tokens)
        for child in list(node.children.get(wanted[0], ())) if wanted else ():
            if self._too_old(child):
                self._drop(child)
                continue
            common = common_start(child.tokens, wanted)
            if common > most:
                best, most = child, common
        return best, most

    def use(self, match: Match) -> None:
        """Notes that a match has been taken."""
        for node in match.path:
            self._touch(node)
            node.hits += 1
            if self.config.policy == "slru":
                self._protect(node)
            self._offer(node)

    def count(self, prompt: int, sources: Mapping[str, int], unasked: str | None, again: bool) -> None:
        """Adds an admission to `counts`.

        Args:
            prompt: tokens of the prompt.
            sources: tokens that were found, by where they were.
            unasked: why it was not looked up; None: it was.
            again: it had been preempted; what it finds then is no hit.
        """
        if again:
            self.counts["readmitted_tokens"] += sum(sources.values())
            return
        self.counts["prompt_tokens"] += prompt
        for source, tokens in sources.items():
            self.counts[f"hit_tokens_{source}"] += tokens
        if not sources:
            self.counts[f"misses: {unasked or 'nothing stored'}"] += 1

    # -- storing -----------------------------------------------------------------------------------------

    def insert(
        self, identity: Hashable, tokens: Sequence[int], blocks: Sequence[int], *, ended: bool
    ) -> None:
        """Remembers tokens whose keys and values are in these blocks of a table, or are about to be.

        A kept node must not be above a live one, or its block would count as free and could not be taken.
        So what others have computed meanwhile ends the path of a sequence that goes on, and blocks that
        another table still holds that of one whose table is `ended` (and is released next).
        """
        assert self.allocator is not None
        node, size, first = self._roots.get(identity) or Node(None, (), identity), self.block_size, 0
        for block in blocks:  # those of a table that have whole nodes are its first ones
            own = self._of_block.get(block)
            if own is None or len(own.tokens) < size:
                break
            node, first = own, first + size
        for at, block in zip(range(first, len(tokens), size), blocks[first // size :], strict=False):
            part = tuple(tokens[at : at + size])
            child, common = self._longest(node, part)
            own, known = self._of_block.get(block), child is not None and common == len(part)
            if own is not None and (own is child or not known):
                if len(part) > len(own.tokens):
                    own.tokens = part
                    self._free_its_slot(own)  # what is stored there ends before
                node = own
                continue
            if ended and self.allocator.refcount(block) > 1:
                return
            if child is not None and known:
                if len(child.tokens) > common:
                    return
                if child.block is None and own is None:  # what is computed again can be shared as it is
                    self.place(child, block)
                elif not ended:
                    return
                node = child
                continue
            before, node = child, self._add(node, part, fresh=not ended)
            self.place(node, block)
            if before is not None and common == len(before.tokens) and not before.live:
                node.pinned = before.pinned  # this one goes on where that one ends
                self._drop(before)

    def _add(self, parent: Node, tokens: tuple[int, ...], *, fresh: bool) -> Node:
        node = Node(parent, tokens, depth=parent.depth + 1)
        if parent.parent is None:
            self._roots[parent.identity] = parent
        parent.children.setdefault(tokens[0], []).append(node)
        self._touch(node)
        node.born, node.fresh = node.used, fresh
        if fresh:
            self._fresh.append(node)
        return node

    def place(self, node: Node, block: int) -> None:
        """Says that a table has the node in this block of its own."""
        node.block, node.live = block, True
        self._of_block[block] = node

    def settle(self) -> None:
        """Says that all blocks inserted so far belong to steps before the one to be scheduled."""
        for node in self._fresh:
            node.fresh = False
        self._fresh = []

    def pin(self, identity: Hashable, tokens: Sequence[int]) -> int:
        """Has the stored blocks of a prefix given up last; returns how many of the tokens they hold."""
        match = self.match(identity, tokens)
        for node in match.path:
            node.pinned = True
            self._offer(node)
        return match.tokens

    # -- the allocator's side ----------------------------------------------------------------------------

    def hold(self, block: int) -> None:
        """Says that a table holds a kept block again."""
        self._of_block[block].live = True

    def let_go(self, block: int) -> bool:
        """Says that no table holds a block any more; returns whether it is kept where it is."""
        node = self._of_block.get(block)
        if node is None:
            return False
        node.live = False
        if not self._to_host:
            self._offer(node)
            return True
        del self._of_block[block]
        node.block = None
        if node.slot is None:
            node.slot = self._free_slot()
            if node.slot is None:
                self._remove(node)
                return False
            self.saves[node.slot] = block
        self._offer(node)
        return False

    def lose(self, node: Node) -> None:
        """Says that the store no longer has what it had of a node."""
        if node.block is not None:
            self._free_its_slot(node)
        elif node.parent is not None:  # else it went with what is above it
            self._drop(node)

    def evict(self) -> int:
        """Forgets the leaf that the policy gives up first, and returns its block, which was kept."""
        node = self._first_leaf(pinned=True)
        assert node is not None and node.block is not None, "no block is kept"
        self._remove(node)
        return node.block

    def take_saves(self) -> list[tuple[int, int]]:
        """Returns the (block, slot) that are still to be copied to the store; they count as copied."""
        saves, self.saves = self.saves, {}
        return [(block, slot) for slot, block in saves.items()]

    # -- giving up ---------------------------------------------------------------------------------------

    def _free_slot(self) -> int | None:
        """Returns a free slot of the store, taken from a leaf if need be; None where all are pinned."""
        if not self._free_slots and (node := self._first_leaf(pinned=False)) is not None:
            self._remove(node)
        return self._free_slots.pop() if self._free_slots else None

    def _first_leaf(self, pinned: bool) -> Node | None:
        """Returns the kept leaf that goes first; pinned ones go last, or not at all."""
        while self._leaves:
            (is_pinned, *_), stamp, node = self._leaves[0]
            if stamp == node.stamp and not node.live and not node.children:
                return node if pinned or not is_pinned else None
            heapq.heappop(self._leaves)
        return None

    def _offer(self, node: Node) -> None:
        """Puts a node where it may be given up, if it may; its older entries no longer count."""
        node.stamp = next(self._clock)
        if not node.live and not node.children and node.parent is not None:
            key = (node.pinned, *self._rank(node))
            heapq.heappush(self._leaves, (key, node.stamp, node))

    def _touch(self, node: Node) -> None:
        node.used, node.used_at = next(self._clock), time.monotonic()

    def _protect(self, node: Node) -> None:
        """Protects a node that was hit, and no longer the one whose hit is the longest ago."""
        node.protected = True
        self._protected.pop(node, None)
        self._protected[node] = None
        room = self.num_slots or (self.allocator.num_blocks if self.allocator else 1)
        if len(self._protected) > PROTECTED_SHARE * room:
            oldest = next(iter(self._protected))
            del self._protected[oldest]
            oldest.protected = False
            self._offer(oldest)

    def _too_old(self, node: Node) -> bool:
        age = self.config.max_age_s
        return age is not None and not node.live and not node.pinned and time.monotonic() - node.used_at > age

    def _drop(self, node: Node) -> None:
        """Forgets a kept node and all under it, and frees what they are in."""
        for each in reversed([node, *_below([node])]):
            self._remove(each)
            if each.block is not None:
                assert self.allocator is not None
                self.allocator.discard(each.block)

    def _remove(self, node: Node) -> None:
        """Takes a leaf out of the tree; its slot is free, its block its finder's."""
        parent = node.parent
        assert parent is not None and not node.children and not node.live
        siblings = parent.children[node.tokens[0]]
        siblings.remove(node)
        if not siblings:
            del parent.children[node.tokens[0]]
        node.parent, node.stamp = None, 0
        self._protected.pop(node, None)
        if node.block is not None:
            del self._of_block[node.block]
        self._free_its_slot(node)
        if parent.parent is not None:
            self._offer(parent)
        elif not parent.children:
            del self._roots[parent.identity]

    def _free_its_slot(self, node: Node) -> None:
        """Frees a node's slot. What is still to be saved there is saved all the same: the step that is being
        scheduled may load it."""
        if node.slot is not None:
            self._free_slots.append(node.slot)
            node.slot = None

    def check_integrity(self, live: set[int]) -> set[int]:
        """Checks the tree against the blocks that tables hold; returns the blocks that are kept.

        Raises:
            AssertionError: says what is wrong.
        """
        kept, slots = set(), list(self._free_slots)
        leaves = {id(node) for _, stamp, node in self._leaves if stamp == node.stamp}
        for node in self.nodes():
            parent = node.parent
            if parent is None or node not in parent.children[node.tokens[0]]:
                raise AssertionError("a node is not its parent's")
            if node.children and len(node.tokens) != self.block_size:
                raise AssertionError("a node with children is not full")
            if node.live and parent.parent is not None and not parent.live:
                raise AssertionError("a live node's parent is not live")
            if node.live != (node.block in live) or (node.block is None and node.slot is None):
                raise AssertionError(
                    f"block {node.block} of a node that is {'' if node.live else 'not '}live"
                )
            if node.block is not None:
                if self._of_block.get(node.block) is not node:
                    raise AssertionError(f"block {node.block} is in two nodes")
                if not node.live:
                    kept.add(node.block)
            if node.slot is not None:
                slots.append(node.slot)
            if not node.live and not node.children and id(node) not in leaves:
                raise AssertionError("a leaf cannot be given up")
        if len(self._of_block) != sum(node.block is not None for node in self.nodes()):
            raise AssertionError("a block belongs to a node that is not in the tree")
        if sorted(slots) != list(range(self.num_slots)):
            raise AssertionError(f"slots {sorted(slots)} are not each of 0..{self.num_slots - 1} once")
        return kept


class HashedBlocks(PrefixTree):
    """The plain twin: finds whole blocks only, each by the hash of all tokens up to its end, as vLLM does. It
    never finds more than the tree."""

    def clear(self) -> None:
        super().clear()
        self._by_hash: dict[int, Node] = {}
        self._hash_of: dict[Node, int] = {}

    def match(self, identity: Hashable, tokens: Sequence[int]) -> Match:
        nodes: list[Node] = []
        for chain, part in self._chain(identity, tokens):
            node = self._by_hash.get(chain)
            # Two prefixes may have one hash.
            if node is None or node.tokens != part or (nodes and node.parent is not nodes[-1]):
                break
            if self._too_old(node):
                self._drop(node)
                break
            nodes.append(node)
        return Match(nodes, None, 0, len(nodes) * self.block_size, self.shared)

    def insert(
        self, identity: Hashable, tokens: Sequence[int], blocks: Sequence[int], *, ended: bool
    ) -> None:
        whole = tokens[: len(tokens) // self.block_size * self.block_size]
        super().insert(identity, whole, blocks, ended=ended)
        node = self._roots.get(identity, Node(None, ()))
        for chain, part in self._chain(identity, whole):
            child = next((c for c in node.children.get(part[0], ()) if c.tokens == part), None)
            if child is None:
                break
            self._by_hash[chain], self._hash_of[child], node = child, chain, child

    def _chain(self, identity: Hashable, tokens: Sequence[int]) -> Iterator[tuple[int, tuple[int, ...]]]:
        """Yields each whole block's hash, which all before it are in, and its tokens."""
        chain = hash(identity)
        for at in range(0, len(tokens) - self.block_size + 1, self.block_size):
            part = tuple(tokens[at : at + self.block_size])
            chain = hash((chain, part))
            yield chain, part

    def _remove(self, node: Node) -> None:
        super()._remove(node)
        chain = self._hash_of.pop(node, None)
        if chain is not None and self._by_hash[chain] is node:
            del self._by_hash[chain]


def make_prefixes(
    config: PrefixCacheConfig, block_size: int, slots: int = 0, shared: bool = True
) -> PrefixTree:
    """Returns the memory of prefixes that a configuration asks for."""
    kind = PrefixTree if config.match == "tokens" else HashedBlocks
    return kind(config, block_size, slots, shared)


def prefix_stats(caches: Sequence[PrefixTree]) -> dict[str, Any]:
    """Returns what `LLM.stats` tells of prefix caches: tokens found of all prompts' tokens, by where they
    were; requests that found nothing, by reason; blocks kept. Empty where there are none."""
    if not caches:
        return {}
    counts = sum((cache.counts for cache in caches), Counter[str]())
    hits = sum(tokens for name, tokens in counts.items() if name.startswith("hit_tokens"))
    prompts = counts["prompt_tokens"]
    return {
        "prefix_hit_rate": hits / prompts if prompts else 0.0,
        "prefix_blocks_kept": sum(cache.num_kept for cache in caches),
        "prefix_tokens": dict(sorted(counts.items())),
    }


def _below(nodes: Iterable[Node]) -> Iterator[Node]:
    """Yields all nodes under these, parents before children; paths may be longer than Python's stack."""
    todo = list(nodes)
    while todo:
        children = list(itertools.chain.from_iterable(todo.pop().children.values()))
        yield from children
        todo += children


def common_start(a: Sequence[int], b: Sequence[int]) -> int:
    """Counts the first tokens that are equal."""
    if a == b:
        return len(a)
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
