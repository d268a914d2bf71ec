"""What one prompt leaves in the cache, and how far the next one gets, in closed form.

The engine room runs the scheduler's steps and stores every key; here the same rules are read off as
positions, for requests that come one at a time into a pool without evictions. M Mamba block, H hash
unit, U grid of hits, b attention block: all in tokens.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from mambackpt.engine import Settings, joint_hit, replay_boundaries
from mambackpt.errors import CheckpointValueError


@dataclass(frozen=True, slots=True)
class Left:
    """What a prompt leaves: keyed states, whole attention blocks, and the key of its last unit.

    ``states`` are positions, ``whole`` is where the last whole attention block ends, ``tail`` the
    prompt's last hash unit with a key inside a block (0: none), ``ends`` are the chunks' ends.
    """

    states: frozenset[int]
    whole: int
    tail: int
    ends: tuple[int, ...]


Sources: TypeAlias = Sequence[tuple[Left, int]]  # with the tokens that a request shares with each


def checked(settings: Settings) -> Settings:
    """Return the settings if the closed form is theirs; raise CheckpointValueError if not."""
    if settings.speculative_tokens or settings.budgets:
        given = "speculative_tokens" if settings.speculative_tokens else "budgets"
        raise CheckpointValueError(
            f"{given} is {getattr(settings, given)}; expected requests that are served one at a "
            f"time, without drafts and with one budget. Try the drop alone: drop_eagle_block=True."
        )
    return settings


def leave(prompt: int, settings: Settings, *, start: int = 0, junction: int = 0) -> Left:
    """Return what a prompt of so many tokens leaves when it resumes after ``start``.

    >>> left = leave(2200, Settings(mamba_block_size=528, hash_block_size=528, budget=2048,
    ...                             checkpoint_alignment=None, retention=None))
    >>> sorted(left.states), left.whole, left.ends
    ([1584, 2112], 2112, (1584, 2112, 2200))

    ``junction`` is where a prefix seen before ends (0: nothing to gain). Raises
    CheckpointValueError where no step reaches a boundary. The rules are those of the engine room's
    `recurrent.py` and `attention.py`.
    """
    g, splitter = settings.geometry, settings.splitter
    M, H, U, lookahead = g.M, g.H, g.U, g.num_hash_lookahead_tokens
    hashed = prompt - lookahead
    columns = _kept_columns(prompt, junction, settings)
    asked = [splitter.variant.position(prompt, u, g.drop_eagle_block, lookahead) for u in (U, H)]
    states: set[int] = set()
    ends: list[int] = []
    cached = start // M
    while start < prompt:
        offered = min(settings.budget, prompt - start)
        end = splitter.end(start, offered, prompt=prompt, num_tokens=prompt, junction=junction)
        if end == start:
            raise CheckpointValueError(
                f"budget is {settings.budget} with a block of {M}: from token {start} no step "
                f"reaches a boundary; expected progress. Try a budget of at least {M}."
            )
        query = splitter.query(start, end, prompt, end)
        findable = _cacheable(end, M, settings)
        there = {(start - 1) // M if start else -1, -(-end // M) - 1}  # columns that are not null
        full = min(findable, hashed) // M
        states |= {
            (column + 1) * M
            for column in there
            if cached <= column < full
            and (column in columns or _keeps_interval(column, settings))
            and splitter.variant.keys_block(column, query)
        }
        cached = max(cached, full)
        final = settings.retention != 0 or end >= prompt
        if end - start > H and final and splitter.variant.writes_inside(query):
            at = query.position
            retained = at % M == 0 and _keeps_interval(at // M - 1, settings)
            if (at == asked[0] or retained or at == junction) and at <= hashed:
                states.add(at)
        elif 0 < findable <= hashed and findable % H == 0:
            meant = settings.keeps_junctions and start < findable == junction <= prompt
            if (meant or findable == asked[1]) and -(-findable // M) - 1 in there:
                states.add(findable)
        ends.append(end)
        start = end
    return Left(frozenset(states), *_attention(prompt, settings), tuple(ends))


def reach(length: int, sources: Sources, settings: Settings) -> int:
    """Return how far a prompt's attention match reaches: what a router or a metric believes in.

    >>> settings = Settings(mamba_block_size=528, hash_block_size=528)
    >>> reach(2200, [(leave(2200, settings), 1500)], settings)
    1056
    """
    g, b = settings.geometry, settings.attention_block
    U, lookahead, drop = g.U, g.num_hash_lookahead_tokens, g.drop_eagle_block
    unit = g.H if b > U else b
    bound = min(length - 1 + unit * drop, (length - lookahead) // g.H * g.H)
    runs = [min(left.whole, max(shared - lookahead, 0) // b * b) for left, shared in sources]
    tokens = whole = min(max(runs, default=0), bound // b * b)
    if b > U:
        inside = range(min(whole + b - U, bound // U * U), whole, -U)
        tails = [left.tail for left, shared in sources if left.tail + lookahead <= shared]
        tokens = max([tail for tail in tails if tail in inside], default=whole)
    if drop and tokens:
        tokens -= min(U, b)
    return tokens // U * U


def joint(length: int, reached: int, sources: Sources, settings: Settings) -> int:
    """Return the deepest position at or before the attention match that has a state: the hit."""
    lookahead, grid = settings.geometry.num_hash_lookahead_tokens, settings.hit_grid
    bound = min(reached, length - lookahead)
    found = {n for left, shared in sources for n in left.states if n + lookahead <= shared}
    return joint_hit([range(grid, bound + 1, grid), found])


def _attention(prompt: int, settings: Settings) -> tuple[int, int]:
    """Where the last whole attention block ends, and the key of the prompt's last hash unit."""
    g, b = settings.geometry, settings.attention_block
    end = _cacheable(prompt, b, settings)
    hashed = (prompt - g.num_hash_lookahead_tokens) // g.H * g.H
    whole = max(min(end, hashed), 0) // b * b
    last = min((prompt if g.drop_eagle_block else prompt - 1) // g.H * g.H, hashed)
    keyed = b != g.H and 0 < last <= end and last % b
    return whole, last if keyed else 0


def _cacheable(end: int, b: int, settings: Settings) -> int:
    g = settings.geometry
    if g.U < g.M:
        return end
    whole = end // settings.scheduler_block * settings.scheduler_block
    return min(end, whole + b) if g.drop_eagle_block and whole else whole


def _kept_columns(prompt: int, junction: int, settings: Settings) -> set[int]:
    """The columns whose full blocks every retention keeps."""
    g = settings.geometry
    kept = list(replay_boundaries(prompt, settings.scheduler_block, g.drop_eagle_block))
    if junction:
        kept += [junction, junction - g.M] if g.drop_eagle_block else [junction]
    return {boundary // g.U * g.U // g.M - 1 for boundary in kept}


def _keeps_interval(column: int, settings: Settings) -> bool:
    R, M = settings.retention, settings.mamba_block_size
    return R is None or (R > 0 and (column + 1) % (R // M) == 0)


def positions_in_words(positions: Iterable[int]) -> str:
    """Return positions as a list in words.

    >>> positions_in_words([1584, 2112]), positions_in_words([])
    ('1,584 and 2,112', 'none')
    """
    said = [f"{position:,}" for position in sorted(positions)]
    if len(said) > 8:
        said = [*said[:3], f"{len(said) - 6} more", *said[-3:]]
    return " and ".join(filter(None, [", ".join(said[:-1]), *said[-1:]])) or "none"
