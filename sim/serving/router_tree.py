"""A router's guess at which instance has which prefix: what it sent where, and nothing else.

After sglang_router 0.3.2 (`policies/tree.rs`): one radix tree for all instances, every node marked
with those that were sent a prompt through it. It never looks into an instance's cache, and does
not learn what is evicted there. Characters of text there are blocks of tokens here.
"""

from __future__ import annotations

from collections import Counter
from heapq import heapify, heappop, heappush
from itertools import count

_EVICT_TO = 7 / 8  # of the largest size: so that a tree at its limit is seldom swept
Ids = tuple[int, ...]


class _Node:
    """Blocks that follow each other, and the instances that were sent them, by last use.

    They are the blocks from `start` to `end` of a prompt that had them.
    """

    __slots__ = (
        "block_tokens",
        "branches",
        "end",
        "ids",
        "last",
        "last_use",
        "others",
        "parent",
        "start",
    )

    def __init__(
        self, ids: Ids, start: int, end: int, block_tokens: int, parent: _Node | None
    ) -> None:
        self.ids = ids
        self.start = start
        self.end = end
        self.block_tokens = block_tokens
        self.parent = parent
        self.branches = 0  # nodes that follow it
        self.last = -1  # the instance that was sent them last
        self.last_use = 0  # number of that request
        self.others: dict[int, int] | None = None  # instance -> its last use

    @property
    def tokens(self) -> int:
        """Tokens of its blocks."""
        return (self.end - self.start) * self.block_tokens

    def use_of(self, instance: int) -> int | None:
        """Return the number of the last request with them that an instance was sent."""
        if instance == self.last:
            return self.last_use
        return None if self.others is None else self.others.get(instance)

    def use(self, instance: int, number: int) -> bool:
        """Note that an instance was sent them; tell whether it was for the first time."""
        new = False
        if instance != self.last:
            if self.others is None:
                self.others = {}
            new = self.others.pop(instance, None) is None
            self.others[self.last] = self.last_use
            self.last = instance
        self.last_use = number
        return new

    def drop(self, instance: int) -> bool:
        """Forget that an instance was sent them; tell whether others still have them."""
        if not self.others:
            return False
        if instance == self.last:
            self.last = max(self.others, key=self.others.__getitem__)
            self.last_use = self.others.pop(self.last)
        else:
            del self.others[instance]
        return True


# How far a prompt is known: the nodes that it goes through, how many of its first blocks they hold,
# and whether the last of them holds other blocks after those.
Match = tuple[list[_Node], int, bool]


class RouterTree:
    """The prompts sent to each of some instances; one with over `most_tokens` loses old ones.

    Blocks are those of `Request.block_ids`: equal only if all before them are. So the first block
    of a node tells which one it is, and the last one whether all of it is there.
    """

    def __init__(self, instances: int, most_tokens: int) -> None:
        self.tokens = [0] * instances
        self._most_tokens = most_tokens
        self._nodes: dict[int, _Node] = {}  # by their first block
        self._requests = 0

    def match(self, ids: Ids) -> Match:
        """Return how far a prompt is known, until the next `insert` or `remove`."""
        known = self._nodes
        nodes: list[_Node] = []
        at, end = 0, len(ids)
        while at < end:
            node = known.get(ids[at])
            if node is None:
                break
            nodes.append(node)
            after = node.end
            if after > end or node.ids[after - 1] != ids[after - 1]:
                return nodes, _shared(node, ids), True
            at = after
        return nodes, at, False

    def insert(self, ids: Ids, block_tokens: int, instance: int, match: Match) -> None:
        """Note that a prompt of these blocks, which matches so far, was sent to an instance."""
        self._requests += 1
        nodes, at, parts = match
        if parts:
            nodes[-1] = self._split(nodes[-1], at)
        for node in nodes:
            if node.last == instance:
                node.last_use = self._requests
            elif node.use(instance, self._requests):
                self.tokens[instance] += node.tokens
        if at < len(ids):
            self._append(nodes[-1] if nodes else None, ids, at, block_tokens, instance)
        if self.tokens[instance] > self._most_tokens:
            self._shrink(instance, _EVICT_TO * self._most_tokens)

    def remove(self, instance: int) -> None:
        """Forget all that was sent to an instance."""
        self._shrink(instance, 0.0)

    def _append(
        self, node: _Node | None, ids: Ids, start: int, block_tokens: int, instance: int
    ) -> None:
        """Add blocks after a node; one that is this instance's alone, and the last, grows."""
        end = len(ids)
        self.tokens[instance] += (end - start) * block_tokens
        if node is not None:
            if not node.branches and not node.others and node.block_tokens == block_tokens:
                node.ids, node.end = ids, end
                return
            node.branches += 1
        self._nodes[ids[start]] = leaf = _Node(ids, start, end, block_tokens, node)
        leaf.last, leaf.last_use = instance, self._requests

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two, `at` blocks from the beginning of a prompt; return the first part."""
        first = _Node(node.ids, node.start, at, node.block_tokens, node.parent)
        first.last, first.last_use = node.last, node.last_use
        first.others = dict(node.others) if node.others else None
        first.branches = 1
        node.start, node.parent = at, first
        self._nodes[first.ids[first.start]] = first
        self._nodes[node.ids[at]] = node
        return first

    def _shrink(self, instance: int, to_tokens: float) -> None:
        """Take the instance off its least recently used leaves."""
        order = count()  # no two nodes are compared
        uses = {node: node.use_of(instance) for node in self._nodes.values()}
        below = Counter(node.parent for node, use in uses.items() if use is not None)
        leaves = [
            (use, next(order), node)
            for node, use in uses.items()
            if use is not None and not below[node]
        ]
        heapify(leaves)
        while leaves and self.tokens[instance] > to_tokens:
            node = heappop(leaves)[2]
            self.tokens[instance] -= node.tokens
            parent = node.parent
            if not node.drop(instance):
                del self._nodes[node.ids[node.start]]
                if parent is not None:
                    parent.branches -= 1
            below[parent] -= 1
            if parent is not None and not below[parent]:
                heappush(leaves, (uses[parent] or 0, next(order), parent))


def holder(match: Match) -> int | None:
    """Return the instance that was last sent the deepest block of a match; None without one."""
    nodes = match[0]
    return nodes[-1].last if nodes else None


def _shared(node: _Node, ids: Ids) -> int:
    """Return how many first blocks of a prompt are known, the last of them in this node."""
    equal, different = node.start + 1, min(node.end, len(ids)) + 1
    while different - equal > 1:
        middle = (equal + different) // 2
        if node.ids[middle - 1] == ids[middle - 1]:
            equal = middle
        else:
            different = middle
    return equal
