"""Blocks, the pool they come from, the keys that find them, and what they really hold."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

from mambackpt.engine.recurrence import State

# A history digest is a polynomial of its tokens modulo a Mersenne prime: it grows token by token.
_MODULUS = (1 << 61) - 1
_FACTOR = 0x1B873593CC9E2D51
NO_TOKENS = 0x5F3759DF


def extend(digest: int, token: int) -> int:
    """Return the digest of a history with one more token."""
    return (digest * _FACTOR + token + 1) % _MODULUS


def digests(tokens: Iterable[int], start: int = NO_TOKENS) -> list[int]:
    """Return the digests of all prefixes: entry n stands for the first n tokens.

    >>> digests([1, 2])[2] == digests([1, 2, 3])[2] != digests([2, 1])[2]
    True
    """
    return list(accumulate(tokens, extend, initial=start))


class Content(NamedTuple):
    """What a block really holds: how many tokens were applied, which, and the numbers."""

    tokens: int
    digest: int
    state: State | None = None


class Claim(NamedTuple):
    """What a key promises: the state after ``position`` tokens with this digest."""

    position: int
    digest: int


class Block:
    """A slot of the pool. Its content outlives its owner, as bytes do."""

    __slots__ = ("claims", "content", "id", "index", "refs")

    def __init__(self, number: int) -> None:
        self.id = number
        self.refs = 0
        self.content: Content | None = None
        self.claims: dict[int, Claim] = {}  # by key
        self.index: KeyIndex | None = None  # where its keys are entered

    def __repr__(self) -> str:
        return f"Block({self.id})"


class KeyIndex:
    """The keys of one cache group; under one key, the block published first is found."""

    def __init__(self, group: int) -> None:
        self.group = group
        self._blocks: dict[int, dict[Block, None]] = {}

    def find(self, key: int) -> Block | None:
        """Return the block published first under this key, if there is one."""
        found = self._blocks.get(key)
        return next(iter(found)) if found else None

    def enter(self, block: Block, key: int, claim: Claim) -> None:
        """Make the block findable."""
        block.index = self
        block.claims[key] = claim
        self._blocks.setdefault(key, {})[block] = None

    def remove(self, block: Block, key: int) -> Claim:
        """Take one key from the block."""
        found = self._blocks[key]
        del found[block]
        if not found:
            del self._blocks[key]
        return block.claims.pop(key)

    def __iter__(self) -> Iterator[tuple[Block, Claim]]:
        for key, found in self._blocks.items():
            for block in found:
                yield block, block.claims[key]


class Pool:
    """Blocks of all groups in one free list, least recently freed first; block 0 is the null block.

    ``size`` counts usable blocks; None never reuses a block, so nothing is evicted.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.null = Block(0)
        self._fresh = 1  # never used so far: these precede every freed block
        self._free: OrderedDict[Block, None] = OrderedDict()

    def has(self, blocks: int) -> bool:
        """Return whether so many blocks can be taken."""
        return self.size is None or blocks <= self.size + 1 - self._fresh + len(self._free)

    def take(self, evict: Callable[[Block], None]) -> Block:
        """Return a block for exclusive use; ``evict`` is told of one that was findable."""
        if self.size is None or self._fresh <= self.size:
            block = Block(self._fresh)
            self._fresh += 1
        else:
            block, _ = self._free.popitem(last=False)
            if block.claims:
                evict(block)
        block.refs = 1
        return block

    def share(self, block: Block) -> None:
        """Refer to a block once more."""
        if not block.refs:
            self._free.pop(block, None)
        block.refs += 1

    def release(self, block: Block) -> bool:
        """Refer to a block once less; return whether nobody does any more."""
        block.refs -= 1
        if block.refs == 0 and self.size is not None:
            self._free[block] = None
        return block.refs == 0
