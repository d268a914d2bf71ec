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
        self.claims: dict[int, Claim] = {}  # by key, the block's first key first
        self.index: KeyIndex | None = None  # where its keys are entered

    @property
    def first_key(self) -> int | None:
        """The oldest of its keys, which stands for the block where only one is asked for."""
        return next(iter(self.claims), None)

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

    def entries(self) -> Iterator[tuple[Block, int]]:
        """Yield every block with every key that leads to it; of a key, the first one first."""
        for key, found in self._blocks.items():
            for block in found:
                yield block, key

    def __iter__(self) -> Iterator[tuple[Block, Claim]]:
        for block, key in self.entries():
            yield block, block.claims[key]


class Pool:
    """Blocks of all groups in one free list; block 0 is the null block.

    The front of the list holds blocks without a key, the last call's first; then come the blocks
    never used, by number; at the back those with keys, least recently let go first.
    ``size`` counts usable blocks; None never reuses a block, so nothing is evicted.
    """

    def __init__(self, size: int | None) -> None:
        self.size = size
        self.null = Block(0)
        self._front: list[Block] = []  # the next one to take is the last
        self._fresh = 1
        self._back: OrderedDict[Block, None] = OrderedDict()

    @property
    def free(self) -> Iterator[int]:
        """The numbers of the free blocks, the next one to take first; size None has no list."""
        yield from (block.id for block in reversed(self._front))
        yield from range(self._fresh, (self.size or 0) + 1)
        yield from (block.id for block in self._back)

    def has(self, blocks: int) -> bool:
        """Return whether so many blocks can be taken."""
        if self.size is None:
            return True
        return blocks <= len(self._front) + self.size + 1 - self._fresh + len(self._back)

    def take(self, evict: Callable[[Block], None]) -> Block:
        """Return a block for exclusive use; ``evict`` is told of one that was findable."""
        if self._front:
            block = self._front.pop()
        elif self.size is None or self._fresh <= self.size:
            block = Block(self._fresh)
            self._fresh += 1
        else:
            block, _ = self._back.popitem(last=False)
            evict(block)
        block.refs = 1
        return block

    def share(self, block: Block) -> None:
        """Refer to a block once more."""
        if not block.refs:
            self._back.pop(block, None)
        block.refs += 1

    def release(self, blocks: Iterable[Block]) -> list[Block]:
        """Refer to these blocks once less, in one call; return those that nobody holds any more.

        What loses its last reference is taken again in this order: at once without a key, last of
        all with one.
        """
        let_go = []
        for block in blocks:
            block.refs -= 1
            if not block.refs:
                let_go.append(block)
        if self.size is not None:
            self._front += [block for block in reversed(let_go) if not block.claims]
            self._back.update((block, None) for block in let_go if block.claims)
        return let_go
