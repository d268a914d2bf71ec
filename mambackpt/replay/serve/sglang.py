"""SGLang's cache of a model with recurrent layers, one request at a time.

The rule is that of release 0.5.23 with pages of one token, in our own words, held to the running
engine by `mambackpt.conformance`. Letters and words:

* L: tokens of the prompt. [s, e): an extend, what one step of at most ``budget`` tokens prefills.
* h: the joint hit, where the request resumes: the deepest state within the attention hit.
* The branching point is the attention hit cut to the chunk grid, where that lies beyond h.
* A node is a stretch of tokens in the tree of all that is cached, from its parent's end to its own.
  It always has attention cache, and may hold the state after its last token. New nodes come with
  states only, so the tree is as deep as the newest state of each path. Where a lookup leaves a node
  half way, the node is split there.
* A slot is room for one state. A running request pins some, the tree's states fill the others.
* The lock is on the node whose state the request was copied from or handed over last.
* Ids: what the tree compares. Tokens here, blocks of ``grain`` tokens in replays of traces, which
  take a position between two block ends at the earlier one.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import lcm
from typing import Literal

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.replay.rules import SGLANG_STRATEGIES, sglang_extends
from mambackpt.replay.serve.requests import Served, TokenRequest, shared_length

Strategy = Literal["extra_buffer", "no_buffer"]
Ids = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The server's settings, as `serve` explains them."""

    chunk: int = 64
    budget: int = 8192
    interval: int = 256
    strategy: Strategy = "extra_buffer"
    per_path: int | None = None
    slots: int | None = None

    def __post_init__(self) -> None:
        for name in ("chunk", "budget", "interval"):
            checked_int(name, getattr(self, name))
        for name in ("per_path", "slots"):
            if getattr(self, name) is not None:
                checked_int(name, getattr(self, name), unit="states")
        checked_choice("strategy", self.strategy, SGLANG_STRATEGIES)

    @property
    def buffered(self) -> bool:
        """Whether a request has slots to track states in while it runs."""
        return self.strategy == "extra_buffer"

    @property
    def pins(self) -> int:
        """Slots of a running request: its own, and two to write tracked states to in turn."""
        return 3 if self.buffered else 1

    @property
    def grid(self) -> int:
        """Tokens between the states that may be tracked while tokens are decoded."""
        return lcm(self.chunk, self.interval) if self.buffered else 1


def serve(
    requests: Sequence[TokenRequest],
    *,
    chunk: int = 64,
    budget: int = 8192,
    interval: int = 256,
    strategy: Strategy = "extra_buffer",
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
    that the lookup names, whether or not an extend can keep its state; a state that is there
    already is made again. Raises CheckpointValueError for settings that do not fit, and where a
    request finds too few slots.
    """
    settings = CacheSettings(chunk, budget, interval, strategy, per_path, slots)
    tree = Tree(settings)
    answers = []
    for request in requests:
        tokens, L = (*request.tokens, *request.outputs), len(request.tokens)
        # The last token out is not computed from, so nothing of it is cached.
        answers.append(serve_ids(tree, settings, tokens, L, L + max(len(request.outputs), 1) - 1))
    return answers


def serve_ids(
    tree: "Tree", settings: CacheSettings, ids: Ids, L: int, end: int, grain: int = 1
) -> Served:
    """Serve one request of L tokens of prompt whose cached tokens reach to ``end``."""
    # The last prompt token is always computed again: its logits are needed.
    found, resumed = tree.lookup(ids[: (L - 1) // grain])
    attention, h = found * grain, resumed * grain
    tree.pin(settings.pins)
    branch = attention // settings.chunk * settings.chunk
    created: list[int] = []
    # What a request gives its slot up with when it is done: the newest state tracked while tokens
    # were decoded, or that of its end.
    last = end // settings.grid * settings.grid
    last = last if last > L or not settings.buffered else 0
    for position, e in sglang_extends(
        L, h, branch, settings.chunk, settings.budget, settings.buffered
    ):
        depth = position // grain
        if depth and (e < L or end > L):
            tree.make_room(1)
            tree.insert(ids[:depth])
            created.append(depth * grain)
        elif e == L == end:  # done: this state's slot itself goes to the tree
            last = position
    if last // grain:
        tree.insert(ids[: last // grain])
        created.append(last // grain * grain)
    tree.unpin()
    return Served(
        attention,
        h,
        branch if branch > h else None,
        tuple(sorted({*created})),
        tuple(depth * grain for depth in tree.depths(ids)),
    )


def too_few_slots(slots: int, needed: int) -> CheckpointValueError:
    """The error of a request that cannot run."""
    return CheckpointValueError(
        f"slots is {slots}; expected room for the {needed} that a request needs beside the state "
        f"it resumes after. Try slots={needed + 1}."
    )


class _Node:
    """Ids from the parent's end to ``end``."""

    __slots__ = ("children", "end", "ids", "parent")

    def __init__(self, ids: Ids, parent: "_Node | None", end: int) -> None:
        self.ids, self.parent, self.end = ids, parent, end
        self.children: dict[int, _Node] = {}  # by their first id


class Tree:
    """Attention cache and states of all prefixes, with a limited number of states."""

    def __init__(self, settings: CacheSettings) -> None:
        self.per_path, self.slots, self.pinned = settings.per_path, settings.slots, 0
        self.root = self.locked = _Node((), None, 0)
        self.states: OrderedDict[_Node, None] = OrderedDict()  # whose state was used last, last
        self.evicted = 0

    def lookup(self, ids: Ids) -> tuple[int, int]:
        """Return the depths of the attention hit and the joint hit, and lock the state there."""
        path = [self.root, *self._walk(ids)]
        self.locked = next((node for node in reversed(path) if node in self.states), self.root)
        if self.locked is not self.root:
            # Only the state that is used: those above it on the path grow old.
            self.states.move_to_end(self.locked)
        return path[-1].end, self.locked.end

    def insert(self, ids: Ids) -> None:
        """Hang the state after ``ids`` into the tree, and the attention cache up to there."""
        node = [self.root, *self._walk(ids)][-1]
        if node.end < len(ids):
            leaf = _Node(ids[node.end :], node, len(ids))
            node.children[leaf.ids[0]] = leaf
            node = leaf
        new = node not in self.states
        self.states[node] = None
        self.states.move_to_end(node)
        if new and self.per_path is not None:
            self._thin(node, self.per_path)
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
                raise too_few_slots(self.slots, self.pinned + count)
            del self.states[victim]
            self.evicted += 1
            # Attention cache of a leaf goes with its state; that of an inner node stays.
            if not victim.children and victim.parent is not None:
                del victim.parent.children[victim.ids[0]]

    def depths(self, ids: Ids) -> list[int]:
        """Depths of the states on a path, ascending."""
        return [node.end for node in self._walk(ids, split=False) if node in self.states]

    def _thin(self, tail: _Node, most: int) -> None:
        """Drop the shallowest states above ``tail`` beyond the cap; forks and the lock stay."""
        holders: list[_Node] = []
        node: _Node | None = tail
        while node is not None:
            if node in self.states:
                holders.append(node)
            node = node.parent
        beyond = len(holders) - most
        for node in holders[:0:-1]:
            if beyond > 0 and node is not self.locked and len(node.children) == 1:
                del self.states[node]
                self.evicted += 1
                beyond -= 1

    def _walk(self, ids: Ids, split: bool = True) -> Iterator[_Node]:
        """Yield the nodes along ``ids``, the last one split where they leave it half way."""
        node = self.root
        while node.end < len(ids) and ids[node.end] in node.children:
            child = node.children[ids[node.end]]
            shared = shared_length(child.ids, ids[node.end : child.end])
            if shared < len(child.ids):
                if not split:
                    return
                child = self._split(child, shared)
            yield child
            node = child

    def _split(self, node: _Node, at: int) -> _Node:
        """Cut a node in two and return the upper one, which holds no state."""
        parent = node.parent or self.root
        upper = _Node(node.ids[:at], parent, parent.end + at)
        parent.children[upper.ids[0]] = upper
        node.ids, node.parent = node.ids[at:], upper
        upper.children[node.ids[0]] = node
        return upper
