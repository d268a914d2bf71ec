"""Why was it not reused? Every token that a replay computed, by what vetoed its reuse.

What a router or a metric believes is the attention match; what can be resumed is the joint hit.
Between the two, and around them, every computed token of a request has one cause, so the causes of
a request add up to what it computed:

    new              never seen before, in a block not full yet, or the last token of a resend
    attention evicted   its attention blocks are gone
    drop             speculative decoding computes the end of a match again
    below a block    the match ends inside a block, and states lie at block ends only
    state evicted    its state was written, and is gone
    state beyond the fork   earlier requests kept states on this path, but only deeper
    no state there   nobody ever kept one

`explain_misses_plainly` is the truth, request by request; `explain_misses` finds the same faster.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Unpack

import numpy as np

from mambackpt.replay.case import Case, Options, depths_of
from mambackpt.replay.plain import expand_rows
from mambackpt.replay.reads import placed_by
from mambackpt.replay.result import Replay
from mambackpt.replay.rules import Lengths, Match, Place, Rule
from mambackpt.replay.run import replay
from mambackpt.replay.trace import Int64Array, Trace
from mambackpt.replay.unlimited import deepest_kept

NEW, ATTENTION, DROP, BELOW, EVICTED, BEYOND, NOWHERE = (
    "new",
    "attention evicted",
    "drop",
    "below a block",
    "state evicted",
    "state beyond the fork",
    "no state there",
)
CAUSES = (NEW, ATTENTION, DROP, BELOW, EVICTED, BEYOND, NOWHERE)
VETOES = CAUSES[1:]  # what keeps a token from being reused that was there before
BANDS = ("nothing", "to 25 %", "25 to 50 %", "50 to 75 %", "75 to 90 %", "90 to 100 %", "all")
_BOUNDS = (25, 50, 75, 90, 100)  # percent of what could be reused


@dataclass(frozen=True, eq=False)
class Missed:
    """The replay of a trace, and for each request its computed tokens by their cause.

    ``tokens[cause]`` has one entry per request, int64; together they are what it computed.
    """

    replay: Replay
    tokens: dict[str, Int64Array]

    @property
    def wasted(self) -> Int64Array:
        """Tokens of each request that were there before and computed again."""
        return self.replay.ceiling - self.replay.reused

    @cached_property
    def veto(self) -> Int64Array:
        """The number in `VETOES` of what took most of each request's tokens; -1 for nothing."""
        table = np.array([self.tokens[cause] for cause in VETOES])
        most: Int64Array = np.where(table.any(axis=0), table.argmax(axis=0), -1)
        return most

    def totals(self) -> list[dict[str, Any]]:
        """Per cause: tokens, percent of all prompt tokens, and the requests it took most of."""
        prompt = int(self.replay.prompt.sum())
        return [
            {
                "cause": cause,
                "tokens": (tokens := int(self.tokens[cause].sum())),
                "percent_of_prompt": 100 * tokens / prompt,
                "requests": int((self.veto == VETOES.index(cause)).sum()) if cause != NEW else None,
            }
            for cause in CAUSES
        ]

    def bands(self) -> list[dict[str, Any]]:
        """Wasted tokens by how much of what could be reused was: requests, tokens, their shares.

        A request belongs to the band of its reused percent of its ceiling; those that could not
        reuse anything are in none.
        """
        could = self.replay.ceiling > 0
        reused, waste = self.replay.reused[could], self.wasted[could]
        share = 100 * reused / self.replay.ceiling[could]
        band = np.where(reused > 0, np.searchsorted(_BOUNDS, share, side="right") + 1, 0)
        whole = max(int(waste.sum()), 1)
        return [
            {
                "reused": name,
                "requests": int((band == number).sum()),
                "wasted_tokens": (wasted := int(waste[band == number].sum())),
                "percent_of_waste": 100 * wasted / whole,
            }
            for number, name in enumerate(BANDS)
        ]

    def rows(self) -> list[dict[str, Any]]:
        """One row per request: what was believed, what was resumed, and the causes of the rest."""
        run = self.replay
        columns: dict[str, Sequence[Any]] = {
            "request": range(len(run)),
            "prompt": run.prompt.tolist(),
            "could_reuse": run.ceiling.tolist(),
            "attention_match": run.attention.tolist(),
            "joint_hit": run.reused.tolist(),
            "computed": (run.prompt - run.reused).tolist(),
            **{cause.replace(" ", "_"): self.tokens[cause].tolist() for cause in CAUSES},
            "vetoed_by": ["" if at < 0 else VETOES[at] for at in self.veto.tolist()],
        }
        return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]


def explain_misses(
    trace: Trace, rule: str | Rule | Place, *, block: int, **options: Unpack[Options]
) -> Missed:
    """Replay a trace and say of every computed token why it was not reused.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([[7] * 40, [7] * 20 + [8] * 20], grain=4)
    >>> missed = explain_misses(trace, "last", block=16)
    >>> {cause: row.tolist() for cause, row in missed.tokens.items() if row.any()}
    {'new': [40, 20], 'below a block': [0, 4], 'state beyond the fork': [0, 16]}

    Arguments and errors are those of `replay`.
    """
    case = Case.of(trace, rule, block=block, **options)
    run = replay(trace, case.rule, block=block, **options)
    trace = case.trace  # in blocks that the block is a multiple of
    attention, reused, g = run.attention, run.reused, trace.grain
    if not case.rule.states:
        return _sum_up(case, run, attention, attention, np.zeros(len(trace), bool))
    placed = [
        place
        for part in case.rule.parts or (case.rule,)
        for place in placed_by(part, case, attention, reused)
    ]
    nothing = (reused[:0], reused[:0])
    owners, depths = map(np.concatenate, zip(nothing, *placed, strict=True))
    grid = block if not (depths * g % block).any() else g  # of all states
    inside = np.maximum(attention // grid * grid, reused)
    ever, beyond = reused.copy(), np.zeros(len(trace), bool)
    missing = np.flatnonzero(inside > reused)
    if len(missing):
        writer = np.full(trace.size, len(trace), np.int64)
        last_first = np.argsort(owners, kind="stable")[::-1]
        blocks = trace.find_blocks(owners, depths)[last_first]
        writer[blocks] = owners[last_first]  # the earliest stays, as it is entered last
        ever = np.maximum(reused, _deepest_before(trace, writer, missing, inside) * g)
        first = _first_beyond(trace, owners, depths)
        beyond[missing] = first[trace.find_blocks(missing, attention[missing] // g)] < missing
    return _sum_up(case, run, inside, ever, beyond)


def _deepest_before(
    trace: Trace, writer: Int64Array, missing: Int64Array, inside: Int64Array
) -> Int64Array:
    """Blocks up to the deepest state that was ever written at or before ``inside``."""
    depth = inside[missing] // trace.grain
    run = trace.run_at(missing, depth)
    end = trace.first[run] + depth - trace.depth[run]
    by_end = np.argsort(end, kind="stable")
    return deepest_kept(trace, writer, missing[by_end], run[by_end], end[by_end])


def _first_beyond(trace: Trace, owners: Int64Array, depths: Int64Array) -> Int64Array:
    """For each block, the first request that placed a state deeper on a path through it."""
    R, paths = len(trace), trace.paths
    deepest = np.zeros(R, np.int64)
    np.maximum.at(deepest, owners, depths)
    first = [R] * trace.size
    base, start = paths.base, paths.first
    for i, most in zip(np.flatnonzero(deepest > 1).tolist(), deepest[deepest > 1].tolist()):  # noqa: B905
        run, lo = paths.row[i + 1] - 1, paths.row[i]
        while base[run] >= most - 1:
            run -= 1
        end = start[run] + most - 1 - base[run]
        while run >= lo:
            begin = start[run]
            if first[end - 1] < R:
                break  # and so are all before it
            known = first[begin] < R
            if known:
                begin = first.index(R, begin, end)
            first[begin:end] = [i] * (end - begin)
            if known:
                break
            run -= 1
            end = start[run] + paths.count[run] if run >= lo else 0
    return np.array(first, np.int64)


def _sum_up(case: Case, run: Replay, inside: Int64Array, ever: Int64Array, beyond: Any) -> Missed:
    """Part the computed tokens of every request.

    ``inside`` is the match cut to the grid of states, ``ever`` the deepest state at or before it
    that was ever written, ``beyond`` whether one was written deeper.
    """
    dropped = np.minimum(case.margin, run.ceiling - run.attention)
    left = inside - ever
    return Missed(
        run,
        {
            NEW: run.prompt - run.ceiling,
            ATTENTION: run.ceiling - run.attention - dropped,
            DROP: dropped,
            BELOW: run.attention - inside,
            EVICTED: ever - run.reused,
            BEYOND: np.where(beyond, left, 0),
            NOWHERE: np.where(beyond, 0, left),
        },
    )


def explain_misses_plainly(
    trace: Trace, rule: str | Rule | Place, *, block: int, **options: Unpack[Options]
) -> Missed:
    """The same, request by request: every state ever written is remembered with its path."""
    case = Case.of(trace, rule, block=block, **options)
    run = replay(trace, case.rule, block=block, plainly=True, **options)
    trace = case.trace
    g, R, rows = trace.grain, len(trace), expand_rows(trace)
    placed = [_placed_plainly(case, run, i) for i in range(R)]
    on_blocks = all(depth * g % block == 0 for depths in placed for depth in depths)
    grid = block if on_blocks and case.rule.states else g
    inside, ever = np.zeros(R, np.int64), np.zeros(R, np.int64)
    beyond = np.zeros(R, bool)
    written: dict[int, int] = {}  # the number of a block with a state: its depth
    deeper: dict[int, int] = {}  # the number of a block: the deepest state below it
    for i, ids in enumerate(rows):
        found, hit = int(run.attention[i]), int(run.reused[i])
        inside[i] = ever[i] = max(found // grid * grid, hit)
        if case.rule.states:
            path = ids[: int(inside[i]) // g]
            ever[i] = max([hit, *(written[n] * g for n in path if n in written)])
            beyond[i] = found > 0 and deeper.get(ids[found // g - 1], 0) > found // g
        for depth in placed[i]:
            written[ids[depth - 1]] = depth
            for number in ids[: depth - 1]:
                deeper[number] = max(deeper.get(number, 0), depth)
    return _sum_up(case, run, inside, ever, beyond)


def _placed_plainly(case: Case, run: Replay, i: int) -> list[int]:
    """Where a request placed states: depths in blocks."""
    if not case.rule.states:
        return []
    trace, g = case.trace, case.trace.grain
    prompt, shared = int(trace.prompt[i]), int(trace.shared[i])
    whole = max(min(shared, (prompt - 1) // g) * g - case.margin, 0)
    splits = bool(trace.splits[i]) and run.attention[i] == whole
    match = Match(int(run.attention[i]), int(run.reused[i]), splits)
    asked = Lengths(prompt, int(trace.output[i]), int(trace.message[i]))
    return depths_of(case.rule.place(asked, match, case.sizes), g, prompt)
