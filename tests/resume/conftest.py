"""Every table of the room, computed once for all tests that look at it."""

import pytest

from mambackpt.resume import Comparison, Fault, Row, Way, equality_rows, fault_rows, gap_ways


@pytest.fixture(scope="session")
def equality() -> list[Row]:
    return equality_rows()


@pytest.fixture(scope="session")
def faults() -> list[tuple[str, Fault, Comparison]]:
    return fault_rows()


@pytest.fixture(scope="session")
def ways() -> dict[str, Way]:
    return {way.name: way for way in gap_ways()}
