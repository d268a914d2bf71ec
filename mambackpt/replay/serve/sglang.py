"""SGLang's cache of a model with recurrent layers, one request at a time.

The rule is that of release 0.5.23 with pages of one token, in our own words, held to the running
engine by `mambackpt.conformance`. Letters and words:

* L: tokens of the prompt. [s, e): an extend, what one step of at most ``budget`` tokens prefills.
* h: the joint hit, where the request resumes: the deepest state within the attention hit.
* b: the branching point, the attention hit cut to the chunk grid where that lies beyond h.
* A node is a stretch of tokens in the tree of all that is cached, from its parent's end to its own.
  It always has attention cache, and may hold the state after its last token. New nodes come with
  states only, so the tree is as deep as the newest state of each path. Where a lookup leaves a node
  half way, the node is split there.
* A slot is room for one state. A running request pins some, the tree's states fill the others.
* The lock is on the node whose state the request was copied from or handed over last.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from math import lcm
from typing import Literal

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.replay.serve.requests import Served, TokenRequest, shared_length

STRATEGIES = ("extra_buffer", "no_buffer")


def serve(
    requests: Sequence[TokenRequest],
    *,
    chunk: int = 64,
    budget: int = 8192,
    interval: int = 256,
    strategy: Literal["extra_buffer", "no_buffer"] = "extra_buffer",
    per_path: int | None = None,
    slots: int | None = None,
) -> list[Served]:
    """Return what SGLang's cache does with requests that are served one after another.

    >>> prompt = TokenRequest(range(500), outputs=range(500, 900))
    >>> again = TokenRequest(range(900))
    >>> [(s.reused, s.created) for s in serve([prompt, again])]
    [(0, (448, 768)), (768, (896,))]

    ``chunk`` (of the kernel), ``budget`` (``--chunked-prefill-size``) and ``interval``
    (``--mamba-track-interval``) are tokens; ``strategy`` is ``--mamba-radix-cache-strategy``;
    ``per_path`` is ``--mamba-max-states-per-path`` and ``slots`` the states that fit in memory
    (``--max-mamba-cache-size``), both None for no limit. `Served.branch` is the branching point
    that the lookup names, whether or not an extend can keep its state. Raises CheckpointValueError
    for settings that do not fit, and where a request finds too few slots.
    """
    if strategy not in STRATEGIES:
        raise CheckpointValueError(
            f"strategy is {strategy!r}; expected one of {', '.join(STRATEGIES)}. "
            "Try 'extra_buffer'."
        )
    checked_int("chunk", chunk)
    checked_int("budget", budget)
    grid = lcm(chunk, checked_int("interval", interval))
    tree = Tree(
        None if per_path is None else checked_int("per_path", per_path, unit="states"),
        None if slots is None else checked_int("slots", slots, unit="states"),
    )
    buffered = strategy == "extra_buffer"
    return [_serve_one(tree, request, chunk, budget, grid, buffered) for request in requests]


def _serve_one(
    tree: "Tree", request: TokenRequest, chunk: int, budget: int, grid: int, buffered: bool
) -> Served:
    tokens, L = (*request.tokens, *request.outputs), len(request.tokens)
    end = L + max(len(request.outputs), 1) - 1  # what the last token out was computed from
    # The last prompt token is always computed again: its logits are needed.
    attention, h = tree.lookup(tokens[: L - 1])
    # Its own state, and two to write tracked ones to in turn.
    tree.pin(3 if buffered else 1)
    branch = attention // chunk * chunk
    created: list[int] = []
    last = 0  # the state that waits for the end
    for position, e in extends(L, h, branch, chunk, budget, buffered):
        # Handed over after the extend; a request that is done gives up its slot instead.
        if position and (e < L or end > L):
            tree.make_room(1)
            tree.insert(tokens[:position])
        created += [position] * (position > 0)
        last = position if e == L == end else 0
    if not buffered:
        last = end
    elif end // grid * grid > L:
        last = end // grid * grid
    if last:
        tree.insert(tokens[:last])
        created.append(last)
    tree.unpin()
    return Served(
        attention,
        h,
        branch if branch > h else None,
        tuple(sorted({*created})),
        tree.positions(tokens),
    )


def extends(
    L: int, h: int, branch: int, chunk: int, budget: int, buffered: bool = True
) -> Iterator[tuple[int, int]]:
    """Yield the position of the state that each extend hands over (0: none), and the extend's end.

    >>> list(extends(1000, 64, 448, 64, 256))
    [(320, 320), (448, 576), (832, 832), (960, 1000)]

    Without buffers for tracked states (``buffered``) that is the state which it ends with.
    """
    s = h
    while s < L:
        e = min(s + budget, L)
        position = s + (e - s) // chunk * chunk if buffered else e
        if buffered and s < branch < e and (branch - s) % chunk == 0:
            position = branch
        yield position * (position > s), e
        s = e


class _Node:
    """Tokens from the parent's end to ``end``."""

    __slots__ = ("children", "end", "parent", "tokens")

    def __init__(self, tokens: tuple[int, ...], parent: "_Node | None", end: int) -> None:
        self.tokens, self.parent, self.end = tokens, parent, end
        self.children: dict[int, _Node] = {}  # by their first token


class Tree:
    """Attention cache and states of all prefixes, with a limited number of states."""

    def __init__(self, per_path: int | None, slots: int | None) -> None:
        self.per_path, self.slots, self.pinned = per_path, slots, 0
        self.root = self.locked = _Node((), None, 0)
        self.states: OrderedDict[_Node, None] = OrderedDict()  # whose state was used last, last

    def lookup(self, tokens: tuple[int, ...]) -> tuple[int, int]:
        """Return the attention hit and the joint hit, and lock the state there."""
        path = [self.root, *self._walk(tokens)]
        self.locked = next((node for node in reversed(path) if node in self.states), self.root)
        if self.locked is not self.root:
            # Only the state that is used: those above it on the path grow old.
            self.states.move_to_end(self.locked)
        return path[-1].end, self.locked.end

    def insert(self, tokens: tuple[int, ...]) -> None:
        """Hang the state after ``tokens`` into the tree, and the attention cache up to there."""
        node = [self.root, *self._walk(tokens)][-1]
        if node.end < len(tokens):
            leaf = _Node(tokens[node.end :], node, len(tokens))
            node.children[leaf.tokens[0]] = leaf
            node = leaf
        new = node not in self.states
        self.states[node] = None
        self.states.move_to_end(node)
        if new and self.per_path is not None:
            self._thin(node)
        self.locked = node

    def pin(self, count: int) -> None:
        """Take slots for a request that starts."""
        self.make_room(count)
        self.pinned = count

    def unpin(self) -> None:
        """Give its slots back."""
        self.pinned, self.locked = 0, self.root

    def make_room(self, count: int) -> None:
        """Evict the states that were used longest ago until ``count`` slots are free."""
        while self.slots is not None and self.slots < self.pinned + len(self.states) + count:
            victim = next((node for node in self.states if node is not self.locked), None)
            if victim is None:
                raise CheckpointValueError(
                    f"slots is {self.slots}; expected room for the {self.pinned + count} that a "
                    f"request needs beside the state it resumes after. Try slots="
                    f"{self.pinned + count + 1}."
                )
            del self.states[victim]
            # Attention cache of a leaf goes with its state; that of an inner node stays.
            if not victim.children and victim.parent is not None:
                del victim.parent.children[victim.tokens[0]]

    def positions(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        """Positions of the states on a path, ascending."""
        return tuple(node.end for node in self._walk(tokens, split=False) if node in self.states)

    def _thin(self, tail: _Node) -> None:
        """Drop the shallowest states above ``tail`` beyond the cap; forks and the lock stay."""
        holders: list[_Node] = []
        node: _Node | None = tail
        while node is not None:
            if node in self.states:
                holders.insert(0, node)
            node = node.parent
        beyond = len(holders) - (self.per_path or 0)
        for node in holders[:-1]:
            if beyond > 0 and node is not self.locked and len(node.children) == 1:
                del self.states[node]
                beyond -= 1

    def _walk(self, tokens: tuple[int, ...], split: bool = True) -> Iterator[_Node]:
        """Yield the nodes along ``tokens``, the last one split where they leave it half way."""
        node = self.root
        while node.end < len(tokens) and tokens[node.end] in node.children:
            child = node.children[tokens[node.end]]
            shared = shared_length(child.tokens, tokens[node.end : child.end])
            if shared < len(child.tokens):
                if not split:
                    return
                child = self._split(child, shared)
            yield child
            node = child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper one, which holds no state."""
        parent = node.parent or self.root
        upper = _Node(node.tokens[:at], parent, parent.end + at)
        parent.children[upper.tokens[0]] = upper
        node.tokens, node.parent = node.tokens[at:], upper
        upper.children[node.tokens[0]] = node
        return upper
