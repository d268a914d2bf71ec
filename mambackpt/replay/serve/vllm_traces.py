"""vllm's cache over a whole trace: ids are the engine room's tokens, sizes count in ids.

With a grain of 1 these are `serve_tokens`' numbers. With a wider one every size has to be a number
of ids, and what a prompt has beyond its last whole id is one token that nobody shares. Under the
drop it is left out, so that a match drops one whole unit and no more; where it would begin a block,
a request is then served otherwise than its tokens would be, about one in a hundred.

Where hash units are whole blocks nothing happens inside a block, and what a request leaves follows
from its length, where it resumes and where its prefix parts: see `_whole_blocks`. Everything else,
and all of it ``plainly``, runs through the engine room.
"""

from collections.abc import Iterator
from functools import lru_cache

from mambackpt.engine import Request, Settings
from mambackpt.engine.groups import replay_boundaries
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
    whole = options.hash_block_size == options.mamba_block_size <= options.budget
    rows = _whole_blocks if whole and not plainly else _plainly
    for attention, reused, created in rows(trace, options):
        yield attention * g, reused * g, created, 0


def _plainly(trace: Trace, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """Attention, reuse and new states of each request, in ids, as the engine room has them."""
    answers = walk(_requests(trace, settings.drop_eagle_block), settings)
    for served, ids in zip(answers, trace.length.tolist(), strict=True):
        created = sum(position <= ids for position in served.created)
        yield served.attention, served.reused, created


def _whole_blocks(trace: Trace, settings: Settings) -> Iterator[tuple[int, int, int]]:
    """The same where hash units are whole blocks and a step holds one.

    Nothing is evicted, so attention has every whole block that was there before; a state is there
    where one was keyed, named by the last id of its prefix. Requests of one length that resume and
    part at the same places leave states at the same places.
    """
    B, drop = settings.mamba_block_size, settings.drop_eagle_block
    states: set[int] = set()
    left = lru_cache(maxsize=None)(lambda *places: _states_left(settings, *places))
    partial = (trace.prompt % trace.grain > 0).tolist()
    rows = zip(trace.length.tolist(), trace.shared.tolist(), partial, strict=True)
    for request, (length, shared, part) in enumerate(rows):
        L = length + ((part and not drop) or not length)
        # Under the drop the last block that matches is computed again.
        reach = min(shared, L - (not drop)) // B * B
        reach -= B * (drop and reach > 0)
        ids = trace.blocks(request) if length >= B else []
        hit = reach
        while hit and ids[hit - 1] not in states:
            hit -= B
        made = left(L, hit, reach if reach > hit else 0)
        inside = [position for position in made if position <= length]
        states.update([ids[position - 1] for position in inside])
        yield reach, hit, len(inside)


def _states_left(settings: Settings, L: int, start: int, junction: int) -> tuple[int, ...]:
    """Return after how many ids a prompt of L leaves states that are found later.

    It resumes at ``start``; attention matched up to ``junction`` (0: no further). The steps are
    those of the splitter, the keys those of a recurrent group's three passes.
    """
    B, R, drop = settings.mamba_block_size, settings.retention, settings.drop_eagle_block
    splitter = settings.splitter
    last = splitter.query(0, 0, L, L).position
    kept = {boundary // B * B for boundary in replay_boundaries(L, B, drop)}
    kept |= ({junction, junction - B} if drop else {junction}) if junction else set()

    def keeps_interval(position: int) -> bool:
        return R is None or (R > 0 and position % R == 0)

    keyed: set[int] = set()
    while start < L:
        offered = min(L - start, settings.budget)
        end = splitter.end(start, offered, prompt=L, num_tokens=L, junction=junction)
        query = splitter.query(start, end, L, end)
        inside = end - start > B and not (R == 0 and end < L)
        if inside and splitter.variant.writes_inside(query):
            position = query.position
            if position in (last, junction) or keeps_interval(position):
                keyed.add(position)
        elif end % B == 0:
            on_it = settings.keeps_junctions and end == junction
            keyed |= {end} if on_it or end == last else set()
        if end % B == 0 and (end in kept or keeps_interval(end)):
            keyed.add(end)
        start = end
    return tuple(sorted(keyed - {0}))


def _requests(trace: Trace, drop: bool) -> Iterator[Request]:
    """Yield the requests; what is shared with nobody gets a number that no block has."""
    parts = (trace.prompt % trace.grain > 0).tolist()
    own = int(trace.first.max(initial=0)) + int(trace.count.max(initial=0)) + 1
    for request, part in enumerate(parts):
        ids = trace.blocks(request)
        if (part and not drop) or not ids:
            ids = [*ids, own + request]
        yield Request(str(request), ids)
