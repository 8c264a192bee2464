"""The router's tree of prompts against sets of prefixes, and what it forgets."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from tonnage.sim.serving.router_tree import Ids, RouterTree, holder

BLOCK = 7
SMALL = st.lists(st.integers(0, 2), min_size=1, max_size=8)
SENDS = st.lists(st.tuples(SMALL, st.integers(0, 2)), min_size=1, max_size=40)


def chained(contents: list[int]) -> Ids:
    """Return ids that stand for a block and all before it."""
    ids, known = [], 0
    for content in contents:
        known = 3 * known + content + 1
        ids.append(known)
    return tuple(ids)


def send(tree: RouterTree, ids: Ids, instance: int, block_tokens: int = BLOCK) -> None:
    tree.insert(ids, block_tokens, instance, tree.match(ids))


@settings(max_examples=300, deadline=None)
@given(SENDS, SMALL)
def test_a_tree_knows_every_block_that_was_sent(
    sends: list[tuple[list[int], int]], asked: list[int]
) -> None:
    """The oracle: per instance, the set of ids; a match is the longest known run of them."""
    tree = RouterTree(3, 10**9)
    sent: list[dict[int, int]] = [{}, {}, {}]  # id -> number of the request that last had it
    for number, (contents, instance) in enumerate(sends):
        ids = chained(contents)
        send(tree, ids, instance)
        sent[instance].update(dict.fromkeys(ids, number))
    assert tree.tokens == [BLOCK * len(known) for known in sent]
    ids = chained(asked)
    anywhere = set().union(*sent)
    blocks = next((n for n, one in enumerate(ids) if one not in anywhere), len(ids))
    match = tree.match(ids)
    assert match[1] == blocks
    if not blocks:
        assert holder(match) is None
        return
    deepest = ids[blocks - 1]
    latest = max(known.get(deepest, -1) for known in sent)
    assert sent[holder(match) or 0].get(deepest) == latest


@settings(max_examples=300, deadline=None)
@given(SENDS, st.integers(BLOCK, 12 * BLOCK))
def test_a_full_tree_forgets_but_never_the_prefix_of_what_it_knows(
    sends: list[tuple[list[int], int]], most_tokens: int
) -> None:
    tree = RouterTree(3, most_tokens)
    for contents, instance in sends:
        ids = chained(contents)
        send(tree, ids, instance)
        assert all(0 <= tokens <= most_tokens for tokens in tree.tokens)
        if len(ids) * BLOCK <= 7 / 8 * most_tokens:  # it was used last
            assert tree.match(ids)[1] == len(ids)
            assert holder(tree.match(ids)) == instance
    for instance in range(3):
        tree.remove(instance)
    assert tree.tokens == [0, 0, 0]
    assert tree.match(chained(sends[0][0]))[1] == 0


def test_the_least_recently_used_leaf_goes_first() -> None:
    """Room for 8 blocks, swept to 7: A (3) was used after B (3), so that C's 3 cost B its own."""
    tree = RouterTree(1, 8 * BLOCK)
    a, b, c = chained([0, 0, 0]), chained([1, 1, 1]), chained([2, 2, 2])
    for ids in (a, b, a, c):
        send(tree, ids, 0)
    assert [tree.match(ids)[1] for ids in (a, b, c)] == [3, 0, 3]


def test_an_instance_that_is_removed_leaves_the_others_their_own() -> None:
    tree = RouterTree(2, 10**9)
    send(tree, chained([0, 1, 2]), 0)
    send(tree, chained([0, 1]), 1)
    tree.remove(1)
    assert tree.tokens == [3 * BLOCK, 0]
    assert holder(tree.match(chained([0, 1]))) == 0


def test_blocks_of_different_sizes_are_counted_as_they_are() -> None:
    tree = RouterTree(1, 10**9)
    send(tree, (5,), 0, block_tokens=100)
    send(tree, (5, 6), 0, block_tokens=10)
    assert tree.tokens == [110]
