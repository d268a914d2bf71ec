"""The examples in the kernels' docstrings run; pytest cannot collect them through the link."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["store_checkpoints", "flat_store", "torch_copies"])
def test_every_example_of_the_kernels_runs(name: str) -> None:
    module = importlib.import_module(f"mambackpt.kernels.{name}")
    failed, attempted = doctest.testmod(module)
    assert failed == 0
    assert attempted > 0, "a file without examples: nothing was run"
