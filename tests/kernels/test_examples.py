"""The examples in the kernels' docstrings run; pytest cannot collect them through the link."""

import doctest
import importlib

import pytest


@pytest.mark.parametrize("name", ["store_checkpoints", "flat_store", "torch_copies"])
def test_every_example_of_the_kernels_runs(name: str) -> None:
    module = importlib.import_module(f"mambackpt.kernels.{name}")
    assert doctest.testmod(module).failed == 0
