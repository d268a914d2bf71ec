"""The staircase: what is computed again over the length of a prompt, and of what two share."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from mambackpt.engine import Settings
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.why.prompts import HitVerdict, explain_hit


@dataclass(frozen=True, slots=True)
class Stairs:
    """What happens at each of some lengths, in tokens: one verdict per length.

    ``lengths`` are of a prompt that is sent again, or of what two prompts share.
    """

    lengths: tuple[int, ...]
    verdicts: tuple[HitVerdict, ...]

    @property
    def computed(self) -> list[int]:
        """Tokens that were there before and are computed again, the last one among them."""
        pairs = zip(self.lengths, self.verdicts, strict=True)
        return [length - verdict.joint for length, verdict in pairs]

    @property
    def computed_by_a_third(self) -> list[int]:
        """The same for a third such prompt."""
        pairs = zip(self.lengths, self.verdicts, strict=True)
        return [length - verdict.third for length, verdict in pairs]

    @property
    def at_the_ceiling(self) -> list[int]:
        """The same if there were a state wherever a hit may land within the attention match."""
        pairs = zip(self.lengths, self.verdicts, strict=True)
        return [length - verdict.best for length, verdict in pairs]

    def cliffs(self) -> list[tuple[int, int, int]]:
        """(length, computed there, computed with one more token) wherever that falls."""
        steps = dict(zip(self.lengths, self.computed, strict=True))
        return [
            (length, computed, steps[length + 1])
            for length, computed in steps.items()
            if steps.get(length + 1, computed + 1) < computed
        ]


def resend_stairs(settings: Settings, longest: int, *, shortest: int = 1) -> Stairs:
    """Return the stairs of prompts of ``shortest`` to ``longest`` tokens that are sent again.

    >>> stairs = resend_stairs(Settings(mamba_block_size=64, hash_block_size=64), 200)
    >>> stairs.cliffs()
    [(64, 64, 1), (128, 64, 1), (192, 64, 1)]

    At every multiple of the hash unit and on both sides of it, where alone it can fall. Tokens.
    """
    lengths = _corners(settings, longest, shortest)
    verdicts = tuple(explain_hit(n, n, settings, shared=n) for n in lengths)
    return Stairs(lengths, verdicts)


def fork_stairs(settings: Settings, longest: int, own: int) -> Stairs:
    """Return the stairs of two prompts that share up to ``longest`` tokens and then go on apart.

    >>> stairs = fork_stairs(Settings(mamba_block_size=64, hash_block_size=64), 130, own=100)
    >>> stairs.lengths[-2:], stairs.computed[-2:], stairs.computed_by_a_third[-2:]
    ((129, 130), [129, 130], [1, 2])

    ``own``: tokens of each after the fork.
    """
    own = checked_int("own", own)
    lengths = _corners(settings, longest)
    verdicts = tuple(explain_hit(n + own, n + own, settings, shared=n) for n in lengths)
    return Stairs(lengths, verdicts)


def _corners(settings: Settings, longest: int, shortest: int = 1) -> tuple[int, ...]:
    H = settings.hash_block_size
    longest, shortest = checked_int("longest", longest), checked_int("shortest", shortest)
    if (longest - shortest) // H > 5000:
        raise CheckpointValueError(
            f"longest is {longest} with a hash unit of {H}; expected at most 5,000 units. "
            f"Try longest={5000 * H}."
        )
    units = range(shortest // H * H, longest + 1, H)
    corners = {n + more for n in units for more in (-1, 0, 1)} | {shortest, longest}
    return tuple(sorted(n for n in corners if shortest <= n <= longest))


def with_drop(settings: Settings) -> Settings:
    """Return the same settings under speculative decoding that drops a block.

    >>> with_drop(Settings()).drop_eagle_block
    True
    """
    return replace(settings, drop_eagle_block=True)


def lost_to_margin(grid: int, margin: int) -> Sequence[int]:
    """Return the lengths, of one period, whose deepest state a lookup's margin hides.

    >>> lost = lost_to_margin(2048, 448)
    >>> len(lost), 100 * len(lost) / 2048
    (448, 21.875)

    States lie at every multiple of ``grid`` before the last token; a lookup recomputes the last
    ``margin`` tokens of what it may match. Tokens; each is counted from the last state on, that one
    token past it is 0.
    """
    checked_int("grid", grid)
    checked_int("margin", margin, least=0)
    start = -(-margin // grid) * grid  # a multiple with room for the margin before it
    lost = []
    for length in range(start + 1, start + grid + 1):
        deepest = (length - 1) // grid * grid
        if deepest and deepest > length - 1 - margin:
            lost.append(length - 1 - deepest)
    return lost
