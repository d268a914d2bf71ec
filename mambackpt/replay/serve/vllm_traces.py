"""vllm's cache over a whole trace: ids are the engine room's tokens, sizes count in ids.

With a grain of 1 these are `serve_tokens`' numbers. With a wider one every size has to be a number
of ids, and what a prompt has beyond its last whole id is one token that nobody shares. Under the
drop it is left out, so that a match drops one whole unit and no more; where it would begin a block,
a request is then served otherwise than its tokens would be, about one in a hundred.
"""

from collections.abc import Iterator

from mambackpt.engine import Request
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

    Outputs have no ids and are left out. There is one loop, so ``plainly`` changes nothing. Raises
    CheckpointValueError for a size that is no number of ids.
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
    settings = settings_of(
        block // g,
        hash_block // g,
        alignment,
        budget // g,
        retention and retention // g,
        drop,
        checkpoints,
    )
    answers = walk(_requests(trace, drop), settings)
    for served, ids in zip(answers, trace.length.tolist(), strict=True):
        created = sum(position <= ids for position in served.created)
        yield served.attention * g, served.reused * g, created, 0


def _requests(trace: Trace, drop: bool) -> Iterator[Request]:
    """Yield the requests; what is shared with nobody gets a number that no block has."""
    parts = (trace.prompt % trace.grain > 0).tolist()
    own = int(trace.first.max(initial=0)) + int(trace.count.max(initial=0)) + 1
    for request, part in enumerate(parts):
        ids = trace.blocks(request)
        if (part and not drop) or not ids:
            ids = [*ids, own + request]
        yield Request(str(request), ids)
