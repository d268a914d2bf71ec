"""The command line's numbers, sizes and names: what is typed is taken as meant, or refused."""

import pytest

from mambackpt.cli import bytes_of, choices_of, names_of, whole_number, whole_numbers
from mambackpt.errors import CheckpointValueError


@pytest.mark.parametrize("text", ["", "2k", "-5", "1e3", "abc", "1.5", "0", "²"])
def test_a_number_that_is_none_is_refused_with_the_option_as_typed(text: str) -> None:
    with pytest.raises(CheckpointValueError, match=r"--requests is .*; expected .* Try"):
        whole_number("--requests", text)
    with pytest.raises(CheckpointValueError, match=r"--block is .*; expected .* Try"):
        whole_numbers("--block", f"512,{text}")


@pytest.mark.parametrize(
    ("text", "size"),
    [("320GB", 320 * 10**9), ("1.5TB", 15 * 10**11), ("16GiB", 2**34), ("512KB", 512_000)],
)
def test_sizes_are_decimal_unless_they_say_so(text: str, size: int) -> None:
    assert bytes_of("--pool", text) == size


@pytest.mark.parametrize(
    "text", ["20", "infGB", "nanGB", "-3GB", "0GB", "GB", "3 GBs", "", "9e999TB"]
)
def test_a_size_that_is_none_is_refused(text: str) -> None:
    with pytest.raises(CheckpointValueError, match=r"--pool is .*; expected a size .* Try --pool"):
        bytes_of("--pool", text)


def test_a_size_without_a_unit_is_offered_one() -> None:
    """20 bytes were never meant."""
    with pytest.raises(CheckpointValueError, match="Try --pool 20GB"):
        bytes_of("--pool", "20")


def test_commas_in_brackets_do_not_part_names() -> None:
    assert names_of("a(1, [2, 3]),b") == ["a(1, [2, 3])", "b"]


def test_an_unknown_name_is_answered_with_the_one_it_resembles() -> None:
    with pytest.raises(CheckpointValueError, match=r"--layer is 'kimi'; .* Try 'kimi-k3'"):
        choices_of("--layer", "kimi", ["qwen3-next", "kimi-k3"])
