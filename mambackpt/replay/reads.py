"""Whose states are read: the requests that resume after a state of each part of a joined rule."""

from collections.abc import Iterator

import numpy as np

from mambackpt.replay.case import Case, depths_of
from mambackpt.replay.rules import Lengths, Match, Rule
from mambackpt.replay.trace import Int64Array
from mambackpt.replay.unlimited import places_of


def count_reads(case: Case, attention: Int64Array, reused: Int64Array) -> dict[str, int]:
    """Return, for each part of the rule, how many requests resumed after a state of it.

    ``attention`` and ``reused`` are what a replay of the case found. A state is the part's that
    placed it last before it was read; where a request placed it by two parts, the first one's.
    """
    trace, rule = case.trace, case.rule
    if not rule.states:
        return {}
    parts = rule.parts or (rule,)
    reader = np.flatnonzero(reused)
    if len(parts) == 1:
        return {rule.name: len(reader)}
    R, last = len(trace), len(parts) - 1
    block = trace.find_blocks(reader, reused[reader] // trace.grain)
    is_read = np.zeros(trace.size, bool)
    is_read[block] = True
    # (block, request, part) as one number; of one request's the first part's is the largest.
    placed = [np.zeros(0, np.int64)]
    for number, part in enumerate(parts):
        for owner, depth in placed_by(part, case, attention, reused):
            at = trace.find_blocks(owner, depth)
            some = is_read[at]
            placed.append((at[some] * R + owner[some]) * (last + 1) + last - number)
    keys = np.sort(np.concatenate(placed))
    before = keys[np.searchsorted(keys, (block * R + reader) * (last + 1)) - 1]
    before = before[before // (last + 1) // R == block]
    counts = np.bincount(last - before % (last + 1), minlength=last + 1).tolist()
    reads = dict.fromkeys((part.name for part in parts), 0)
    for part, count in zip(parts, counts, strict=True):
        reads[part.name] += count
    return reads


def placed_by(
    part: Rule, case: Case, attention: Int64Array, reused: Int64Array
) -> Iterator[tuple[Int64Array, Int64Array]]:
    """(request, depth in blocks) of what a part placed in a replay that found this."""
    trace = case.trace
    if part.arrays:
        asked = Lengths(trace.prompt, trace.output, trace.message)
        for position in part.place(asked, Match(attention, reused), case.sizes):
            yield places_of(trace, position)
        return
    # A request leaves an earlier one inside an edge only where all that they share is there.
    whole = attention == (trace.ceiling - case.margin).clip(0)
    columns = (trace.prompt, trace.output, trace.message, attention, reused, trace.splits & whole)
    owners: list[int] = []
    depths: list[int] = []
    rows = zip(*(column.tolist() for column in columns), strict=True)
    for request, (prompt, output, message, found, joint, splits) in enumerate(rows):
        match = Match(found, joint, splits)
        positions = part.place(Lengths(prompt, output, message), match, case.sizes)
        placed = depths_of(positions, trace.grain, prompt)
        owners += [request] * len(placed)
        depths += placed
    yield np.array(owners, np.int64), np.array(depths, np.int64)
