"""vllm's cache over a whole trace: ids are the engine room's tokens, sizes count in ids.

With a grain of 1 these are `serve_tokens`' numbers. With a wider one every size has to be a number
of ids, and what a prompt has beyond its last whole id is one token that nobody shares. Under the
drop it is left out, so that a match drops one whole unit and no more; where it would begin a block,
a request is then served otherwise than its tokens would be, about one in a hundred.

Nothing is evicted, so which keys a request leaves follows from its length, where it resumes and
where its prefix parts: the engine room is asked once for each of these, see `_by_keys`. All
requests run through it ``plainly``.
"""

from collections.abc import Iterator
from functools import lru_cache

from mambackpt.engine import PrefillKeys, Request, Settings, replay_boundaries
from mambackpt.errors import CheckpointValueError
from mambackpt.replay.serve.vllm import settings_of, walk
from mambackpt.replay.trace import Trace

Row = tuple[int, int, int, int]  # tokens of attention and reuse, states new and gone


def walk_trace(
    trace: Trace,
    *,
    plainly: bool = False,
    block: int = 64,
    hash_block: int = 16,
    alignment: int | None = 16,
    budget: int = 8192,
    retention: int | None = 0,
    drop: bool = False,
    checkpoints: bool = True,
) -> Iterator[Row]:
    """Serve a trace, a request at a time: tokens of attention and reuse, states new and gone.

    >>> from mambackpt.replay import trace_from_tokens
    >>> trace = trace_from_tokens([range(100), range(120)], grain=4)
    >>> list(walk_trace(trace))
    [(0, 0, 1, 0), (96, 96, 1, 0)]

    Outputs have no ids and are left out. Raises CheckpointValueError for a size that is no number
    of ids.
    """
    g = trace.grain
    sizes = {"block": block, "hash_block": hash_block, "budget": budget, "retention": retention}
    for name, size in sizes.items():
        if size and size % g:
            raise CheckpointValueError(
                f"{name} is {size} and the trace has ids of {g} tokens; expected a multiple. "
                f"Try {max(size // g, 1) * g}."
            )
    if alignment is not None:
        alignment = alignment // g if alignment % g == 0 else 1
    options = settings_of(
        block // g,
        hash_block // g,
        alignment,
        budget // g,
        retention and retention // g,
        drop,
        checkpoints,
    )
    rows = _plainly if plainly else _by_keys
    for attention, reused, created in rows(trace, options):
        yield attention * g, reused * g, created, 0


def _plainly(trace: Trace, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """Attention, reuse and new states of each request, in ids, as the engine room has them."""
    answers = walk(_requests(trace, settings.drop_eagle_block), settings)
    for served, ids in zip(answers, trace.length.tolist(), strict=True):
        created = sum(position <= ids for position in served.created)
        yield served.attention, served.reused, created


def _by_keys(trace: Trace, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """The same by the keys alone: nothing is evicted, so what is found is what has a key.

    A key is named by the last id of its prefix. Attention has whole blocks, and the last unit of
    each prompt; requests of one length that resume and part at the same places leave the keys of
    states at the same places.
    """
    g, drop = settings.geometry, settings.drop_eagle_block
    B, h, U, grid = g.M, g.H, g.U, settings.hit_grid
    inside, margin = B > U, h if B > U else B
    states: set[int] = set()
    units: set[int] = set()  # last units of prompts, within a block of attention
    alone = _WholeBlocks(settings) if h == B <= settings.budget else PrefillKeys(settings)
    left = lru_cache(maxsize=None)(alone)
    partial = (trace.prompt % trace.grain > 0).tolist()
    rows = zip(trace.length.tolist(), trace.shared.tolist(), partial, strict=True)
    for request, (length, shared, part) in enumerate(rows):
        L = length + ((part and not drop) or not length)
        ids = trace.blocks(request) if length else []
        # Under the drop the last unit that matches is computed again, so one more may match.
        bound = min(L - 1 + margin * drop, L // h * h)
        reach = min(shared, bound) // B * B
        if inside:
            top = min(reach + B - U, bound // U * U, shared // U * U)
            for position in range(top, reach, -U):
                if ids[position - 1] in units:
                    reach = position
                    break
        if drop and reach:
            reach -= min(U, B)
        reach = reach // U * U
        hit = reach // grid * grid
        while hit and ids[hit - 1] not in states:
            hit -= grid
        made, there = left(L, hit, reach if reach > hit else 0)
        states.update([ids[position - 1] for position in there if position <= length])
        last = (L if drop else L - 1) // h * h
        if h < B and last % B and last <= length:
            units.add(ids[last - 1])
        yield reach, hit, sum(position <= length for position in made)


class _WholeBlocks:
    """What `PrefillKeys` returns, where hash units are whole blocks and a step holds one: faster.

    The steps are the splitter's, the keys those of a recurrent group's three passes.
    """

    def __init__(self, settings: Settings) -> None:
        g = settings.geometry
        self.B, self.U, self.drop, self.R = g.M, g.U, g.drop_eagle_block, settings.retention
        self.budget, self.splitter = settings.budget, settings.splitter

    def __call__(self, prompt: int, start: int, junction: int) -> tuple[set[int], set[int]]:
        B, R, splitter = self.B, self.R, self.splitter
        last = splitter.query(0, 0, prompt, prompt).position
        kept = {boundary // B * B for boundary in replay_boundaries(prompt, B, self.drop)}
        kept |= ({junction, junction - B} if self.drop else {junction}) if junction else set()
        keyed: set[int] = set()
        while start < prompt:
            offered = min(prompt - start, self.budget)
            end = splitter.end(start, offered, prompt=prompt, num_tokens=prompt, junction=junction)
            query = splitter.query(start, end, prompt, end)
            inside = end - start > B and not (R == 0 and end < prompt)
            if inside and splitter.variant.writes_inside(query):
                if query.position in (last, junction) or self._in_interval(query.position):
                    keyed.add(query.position)
            elif end % B == 0 and end == last:
                keyed.add(end)
            if end % B == 0 and (end in kept or self._in_interval(end)):
                keyed.add(end)
            start = end
        keyed.discard(0)
        return keyed, keyed

    def _in_interval(self, position: int) -> bool:
        return self.R is None or (self.R > 0 and position % self.R == 0)


def _requests(trace: Trace, drop: bool) -> Iterator[Request]:
    """Yield the requests; what is shared with nobody gets a number that no block has."""
    parts = (trace.prompt % trace.grain > 0).tolist()
    own = int(trace.first.max(initial=0)) + int(trace.count.max(initial=0)) + 1
    for request, part in enumerate(parts):
        ids = trace.blocks(request)
        if (part and not drop) or not ids:
            ids = [*ids, own + request]
        yield Request(str(request), ids)
