"""A router's guess at which instance has which prefix: what it sent where, and nothing else.

After sglang_router 0.3.2 (`policies/tree.rs`): one radix tree for all instances, every node marked
with those that were sent a prompt through it. It never looks into an instance's cache, and does
not learn what is evicted there. Characters of text there are blocks of tokens here.
"""

from __future__ import annotations

from collections.abc import Iterable
from heapq import heapify, heappop, heappush
from itertools import count

_EVICT_TO = 7 / 8  # of the largest size: so that a tree at its limit is seldom swept
Ids = tuple[int, ...]


class _Node:
    """Blocks that follow each other, and the instances that were sent them, by last use."""

    __slots__ = ("block_tokens", "children", "ids", "latest", "tokens", "used")

    def __init__(self, ids: Ids, block_tokens: int, used: dict[int, int], latest: int) -> None:
        self.ids = ids
        self.block_tokens = block_tokens
        self.tokens = len(ids) * block_tokens
        self.children: dict[int, _Node] | None = None  # by their first block
        self.used = used  # instance -> number of the request
        self.latest = latest  # the instance that was sent the last one; it may be gone


# How far a prompt is known: the nodes that it goes through, how many of its first blocks they hold,
# and whether the last of them holds other blocks after those.
Match = tuple[list[_Node], int, bool]


class RouterTree:
    """The prompts sent to each of some instances; one with over `most_tokens` loses old ones."""

    def __init__(self, instances: int, most_tokens: int) -> None:
        self.tokens = [0] * instances
        self._most_tokens = most_tokens
        self._root = _Node((), 0, {}, -1)
        self._root.children = {}
        self._requests = 0

    def match(self, ids: Ids) -> Match:
        """Return how far a prompt is known, until the next `insert` or `remove`.

        Blocks are those of `Request.block_ids`: equal only if all before them are, so that the last
        block of a node settles whether all of it is there.
        """
        nodes: list[_Node] = []
        at, end = 0, len(ids)
        children = self._root.children
        while at < end and children is not None:
            child = children.get(ids[at])
            if child is None:
                break
            nodes.append(child)
            edge = child.ids
            after = at + len(edge)
            if after > end or edge[-1] != ids[after - 1]:
                return nodes, at + _shared(edge, ids, at), True
            at, children = after, child.children
        return nodes, at, False

    def insert(self, ids: Ids, block_tokens: int, instance: int, match: Match) -> None:
        """Note that a prompt of these blocks, which matches so far, was sent to an instance."""
        self._requests += 1
        nodes, at, parts = match
        if parts:
            parent = nodes[-2] if len(nodes) > 1 else self._root
            before = at - sum(len(node.ids) for node in nodes[:-1])
            nodes[-1] = _split(parent, nodes[-1], before)
        for node in nodes:
            if instance not in node.used:
                self.tokens[instance] += node.tokens
            node.used[instance] = self._requests
            node.latest = instance
        if at < len(ids):
            self._append(nodes[-1] if nodes else self._root, ids[at:], block_tokens, instance)
        if self.tokens[instance] > self._most_tokens:
            self._shrink(instance, _EVICT_TO * self._most_tokens)

    def remove(self, instance: int) -> None:
        """Forget all that was sent to an instance."""
        self._shrink(instance, 0.0)

    def _append(self, node: _Node, ids: Ids, block_tokens: int, instance: int) -> None:
        """Add blocks below a node; a leaf of this instance alone grows instead."""
        self.tokens[instance] += len(ids) * block_tokens
        if node.children is None:
            if node.block_tokens == block_tokens and len(node.used) == 1:
                node.ids += ids
                node.tokens += len(ids) * block_tokens
                return
            node.children = {}
        node.children[ids[0]] = _Node(ids, block_tokens, {instance: self._requests}, instance)

    def _shrink(self, instance: int, to_tokens: float) -> None:
        """Take the instance off its least recently used leaves."""
        order = count()  # no two nodes are compared
        parents: dict[int, _Node] = {}
        leaves: list[tuple[int, int, _Node]] = []
        stack = [self._root]
        while stack:
            node = stack.pop()
            below = [child for child in _children(node) if instance in child.used]
            for child in below:
                parents[id(child)] = node
            stack += below
            if not below and node is not self._root:
                leaves.append((node.used[instance], next(order), node))
        heapify(leaves)
        while leaves and self.tokens[instance] > to_tokens:
            node = heappop(leaves)[2]
            del node.used[instance]
            self.tokens[instance] -= node.tokens
            parent = parents[id(node)]
            if not node.used and parent.children is not None:
                del parent.children[node.ids[0]]
            elsewhere = any(instance in child.used for child in _children(parent))
            if parent is not self._root and not elsewhere:
                heappush(leaves, (parent.used[instance], next(order), parent))


def holder(match: Match) -> int | None:
    """Return the instance that was last sent the deepest block of a match; None without one."""
    nodes = match[0]
    if not nodes:
        return None
    node = nodes[-1]
    if node.latest in node.used:
        return node.latest
    return max(node.used, key=node.used.__getitem__)


def _shared(edge: Ids, ids: Ids, start: int) -> int:
    """Return how many blocks of an edge the ids from `start` on begin with; at least one."""
    most = min(len(edge), len(ids) - start)
    if edge[most - 1] == ids[start + most - 1]:
        return most
    equal, different = 1, most
    while different - equal > 1:
        middle = (equal + different) // 2
        if edge[middle - 1] == ids[start + middle - 1]:
            equal = middle
        else:
            different = middle
    return equal


def _split(parent: _Node, child: _Node, blocks: int) -> _Node:
    """Cut a node in two; return the first part."""
    first = _Node(child.ids[:blocks], child.block_tokens, dict(child.used), child.latest)
    child.ids = child.ids[blocks:]
    child.tokens -= first.tokens
    first.children = {child.ids[0]: child}
    assert parent.children is not None
    parent.children[first.ids[0]] = first
    return first


def _children(node: _Node) -> Iterable[_Node]:
    return () if node.children is None else node.children.values()
