"""llama.cpp's slot over a whole trace: what `llama_cpp.Slot` does, found faster.

`walk_plainly` gives every prompt to a `Slot`, as lists of block numbers: the truth. `walk_fast`
rests on three facts:

* The slot's own context is always that of the request before, so what a prompt shares with it, and
  whether it leaves it, is known for all requests at once.
* Requests form a tree: each leaves its parent, the one that first had the last block they share. A
  context of host memory is filed under the requests on its way to the root; one that shares more
  than the slot does is filed under the one that first had the next block.
* Without messages, and where a batch holds the two tail points, these are all that is kept.
"""

from collections import defaultdict
from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mambackpt.replay.serve.llama_cpp import (
    LEAST_OF_HOST,
    LEAST_OF_PROMPT,
    LEAST_OF_SLOT,
    STEPS_BACK,
    LlamaCppSettings,
    Placement,
    Prompt,
    Slot,
    State,
    share_of,
)
from mambackpt.replay.trace import Int64Array, Trace

Row = tuple[int, int, int, int]  # tokens of attention and reuse, states new and gone


def walk_trace(trace: Trace, *, plainly: bool = False, **settings: object) -> Iterator[Row]:
    """Serve a trace, a request at a time: tokens of attention and reuse, states new and gone.

    >>> from mambackpt.replay.trace import trace_from_tokens
    >>> trace = trace_from_tokens([range(100), range(120)], grain=4)
    >>> list(walk_trace(trace, batch=64, ubatch=64))
    [(0, 0, 2, 0), (100, 100, 2, 0)]

    Ids stand for ``trace.grain`` tokens. What a request puts out has no ids and is shared with
    nobody; it moves the live end. ``plainly`` uses the readable slot for everything.
    """
    options = LlamaCppSettings(**settings)  # type: ignore[arg-type]
    return walk_plainly(trace, options) if plainly else walk_fast(trace, options)


def walk_plainly(trace: Trace, settings: LlamaCppSettings) -> Iterator[Row]:
    """Serve a trace with the readable slot."""
    slot = Slot(settings, trace.grain)
    columns = zip(*(c.tolist() for c in (trace.prompt, _live(trace), trace.message)), strict=True)
    for request, (length, live, message) in enumerate(columns):
        ids = tuple(trace.blocks(request))
        served = slot.serve(Prompt(ids, length, ids, live, (message,) if message else ()))
        yield served.attention, served.reused, len(served.created), len(slot.erased)


def _live(trace: Trace) -> Int64Array:
    """Tokens that each request's live end has read."""
    live: Int64Array = trace.prompt + (trace.output - 1).clip(0)
    return live


class _Waiting(NamedTuple):
    """A context of host memory."""

    request: int
    live: int
    checkpoints: list[State]


class _Host:
    """The contexts of host memory, filed under the requests on their way to the root."""

    def __init__(self, trace: Trace) -> None:
        paths = trace.paths
        self.row, self.first, self.count, self.owner = (
            paths.row,
            paths.first,
            paths.count,
            paths.owner,
        )
        self.grain, self.length = trace.grain, trace.length.tolist()
        self.live = _live(trace).tolist()
        self.fork: list[int] = trace.block_at(trace.shared).tolist()
        self.last: list[int] = trace.block_at(trace.length).tolist()
        # In the order in which they were saved: all of them, and those that a block ends with (only
        # these can be all in another one) by the request that first had that block.
        self.filed: defaultdict[int, dict[int, _Waiting]] = defaultdict(dict)
        self.whole: defaultdict[int, dict[int, _Waiting]] = defaultdict(dict)

    def shared_blocks(self, ours: int, theirs: int) -> int:
        """Leading blocks that two requests have in common, run by run."""
        first, count = self.first, self.count
        mine, other = self.row[ours], self.row[theirs]
        blocks = 0
        for _ in range(min(self.row[ours + 1] - mine, self.row[theirs + 1] - other)):
            if first[mine] != first[other]:
                break
            if count[mine] != count[other]:
                return blocks + min(count[mine], count[other])
            blocks += count[mine]
            mine, other = mine + 1, other + 1
        return blocks

    def branches(self, request: int) -> list[int]:
        """The requests that first had a request's blocks, from its last block to the root."""
        branches, block = [], self.last[request]
        while block >= 0:
            branches.append(self.owner[block])
            block = self.fork[branches[-1]]
        return branches

    def save(self, request: int, checkpoints: list[State]) -> None:
        """Copy the slot's context, in the place of those that it extends."""
        branches, tokens = self.branches(request), self.length[request] * self.grain
        whole = tokens == self.live[request]
        if not branches:
            return
        if whole:
            for other in self.filed[branches[0]].values():
                if self.shared_blocks(other.request, request) * self.grain == tokens:
                    return
        for branch in branches:
            if branch in self.whole:
                for other in list(self.whole[branch].values()):
                    if self.shared_blocks(request, other.request) * self.grain == other.live:
                        self.take(other)
        saved = _Waiting(request, self.live[request], checkpoints.copy())
        for branch in branches:
            self.filed[branch][request] = saved
        if whole:
            self.whole[branches[0]][request] = saved

    def take(self, context: _Waiting) -> _Waiting:
        """Let a context go, or move it into the slot."""
        for branch in self.branches(context.request):
            del self.filed[branch][context.request]
            if branch in self.whole:
                self.whole[branch].pop(context.request, None)
        return context

    def best(self, request: int, length: int, most: int, branch: int) -> _Waiting | None:
        """As `Slot.best_waiting`, among those that share more than ``most`` blocks, as the slot."""
        g, best = self.grain, None
        kept = share_of(most * g, self.live[request - 1])
        for context in self.filed[branch].values():
            blocks = self.shared_blocks(context.request, request)
            if blocks > most:
                more_kept = share_of(blocks * g, context.live)
                if (
                    more_kept >= LEAST_OF_HOST
                    and more_kept > kept
                    and share_of(blocks * g, length) > share_of(most * g, length)
                ):
                    best, most, kept = context, blocks, more_kept
        return best


def _swaps(trace: Trace, settings: LlamaCppSettings) -> NDArray[np.bool_]:
    """Whether each request leaves the slot's context, as `Slot.choose` decides."""
    shared = (trace.shared_with_previous * trace.grain).astype(np.float32)
    of_prompt = shared / trace.prompt.astype(np.float32)
    of_context = shared[1:] / _live(trace)[:-1].astype(np.float32)
    swaps = ~(of_prompt > LEAST_OF_PROMPT)
    swaps[1:] |= of_context < LEAST_OF_SLOT
    swaps[:1] = False
    return swaps & settings.host_cache


def _askers(trace: Trace) -> Int64Array:
    """The request that first had the block after what each shares with the one before; -1: none.

    None too where no earlier request had it: then host memory cannot have more than the slot.
    """
    at = trace.shared_with_previous
    request = np.flatnonzero(trace.shared > at)
    branches = np.full(len(trace), -1)
    branches[request] = trace.first_with(trace.find_blocks(request, at[request] + 1))
    return branches


def walk_fast(trace: Trace, settings: LlamaCppSettings) -> Iterator[Row]:
    """Serve a trace request by request, without looking at contexts that share nothing more."""
    g, b, ub = trace.grain, settings.batch, settings.ubatch
    host, slot = _Host(trace), Slot(settings)
    simple = b >= STEPS_BACK + ub and ub > STEPS_BACK and settings.placement == Placement()
    room = settings.checkpoints - 3 if simple else -1  # two more do not fill a list of so many
    checkpoints: list[State] = []
    before = 0
    columns = (trace.prompt, _live(trace), trace.message, trace.shared_with_previous)
    arrays = (*columns, _swaps(trace, settings), _askers(trace))
    for i, (L, live, message, blocks, swap, branch) in enumerate(
        zip(*(array.tolist() for array in arrays), strict=True)
    ):
        if swap:
            host.save(i - 1, checkpoints)
            better = host.best(i, L, blocks, branch) if branch >= 0 else None
            if better is not None:
                j, before, checkpoints = host.take(better)
                blocks = host.shared_blocks(j, i)
        most = min(blocks * g, L - 1)
        resume, gone = 0, len(checkpoints)
        if before <= most:
            resume = before
        else:
            for position, _ in reversed(checkpoints):
                if position <= most or (position == 1 and blocks):
                    resume = position
                    break
        checkpoints = [state for state in checkpoints if state[0] <= resume + 1]
        gone -= len(checkpoints)
        start = min(resume, L - 1)
        if message or len(checkpoints) > room:
            slot.context.checkpoints, slot.request, slot.erased = checkpoints, i + 1, []
            ids: tuple[int, ...] = ()
            prompt = Prompt(ids, L, ids, live, (message,) if message else ())
            new = len(list(slot.prefill(start, prompt)))
            checkpoints, gone = slot.context.checkpoints, gone + len(slot.erased)
        else:
            tail = L - STEPS_BACK
            created = [p for p in (max(start, tail - ub), max(start, tail)) if p > 0]
            new = len({*created})
            kept = [state for state in checkpoints if state[0] not in created]
            gone += len(checkpoints) - len(kept)
            checkpoints = kept + [State(p, i + 1) for p in dict.fromkeys(created)]
        yield most, start, new, gone
        before = live
