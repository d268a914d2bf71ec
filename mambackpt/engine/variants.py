"""Scheduler rules as data: the released ones by version, and the fixes, by name.

A variant is one function, decorated with `named_variant`, that returns a `Variant`: usually a
released one with a field replaced.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

from mambackpt.errors import checked_choice
from mambackpt.planner import (
    POSITION_FORMULAS,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)


class Query(NamedTuple):
    """One scheduled query [start, end) and what the rules may ask about it; sizes in tokens.

    ``prefill_end`` is where the request's prefill ends, ``position`` where its checkpoint would be,
    ``alignment`` None where the prefill kernel of some recurrent layer cannot export.
    """

    start: int
    end: int
    prefill_end: int
    position: int
    hash_block_size: int
    mamba_block_size: int
    alignment: int | None
    drop_eagle_block: bool

    @property
    def starts_inside_block(self) -> bool:
        """Whether the state that the query starts from lies strictly inside a block."""
        return self.start % self.mamba_block_size != 0


def kernel_can_write(query: Query) -> bool:
    """Return the shared predicate's answer: can the backend write this checkpoint?"""
    return is_mamba_prefill_checkpoint_valid(
        query.start,
        query.end,
        query.position,
        query.hash_block_size,
        query.mamba_block_size,
        query.alignment,
    )


def _reaches_prefill_end(query: Query) -> bool:
    return query.end >= query.prefill_end and kernel_can_write(query)


def _stop_unless_internal(query: Query, internal: bool) -> bool:
    return query.starts_inside_block and not internal


def _floor_from_start(start: int, junction: int, block: int) -> int:
    return start + (junction - start) // block * block


def _floor_on_grid(start: int, junction: int, block: int) -> int:
    return junction // block * block


def _keys_every_block(column: int, query: Query) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Variant:
    """The decisions in which released engines and proposed fixes differ.

    ``position(num_tokens, unit, drop, lookahead)``: where a prefix can be resumed.
    ``runs_through(query)``: may a query skip its stops, its checkpoint being written inside?
    ``writes_inside(query)``: do allocator and worker reserve and write that checkpoint?
    ``stops_at_boundary(query, internal)``: must a query end at the next block boundary?
    ``junction_stop(start, junction, block)``: where it stops for a junction off the block grid.
    ``keys_block(column, query)``: may the full-block pass key this column after this query?
    """

    name: str
    position: Callable[[int, int, bool, int], int] = get_mamba_prefill_checkpoint_position
    runs_through: Callable[[Query], bool] = _reaches_prefill_end
    writes_inside: Callable[[Query], bool] = kernel_can_write
    stops_at_boundary: Callable[[Query, bool], bool] = _stop_unless_internal
    junction_stop: Callable[[int, int, int], int] = _floor_from_start
    keys_block: Callable[[int, Query], bool] = _keys_every_block


VARIANTS: dict[str, Callable[[], Variant]] = {}


def named_variant(make: Callable[[], Variant]) -> Callable[[], Variant]:
    """Register a function that returns a `Variant` under that variant's name."""
    VARIANTS[make().name] = make
    return make


def find_variant(variant: str | Variant) -> Variant:
    """Return the `Variant` of this name; a `Variant` passes through.

    >>> find_variant("vllm-0.33").name
    'vllm-0.33'

    Raises CheckpointValueError for a name that no variant carries.
    """
    if isinstance(variant, Variant):
        return variant
    return VARIANTS[checked_choice("variant", variant, VARIANTS)]()


@named_variant
def vllm_0_33() -> Variant:
    """The rules as released in vllm 0.33.0."""
    return Variant("vllm-0.33")


@named_variant
def vllm_0_29() -> Variant:
    """vllm 0.29: every block-aligned chunk runs through, unless a block is dropped."""

    def runs_through(query: Query) -> bool:
        exports = query.alignment is not None
        return exports and not (query.drop_eagle_block or query.starts_inside_block)

    return Variant(
        "vllm-0.29", position=POSITION_FORMULAS["before-0.32"], runs_through=runs_through
    )


def _fix(name: str) -> Variant:
    # Every fix also floors the junction on the absolute grid: a floor relative to a start inside
    # a block stops off the grid again.
    return replace(vllm_0_33(), name=name, junction_stop=_floor_on_grid)


@named_variant
def keep_the_stop() -> Variant:
    """Keep the stop at the next boundary for every query that starts inside a block."""
    return replace(
        _fix("keep-the-stop"), stops_at_boundary=lambda query, internal: query.starts_inside_block
    )


@named_variant
def refuse_inside_block() -> Variant:
    """Refuse the internal path, in all three parties, to a query that starts inside a block."""
    return replace(
        _fix("refuse-inside-block"),
        runs_through=lambda query: not query.starts_inside_block and _reaches_prefill_end(query),
        writes_inside=lambda query: not query.starts_inside_block and kernel_can_write(query),
    )


@named_variant
def never_key_the_left_block() -> Variant:
    """Never key, as a full block, the block that a query started inside and ran past the end of."""

    def keys_block(column: int, query: Query) -> bool:
        left = query.start // query.mamba_block_size
        ran_past = query.end > (left + 1) * query.mamba_block_size
        return not (query.starts_inside_block and ran_past and column == left)

    return replace(_fix("never-key-the-left-block"), keys_block=keys_block)
