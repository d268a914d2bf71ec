"""What is simulated: the requests, and the settings of scheduler, cache and model."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import lcm

from mambackpt.engine.splitter import Splitter
from mambackpt.engine.variants import Variant, find_variant
from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_int
from mambackpt.geometry import CacheGeometry


@dataclass(frozen=True, slots=True)
class Request:
    """One request as plain data: its prompt, and what happens to it.

    >>> Request("A", range(100), 41).output
    41

    ``prompt`` holds token ids. ``output`` is how many tokens are generated, sampled from the state
    that the model really has, or the tokens themselves (what an earlier run produced). The last
    generated token is never computed. ``arrival``, ``abort_at`` and ``preempt_at`` are step
    numbers, from 1: an abort falls between a step's scheduling and its computation, a preemption
    before its scheduling. ``accepted`` says how many draft tokens each decode step accepts, in a
    cycle (default: none).
    """

    name: str
    prompt: Sequence[int]
    output: int | Sequence[int] = 1
    arrival: int = 1
    abort_at: int | None = None
    preempt_at: Sequence[int] = ()
    accepted: Sequence[int] = (0,)

    def __post_init__(self) -> None:
        for name in ("prompt", "preempt_at", "accepted"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if isinstance(self.output, Sequence):
            object.__setattr__(self, "output", tuple(self.output))
        if not self.prompt or not self.output_length or not self.accepted:
            raise CheckpointValueError(
                f"request {self.name!r} has {len(self.prompt)} prompt tokens, "
                f"{self.output_length} output tokens and accepted={self.accepted}; expected at "
                "least one of each. Try output=1."
            )
        if not all(type(token) is int and token >= 0 for token in (*self.prompt, *self.forced)):
            raise CheckpointTypeError(
                f"request {self.name!r} has a token that is not a whole number from 0 on; expected "
                "token ids. Try list(range(100))."
            )

    @property
    def output_length(self) -> int:
        """How many tokens are generated."""
        if isinstance(self.output, Sequence):
            return len(self.output)
        return checked_int("output", self.output)

    @property
    def forced(self) -> Sequence[int]:
        """The generated tokens where they are given, else nothing."""
        return self.output if isinstance(self.output, Sequence) else ()

    @property
    def history(self) -> tuple[int, ...]:
        """Prompt and given output: what a next turn continues."""
        return (*self.prompt, *self.forced)


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Scheduler, cache and model of one simulation; sizes in tokens unless said otherwise.

    >>> settings = Settings(mamba_block_size=64, hash_block_size=16, retention=0)
    >>> settings.geometry.U, settings.scheduler_block
    (16, 64)

    ``retention`` is None (every boundary that was written), 0 (the prompt's last boundary and
    junctions) or R (also one per R tokens). ``budget`` is the limit of one step; ``budgets``, where
    given, is what the steps offer, in a cycle. ``pool_blocks`` counts usable blocks of all groups
    together (None: no evictions). ``cache_hit_alignment_tokens`` defaults to the hash unit, the
    value of an engine with hits inside a block. ``attention_block_size`` defaults to the Mamba
    block, which is what the engine runs. ``num_lookahead_tokens`` are attention slots that a query
    takes beyond its end: as many as drafts, where the drafter has an attention cache of its own.
    ``shared_prefix_checkpoint`` acts under the drop only, ``long_prefill_threshold`` only while
    more than one request is known. ``recurrence=True`` computes numbers beneath.
    Raises CheckpointTypeError or CheckpointValueError for sizes that contradict each other.
    """

    mamba_block_size: int = 64
    hash_block_size: int = 16
    checkpoint_alignment: int | None = 16
    internal_checkpoints: bool = True
    cache_hit_alignment_tokens: int | None = None
    attention_block_size: int | None = None
    drop_eagle_block: bool = False
    num_hash_lookahead_tokens: int = 0
    retention: int | None = 0
    shared_prefix_checkpoint: bool = False
    speculative_tokens: int = 0
    num_lookahead_tokens: int = 0
    recurrent_groups: int = 1
    budget: int = 8192
    budgets: Sequence[int] = ()
    long_prefill_threshold: int = 0
    max_running: int = 256
    pool_blocks: int | None = None
    recurrence: bool = False
    variant: str | Variant = "vllm-0.33"

    def __post_init__(self) -> None:
        checked_int("budget", self.budget)
        checked_int("long_prefill_threshold", self.long_prefill_threshold, least=0)
        checked_int("max_running", self.max_running, unit="requests")
        checked_int("recurrent_groups", self.recurrent_groups, unit="groups")
        checked_int("speculative_tokens", self.speculative_tokens, least=0)
        checked_int("num_lookahead_tokens", self.num_lookahead_tokens, least=0)
        if self.pool_blocks is not None:
            checked_int("pool_blocks", self.pool_blocks, unit="blocks")
        find_variant(self.variant)
        block = self.scheduler_block  # refuses sizes that contradict each other
        for offered in self.budgets:
            if checked_int("budgets", offered, least=0) > self.budget:
                raise CheckpointValueError(
                    f"budgets offers {offered} tokens with a budget of {self.budget}; expected "
                    f"offers within the limit of one step. Try budget={offered}."
                )
        attention, B, h = self.attention_block, self.mamba_block_size, self.hash_block_size
        if B % attention or attention % h:
            raise CheckpointValueError(
                f"attention_block_size is {attention} with blocks of {B} and hash units of {h}; "
                f"expected a multiple of the unit that divides the block. Try {B} or {h}."
            )
        if self.speculative_tokens >= self.mamba_block_size:
            raise CheckpointValueError(
                f"speculative_tokens is {self.speculative_tokens} with a block of "
                f"{self.mamba_block_size}; expected fewer drafts than a block has tokens. Try 3."
            )
        if self.retention and checked_int("retention", self.retention) % block:
            raise CheckpointValueError(
                f"retention is {self.retention} and the scheduler's block {block}; expected None, "
                f"0 or a multiple of the block. Try {block}."
            )

    @property
    def geometry(self) -> CacheGeometry:
        """The sizes as the planner takes them; a hash that looks ahead makes the drop needless."""
        return CacheGeometry(
            self.hash_block_size,
            self.mamba_block_size,
            self.checkpoint_alignment,
            self.cache_hit_alignment_tokens or self.hash_block_size,
            self.drop_eagle_block and not self.num_hash_lookahead_tokens,
            self.num_hash_lookahead_tokens,
        )

    @property
    def attention_block(self) -> int:
        """Tokens per block of the attention group."""
        if self.attention_block_size is None:
            return self.mamba_block_size
        return checked_int("attention_block_size", self.attention_block_size)

    @property
    def keeps_junctions(self) -> bool:
        """Whether a state is kept at a junction inside a block: never without the drop."""
        g = self.geometry
        return self.shared_prefix_checkpoint and g.drop_eagle_block and g.U < g.M

    @property
    def hit_grid(self) -> int:
        """Every hit is a multiple of this: the alignment inside a block, else whole blocks."""
        g = self.geometry
        return g.U if g.U < g.M and g.M % g.U == 0 else lcm(g.U, g.M)

    @property
    def scheduler_block(self) -> int:
        """The grid on which the scheduler counts blocks: M, or the wider hit alignment."""
        return lcm(self.mamba_block_size, self.geometry.U)

    @property
    def splitter(self) -> Splitter:
        """The split rule of these settings."""
        limit = self.budget
        return Splitter(
            self.geometry,
            min(limit, self.long_prefill_threshold or limit),
            internal_checkpoints=self.internal_checkpoints,
            shared_prefix_checkpoint=self.keeps_junctions,
            variant=find_variant(self.variant),
        )
