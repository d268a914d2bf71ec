"""What a review is asked: a model, how its engine is set, and what is sent to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd

from mambackpt.engine import Settings
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.geometry import CacheGeometry
from mambackpt.models import HybridModel
from mambackpt.replay import Trace

LENGTHS = (2_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model with the settings of its engine, and the traffic that it is to serve.

    >>> from mambackpt.models import PRESETS
    >>> from mambackpt.replay import generate_chat
    >>> question = Question(model=PRESETS["qwen3-next"], traces=[generate_chat(100)])
    >>> question.geometry.M, question.scaled.mamba_block_size
    (1056, 66)

    ``traces`` are the trace, or the same generator under several seeds. ``block`` (tokens of a
    block), ``hash_block`` and ``alignment`` default to the model's block, the block, and 16;
    ``budget`` are the tokens of one step; ``pool_bytes`` of the cache of all ranks' share (None:
    unlimited); ``max_len`` the longest request. ``assumed`` says in sentences where a number comes
    from a default. Sizes in tokens. Raises CheckpointValueError where they contradict each other.
    """

    model: HybridModel
    traces: Sequence[Trace]
    block: int | None = None
    hash_block: int | None = None
    alignment: int = 16
    drop: bool = False
    budget: int = 8192
    pool_bytes: int | None = None
    max_len: int = 262_144
    lengths: Sequence[int] = LENGTHS
    rates: Sequence[float] = ()
    histories: int = 20
    log: str = ""
    assumed: Sequence[str] = field(default_factory=tuple)

    def __post_init__(self) -> None:
        if not self.traces or not self.lengths:
            raise CheckpointValueError(
                f"{len(self.traces)} traces and {len(self.lengths)} lengths; expected at least one "
                "of each. Try traces=[generate_chat(1000)]."
            )
        for length in self.lengths:
            checked_int("lengths", length)
        checked_int("budget", self.budget)
        checked_int("histories", self.histories, unit="histories")
        _ = self.geometry

    @property
    def trace(self) -> Trace:
        """The trace, or the first of several seeds."""
        return self.traces[0]

    @cached_property
    def geometry(self) -> CacheGeometry:
        """Block, hash unit and grids; hits may land on every hash unit."""
        block = self.model.block_size() if self.block is None else self.block
        unit = block if self.hash_block is None else self.hash_block
        return CacheGeometry(unit, block, self.alignment, unit, self.drop)

    @property
    def scale(self) -> int:
        """The tokens that block, hash unit, alignment and budget are all multiples of."""
        geometry = self.geometry
        return gcd(geometry.M, geometry.H, geometry.A or 0, self.budget)

    @property
    def scaled(self) -> Settings:
        """The engine of these settings, counted in units of `scale` tokens, with no evictions."""
        geometry, unit = self.geometry, self.scale
        return Settings(
            mamba_block_size=geometry.M // unit,
            hash_block_size=geometry.H // unit,
            checkpoint_alignment=None if geometry.A is None else geometry.A // unit,
            drop_eagle_block=self.drop,
            budget=self.budget // unit,
            max_running=1,
        )
