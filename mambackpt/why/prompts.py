"""Why did the second prompt not reuse the first one's? One verdict for two prompts."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from mambackpt.engine import Settings
from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_int
from mambackpt.replay import CAUSES as OF_TRACES
from mambackpt.replay import Lengths, Match, Sizes, Trace, get_rule, replay, trace_from_tokens
from mambackpt.why.kept import Left, checked, joint, leave, positions_in_words, reach

NEW, _, DROP, BELOW, EVICTED, BEYOND, NOWHERE = OF_TRACES
LOOKAHEAD = "lookahead"
CAUSES = (NEW, LOOKAHEAD, DROP, BELOW, EVICTED, BEYOND, NOWHERE)
Prompt: TypeAlias = "Sequence[int] | int"


@dataclass(frozen=True, slots=True)
class HitVerdict:
    """What a second prompt could have reused of a first one, what it does, and why not more.

    All in tokens. ``shared``: what both begin with. ``states``: where states were kept by the first
    (positions). ``attention``: how far the attention match reaches, which is what a router or a
    metric believes. ``joint``: what can be resumed. ``causes``: the second prompt's computed tokens
    by cause; together they are ``recomputed``. ``third``: what a third such prompt resumes after.
    ``best``: the deepest place within the match where a state could serve. ``chunks`` is what the
    first prompt takes, which finds nothing.
    """

    first: int
    second: int
    shared: int
    states: tuple[int, ...]
    attention: int
    best: int
    joint: int
    third: int
    chunks: int
    causes: Mapping[str, int]

    @property
    def recomputed(self) -> int:
        """Tokens that the second prompt computes."""
        return self.second - self.joint

    @property
    def lost(self) -> int:
        """Tokens that were there before and are computed again, the last one left out."""
        return self.recomputed - self.causes[NEW]

    @property
    def veto(self) -> str | None:
        """What took most of the lost tokens; None where nothing is lost."""
        vetoes = {cause: tokens for cause, tokens in self.causes.items() if cause != NEW and tokens}
        return max(vetoes, key=vetoes.__getitem__, default=None)

    def __str__(self) -> str:
        said = (
            f"{self.joint:,} of {self.shared:,} shared tokens can be resumed; attention matches "
            f"{self.attention:,}."
        )
        if self.veto is None:
            return said
        parts = [
            f"{cause}: {tokens:,}"
            for cause, tokens in self.causes.items()
            if cause != NEW and tokens
        ]
        kept = positions_in_words(self.states)
        return f"{said} States were kept after {kept} tokens. Lost, {', '.join(parts)}."


def explain_hit(
    first: Prompt,
    second: Prompt,
    settings: Settings | None = None,
    *,
    shared: int | None = None,
    rule: str | None = None,
) -> HitVerdict:
    """Say what a second prompt reuses of a first one, and what vetoes the rest.

    >>> from mambackpt import Settings, explain_hit
    >>> settings = Settings(mamba_block_size=528, hash_block_size=528, budget=2048, retention=None,
    ...                     checkpoint_alignment=None)
    >>> verdict = explain_hit(2200, 2200, settings, shared=1500)
    >>> verdict.states, verdict.attention, verdict.joint, verdict.veto
    ((1584, 2112), 1056, 0, 'state beyond the fork')

    Prompts are token lists, or their lengths with what they have ``shared``; the first is served to
    its end before the second comes, and nothing is evicted. The rules are the engine room's, those
    of vllm 0.33.0, with these ``settings``; with a ``rule`` they are a placement rule's and the
    replay's: states after its positions, cut to the hash unit, a lookup that loses a hash unit
    under the drop. Raises CheckpointValueError for lengths without ``shared``, for more shared than
    either has, and for settings with drafts.
    """
    settings = checked(settings or Settings())
    lengths, common = measured(first, second, shared)
    if rule is not None:
        return _by_rule(*lengths, common, settings, rule)
    return _by_engine(*lengths, common, settings)


def measured(first: Prompt, second: Prompt, shared: int | None) -> tuple[tuple[int, int], int]:
    """Return both lengths, and how many tokens the prompts begin with together; checked."""
    if isinstance(first, int) and isinstance(second, int):
        lengths = checked_int("first", first), checked_int("second", second)
        if shared is None:
            raise CheckpointValueError(
                f"first is {first} and second is {second} tokens, without shared; expected how "
                f"many tokens they begin with together. Try shared={min(lengths) // 2}."
            )
        common = checked_int("shared", shared, least=0)
        if common > min(lengths):
            raise CheckpointValueError(
                f"shared is {common} and the shorter prompt has {min(lengths)} tokens; expected no "
                f"more than that. Try shared={min(lengths)}."
            )
        return lengths, common
    if isinstance(first, int) or isinstance(second, int) or shared is not None:
        raise CheckpointTypeError(
            "one prompt is a length, or shared is given beside token lists; expected two token "
            "lists, or two lengths and shared. Try explain_hit(2200, 2200, shared=1500)."
        )
    if not len(first) or not len(second):
        raise CheckpointValueError(
            f"the prompts have {len(first)} and {len(second)} tokens; expected at least one each. "
            "Try [1, 2, 3]."
        )
    pairs = enumerate(zip(first, second, strict=False))
    shorter = min(len(first), len(second))
    return (len(first), len(second)), next((n for n, (a, b) in pairs if a != b), shorter)


def _by_engine(first: int, second: int, shared: int, settings: Settings) -> HitVerdict:
    left = leave(first, settings)
    sources = [(left, shared)]
    reached = reach(second, sources, settings)
    hit = joint(second, reached, sources, settings)
    again = leave(second, settings, start=hit, junction=reached if reached > hit else 0)
    sources = [(left, shared), (again, shared)]
    third = joint(second, reach(second, sources, settings), sources, settings)
    best = max(reached // settings.hit_grid * settings.hit_grid, hit)
    return HitVerdict(
        *(first, second, shared, tuple(sorted(left.states)), reached, best, hit, third),
        len(left.ends),
        _causes(second, shared, left, (reached, best, hit), settings),
    )


def _causes(
    second: int, shared: int, left: Left, found: tuple[int, int, int], settings: Settings
) -> dict[str, int]:
    """The computed tokens of the second prompt by cause: ``found`` is match, best place, hit."""
    reached, best, hit = found
    possible = min(shared, second - 1)
    plain = replace(settings, drop_eagle_block=False, num_hash_lookahead_tokens=0)
    freely = [(leave(left.ends[-1], plain), shared)]
    fully = max(reach(second, freely, plain), reached)  # without drop and lookahead
    margin = LOOKAHEAD if settings.num_hash_lookahead_tokens else DROP
    if any(reached < state <= possible for state in left.states):
        why = margin if fully > reached else BELOW
    else:
        why = BEYOND if max(left.states, default=0) > possible else NOWHERE
    causes = dict.fromkeys(CAUSES, 0)
    causes[NEW], causes[BELOW] = second - possible, possible - fully + reached - best
    causes[margin] += fully - reached
    causes[why] += best - hit
    return causes


def shaped_trace(first: int, second: int, shared: int, grain: int) -> Trace:
    """Return three prompts as a trace: the first, the second, and a third like the second."""
    tails = ((first, 1), (second, 2), (second, 3))
    return trace_from_tokens(
        [[0] * shared + [own] * (length - shared) for length, own in tails], grain=grain
    )


def _by_rule(first: int, second: int, shared: int, settings: Settings, rule: str) -> HitVerdict:
    g = settings.geometry
    margin = min(g.H, settings.attention_block) * g.drop_eagle_block
    trace = shaped_trace(first, second, shared, g.H)
    sizes = Sizes(g.M, settings.budget)
    chosen = get_rule(rule, overlaps=trace.ceiling, grain=trace.grain)
    run = replay(trace, chosen, block=g.M, budget=settings.budget, lookup_margin=margin)
    positions = chosen.place(Lengths(first), Match(), sizes)
    states = {at // g.H * g.H for at in _flat(positions) if at // g.H * g.H > 0 and at <= first}
    reached, hit = int(run.attention[1]), int(run.reused[1])
    causes = dict.fromkeys(CAUSES, 0)
    possible = min(shared, second - 1)
    whole = int(trace.ceiling[1])
    on_blocks = all(state % g.M == 0 for state in states)
    inside = max(reached // g.M * g.M, hit) if on_blocks else reached
    causes[NEW], causes[DROP] = second - possible, whole - reached
    causes[BELOW] = possible - whole + reached - inside
    if chosen.states:
        why = BEYOND if any(state > reached for state in states) else NOWHERE
        why = DROP if any(reached < state <= whole for state in states) else why
        causes[why] += inside - hit
    return HitVerdict(
        *(first, second, shared, tuple(sorted(states)), reached, inside, hit, int(run.reused[2])),
        len(cut(first, states, settings.budget)),
        causes,
    )


def _flat(positions: Sequence[Any]) -> list[int]:
    flat: list[int] = []
    for position in positions:
        if isinstance(position, tuple):
            first, last, step = position
            flat += range(int(first), int(last) + 1, int(step))
        else:
            flat.append(int(position))
    return flat


def cut(prompt: int, states: Sequence[int] | set[int], budget: int) -> list[int]:
    """Return the chunks' ends of a prefill that must end a step at every state.

    >>> cut(2200, [1056, 2112], 2048)
    [1056, 2112, 2200]
    """
    ends, at = [], 0
    for stop in [*sorted(states), prompt]:
        while at < min(stop, prompt):
            at = min(at + budget, stop, prompt)
            ends.append(at)
    return ends
