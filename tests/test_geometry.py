"""The sizes are validated once, and a refusal names the values."""

import re

import numpy as np
import pytest

from mambackpt import CacheGeometry, CheckpointError, CheckpointTypeError, CheckpointValueError
from mambackpt.errors import checked_int

SIZES = (
    "hash_block_size",
    "mamba_block_size",
    "checkpoint_alignment",
    "cache_hit_alignment_tokens",
)


def geometry(**changes: object) -> CacheGeometry:
    sizes = {
        "hash_block_size": 16,
        "mamba_block_size": 64,
        "checkpoint_alignment": 16,
        "cache_hit_alignment_tokens": 16,
    }
    return CacheGeometry(**(sizes | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [0, -1, -16])
def test_a_size_that_is_not_positive_is_refused_by_name_and_value(name: str, value: int) -> None:
    with pytest.raises(CheckpointValueError, match=f"{name} is {value}; expected a positive"):
        geometry(**{name: value})


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("value", [True, 16.0, "16", np.float64(16), np.bool_(True), [16]])
def test_a_size_that_is_not_an_integer_is_refused_by_name_and_value(
    name: str, value: object
) -> None:
    with pytest.raises(CheckpointTypeError, match=f"{name} is {re.escape(repr(value))}"):
        geometry(**{name: value})


@pytest.mark.parametrize("name", [n for n in SIZES if n != "checkpoint_alignment"])
def test_only_the_alignment_may_be_absent(name: str) -> None:
    assert geometry(checkpoint_alignment=None).A is None
    with pytest.raises(CheckpointTypeError, match=name):
        geometry(**{name: None})


@pytest.mark.parametrize("kind", [np.int32, np.int64, np.uint16])
def test_numpy_integers_are_read_as_plain_ints(kind: type) -> None:
    g = CacheGeometry(kind(16), kind(64), kind(8), kind(32), num_hash_lookahead_tokens=kind(1))
    assert (g.H, g.M, g.A, g.U) == (16, 64, 8, 32)
    assert all(type(size) is int for size in (g.H, g.M, g.A, g.U, g.num_hash_lookahead_tokens))


@pytest.mark.parametrize("name", ["mamba_block_size", "cache_hit_alignment_tokens"])
def test_blocks_and_hit_grid_must_be_whole_hash_units(name: str) -> None:
    with pytest.raises(CheckpointValueError, match=f"{name} is 40 and hash_block_size is 16.*48"):
        geometry(**{name: 40})


def test_the_hit_grid_may_be_wider_than_a_block() -> None:
    assert geometry(cache_hit_alignment_tokens=512).U == 512


def test_drop_and_lookahead_may_be_set_together() -> None:
    g = geometry(drop_eagle_block=True, num_hash_lookahead_tokens=2)
    assert (g.drop_eagle_block, g.num_hash_lookahead_tokens) == (True, 2)


def test_a_negative_lookahead_is_refused() -> None:
    with pytest.raises(CheckpointValueError, match="num_hash_lookahead_tokens is -1"):
        geometry(num_hash_lookahead_tokens=-1)


def test_every_refusal_belongs_to_one_family_and_to_the_builtin_kind() -> None:
    for value, builtin in ((0, ValueError), (16.0, TypeError)):
        with pytest.raises(CheckpointError) as caught:
            geometry(hash_block_size=value)
        assert isinstance(caught.value, builtin)


def test_a_count_below_its_least_is_told_the_least() -> None:
    with pytest.raises(
        CheckpointValueError, match=r"panels is 1; expected at least 2 panels\. Try 2"
    ):
        checked_int("panels", 1, least=2, unit="panels")
