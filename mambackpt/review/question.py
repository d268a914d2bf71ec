"""What a review is asked: a model, how its engine is set, and what is sent to it."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd

from mambackpt.engine import Settings
from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.geometry import CacheGeometry
from mambackpt.models import HybridModel
from mambackpt.replay import Options, PrefillRate, Trace
from mambackpt.why import kernel_grid

LENGTHS = (2_000, 8_000, 32_000, 128_000)


@dataclass(frozen=True, kw_only=True)
class Question:
    """A model with the settings of its engine, and the traffic that it is to serve.

    >>> from mambackpt.models import PRESETS
    >>> from mambackpt.replay import generate_chat
    >>> question = Question(model=PRESETS["qwen3-next"], traces=[generate_chat(100)])
    >>> question.geometry.M, question.scaled.mamba_block_size
    (1056, 33)

    ``traces`` are the trace, or the same generator under several seeds. ``block`` and
    ``hash_block`` default to the model's block and the block; ``alignment`` to the grid of the
    model's kernel (0: it cannot export). ``budget`` are the tokens of one step, ``pool_bytes`` the
    cache of one device (None: unlimited), ``max_len`` the longest request, ``lengths`` the prompts
    that are drawn, ``histories`` the random chats of the lockstep check, ``rate`` the reader's own.
    ``assumed`` says in sentences where a number comes from a default. Sizes in tokens. Raises
    CheckpointValueError where they contradict each other.
    """

    model: HybridModel
    traces: Sequence[Trace]
    block: int | None = None
    hash_block: int | None = None
    alignment: int | None = None
    drop: bool = False
    budget: int = 8192
    pool_bytes: int | None = None
    max_len: int = 262_144
    lengths: Sequence[int] = LENGTHS
    rate: PrefillRate | None = None
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
        grid = kernel_grid(self.model)[0] if self.alignment is None else self.alignment or None
        return CacheGeometry(unit, block, grid, unit, self.drop)

    @property
    def settings(self) -> Settings:
        """The engine of these settings, one request at a time."""
        geometry = self.geometry
        return Settings(
            mamba_block_size=geometry.M,
            hash_block_size=geometry.H,
            checkpoint_alignment=geometry.A,
            drop_eagle_block=self.drop,
            budget=self.budget,
            max_running=1,
        )

    @property
    def options(self) -> Options:
        """What every replay of the question is given beside rule and block."""
        options: Options = {"budget": self.budget}
        if self.pool_bytes:
            options |= {"model": self.model, "pool_bytes": self.pool_bytes}
        return options

    @property
    def scale(self) -> int:
        """The tokens that block, hash unit, alignment and budget are all multiples of."""
        geometry = self.geometry
        return gcd(geometry.M, geometry.H, geometry.A or 0, self.budget)

    @property
    def scaled(self) -> Settings:
        """The engine of these settings, counted in units of `scale` tokens, with no evictions."""
        geometry, unit = self.geometry, self.scale
        return replace(
            self.settings,
            mamba_block_size=geometry.M // unit,
            hash_block_size=geometry.H // unit,
            attention_block_size=geometry.M // unit,
            cache_hit_alignment_tokens=geometry.H // unit,
            checkpoint_alignment=None if geometry.A is None else geometry.A // unit,
            budget=self.budget // unit,
        )
