"""What a replay returns: totals, rates, and one entry per request."""

from dataclasses import dataclass, field
from typing import Any

from mambackpt.replay.trace import Int64Array


@dataclass(frozen=True, eq=False)
class Replay:
    """What a rule did to a trace.

    Arrays with one entry per request, int64: ``prompt``, ``ceiling`` (tokens an unlimited
    attention cache would have reused), ``attention`` (tokens this one found), ``reused`` (tokens
    it resumed after), ``written`` (states newly written), ``evicted`` (states and attention
    blocks). ``reads`` counts, for each part of the rule, the requests that resumed after a state
    which it placed. ``notes`` say what the numbers rest on. Rates are shares of 1, sizes bytes.
    """

    trace: str
    rule: str
    block: int
    grain: int
    budget: int
    pool_bytes: int | None
    state_pool_bytes: int | None
    eviction: str
    token_bytes: int
    state_bytes: int
    prompt: Int64Array
    ceiling: Int64Array
    attention: Int64Array
    reused: Int64Array
    written: Int64Array
    evicted: Int64Array
    reads: dict[str, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()

    def __len__(self) -> int:
        return len(self.prompt)

    @property
    def hit_rate(self) -> float:
        """Reused tokens over prompt tokens."""
        return float(self.reused.sum() / self.prompt.sum())

    @property
    def ceiling_rate(self) -> float:
        """The hit rate of an unlimited cache of attention alone."""
        return float(self.ceiling.sum() / self.prompt.sum())

    @property
    def distance(self) -> float:
        """How far the hit rate lies below that ceiling."""
        return self.ceiling_rate - self.hit_rate

    @property
    def recomputed(self) -> int:
        """Prompt tokens that were computed."""
        return int((self.prompt - self.reused).sum())

    @property
    def states_written(self) -> int:
        """States newly written."""
        return int(self.written.sum())

    @property
    def states_per_request(self) -> float:
        """States newly written over requests."""
        return self.states_written / len(self)

    @property
    def bytes_written(self) -> int:
        """Bytes of the states newly written (0 where no model was given)."""
        return self.states_written * self.state_bytes

    @property
    def evictions(self) -> int:
        """States and attention blocks evicted."""
        return int(self.evicted.sum())

    def summary(self) -> dict[str, Any]:
        """The totals, ready for JSON or a table."""
        return {
            "trace": self.trace,
            "rule": self.rule,
            "block": self.block,
            "budget": self.budget,
            "pool_bytes": self.pool_bytes,
            "state_pool_bytes": self.state_pool_bytes,
            "eviction": self.eviction,
            "requests": len(self),
            "prompt_tokens": int(self.prompt.sum()),
            "reused_tokens": int(self.reused.sum()),
            "recomputed_tokens": self.recomputed,
            "hit_percent": 100 * self.hit_rate,
            "ceiling_percent": 100 * self.ceiling_rate,
            "states_written": self.states_written,
            "states_per_request": self.states_per_request,
            "state_bytes_written": self.bytes_written,
            "evictions": self.evictions,
            "notes": "; ".join(self.notes),
        }
