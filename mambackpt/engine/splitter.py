"""How the scheduler cuts a prefill into chunks when states exist only where a chunk ends.

M Mamba block, H hash unit, U cache-hit alignment, A checkpoint alignment: all in tokens.
"""

from dataclasses import dataclass, field

from mambackpt.engine.variants import Query, Variant, find_variant
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Splitter:
    """The split rule of one model and configuration; `Splitter.end` is what the scheduler asks.

    ``step_limit`` is the most tokens a request may get in one step. The ``alignment`` is None
    unless every recurrent layer reserves checkpoint blocks.
    """

    geometry: CacheGeometry
    step_limit: int
    internal_checkpoints: bool = False
    shared_prefix_checkpoint: bool = False
    variant: Variant = field(default_factory=lambda: find_variant("vllm-0.33"))

    def query(self, start: int, end: int, prefill_end: int, num_tokens: int) -> Query:
        """Return the query [start, end) with the position of a checkpoint for ``num_tokens``."""
        g = self.geometry
        return Query(
            start,
            end,
            prefill_end,
            self.variant.position(num_tokens, g.U, g.drop_eagle_block, g.num_hash_lookahead_tokens),
            g.H,
            g.M,
            g.A if self.internal_checkpoints else None,
            g.drop_eagle_block,
        )

    def end(
        self, start: int, offered: int, *, prompt: int, num_tokens: int, junction: int = 0
    ) -> int:
        """Return where a query that starts at ``start`` and is offered so many tokens must end.

        The answer is ``start`` itself where no stop is in reach: the request waits for a larger
        offer. ``num_tokens`` counts known tokens, more than ``prompt`` after a preemption.
        """
        g, M = self.geometry, self.geometry.M
        drop, lookahead = g.drop_eagle_block, g.num_hash_lookahead_tokens
        position = self.variant.position
        prefill_end = max(prompt, num_tokens - 1)
        end = start + offered
        if start >= prefill_end:
            return end
        # The checkpoint decides with the prefill's end; allocator and worker with the chunk's end.
        query = self.query(start, end, prefill_end, prefill_end)
        internal = self.variant.runs_through(query)
        last_boundary = 0 if internal else position(num_tokens, M, drop, lookahead)
        if end < prefill_end and not internal:
            boundary = end // M * M
            if boundary > start or self.step_limit >= M:
                end = boundary
        stops = [last_boundary]
        if self.variant.stops_at_boundary(query, internal):
            stops.append((start // M + 1) * M)
        if g.U < M and not internal:
            tail = position(prompt, g.H, drop, lookahead)
            if last_boundary < tail < prompt:
                stops.append(tail)
        if start < junction < end:
            on_it = self.shared_prefix_checkpoint and junction <= prompt
            stops.append(junction if on_it else self.variant.junction_stop(start, junction, M))
        return max(start, min([stop for stop in stops if start < stop < end], default=end))


def chunk_ends(
    prompt: int,
    *,
    start: int = 0,
    budget: int,
    mamba_block_size: int,
    hash_block_size: int,
    checkpoint_alignment: int | None = None,
    internal_checkpoints: bool = False,
    drop_eagle_block: bool = False,
    junction: int = 0,
    shared_prefix_checkpoint: bool = False,
    num_hash_lookahead_tokens: int = 0,
    step_limit: int | None = None,
    long_prefill_threshold: int = 0,
    num_tokens: int | None = None,
) -> list[int]:
    """Return where each chunk of one prefill ends, when every step is offered the same budget.

    >>> chunk_ends(8000, budget=8192, mamba_block_size=1536, hash_block_size=1536)
    [7680, 8000]
    >>> chunk_ends(8000, budget=8192, mamba_block_size=1536, hash_block_size=1536,
    ...            checkpoint_alignment=16, internal_checkpoints=True)
    [8000]

    All sizes are in tokens. The prefill resumes at ``start`` and is known to share a prefix up to
    ``junction`` with an earlier request (0: none). ``step_limit`` is the scheduler's own limit per
    step (default: the budget), ``long_prefill_threshold`` a lower one while other requests are
    there (0: off), ``num_tokens`` the known tokens of a request that was preempted while it decoded
    (default: the prompt). Hits inside a block are on where ``hash_block_size < mamba_block_size``.
    Raises CheckpointTypeError or CheckpointValueError for impossible sizes, and for a budget that
    reaches no boundary of a block that the limit has room for: the request would wait for ever.
    Rule of vllm 0.33.0.
    """
    prompt = checked_int("prompt", prompt)
    budget = checked_int("budget", budget)
    limit = budget if step_limit is None else checked_int("step_limit", step_limit)
    threshold = checked_int("long_prefill_threshold", long_prefill_threshold, least=0)
    total = prompt if num_tokens is None else checked_int("num_tokens", num_tokens)
    start = checked_int("start", start, least=0)
    junction = checked_int("junction", junction, least=0)
    if total < prompt:
        raise CheckpointValueError(
            f"num_tokens is {total} and prompt is {prompt}; expected num_tokens to count the "
            f"prompt and what was generated. Try {prompt}."
        )
    if start >= total:
        raise CheckpointValueError(
            f"start is {start} and the request has {total} tokens; expected a start before its "
            f"last token, which is always recomputed. Try {total - 1} or less."
        )
    if limit < budget:
        raise CheckpointValueError(
            f"step_limit is {limit} and budget is {budget}; expected a budget within the limit of "
            f"one step. Try budget={limit}."
        )
    geometry = CacheGeometry(
        hash_block_size,
        mamba_block_size,
        checkpoint_alignment,
        hash_block_size,
        drop_eagle_block,
        num_hash_lookahead_tokens,
    )
    most = min(budget, threshold or budget)
    splitter = Splitter(
        geometry,
        min(limit, threshold or limit),
        internal_checkpoints=internal_checkpoints,
        shared_prefix_checkpoint=shared_prefix_checkpoint,
    )
    ends = []
    while start < total:
        offered = min(most, total - start)
        end = splitter.end(start, offered, prompt=prompt, num_tokens=total, junction=junction)
        if end == start:
            M = geometry.M
            raise CheckpointValueError(
                f"budget is {budget} with a block of {M} and a step limit of {limit}: from token "
                f"{start} no step ever reaches a boundary, although the limit has room for a "
                f"block; expected progress. Try a budget of at least {M - start % M}."
            )
        ends.append(end)
        start = end
    return ends
