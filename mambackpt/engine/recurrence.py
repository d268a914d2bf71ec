"""A small real recurrence: a width-4 causal convolution and a gated linear state, modulo a prime.

Integers make equality exact: one wrong state, and the sampled tokens differ.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Integers = NDArray[np.int64]

PRIME = 65521  # sums of four products of residues stay far below 2**63
WIDTH = 4  # taps of the convolution, so a state keeps the last three raw inputs
CHANNELS = 4


class State(NamedTuple):
    """What a recurrent layer must save to resume: raw inputs and the gated sum.

    ``window`` [WIDTH - 1, CHANNELS] holds the last inputs *before* the convolution, oldest first;
    ``memory`` [CHANNELS] the recurrent state.
    """

    window: Integers
    memory: Integers


class Recurrence:
    """One recurrent layer with fixed random weights; a layer per group.

    >>> layer = Recurrence(group=1)
    >>> whole = layer.run(layer.initial(), [5, 6, 7, 8])
    >>> parts = layer.run(layer.run(layer.initial(), [5, 6]), [7, 8])
    >>> bool((whole.memory == parts.memory).all() and (whole.window == parts.window).all())
    True

    Tokens are ints from 0 on; every value is a residue modulo `PRIME`.
    """

    def __init__(self, group: int = 1) -> None:
        weights = np.random.default_rng(group)
        self.embed, self.shift, self.slope, self.bias, self.read = weights.integers(
            1, PRIME, (5, CHANNELS)
        )
        self.taps = weights.integers(1, PRIME, (WIDTH, CHANNELS))

    def initial(self) -> State:
        """Return the state before the first token: zeros."""
        return State(np.zeros((WIDTH - 1, CHANNELS), np.int64), np.zeros(CHANNELS, np.int64))

    def inputs(self, tokens: Sequence[int]) -> Integers:
        """Return the raw inputs [tokens, CHANNELS] of the convolution."""
        ids = np.asarray(tokens, np.int64).reshape(-1, 1) % PRIME
        raw: Integers = (ids * self.embed + self.shift) % PRIME
        return raw

    def run(self, state: State, tokens: Sequence[int]) -> State:
        """Return the state after these tokens; the given one is not changed."""
        raw = np.concatenate([state.window, self.inputs(tokens)])
        steps = len(raw) - (WIDTH - 1)
        mixed = sum(raw[k : k + steps] * self.taps[k] for k in range(WIDTH)) % PRIME
        gates = (mixed * self.slope + self.bias) % PRIME
        memory = state.memory
        for gate, value in zip(gates, mixed, strict=True):
            memory = (memory * gate + value) % PRIME
        return State(raw[steps:], memory)

    def emit(self, state: State) -> int:
        """Return the token that this layer votes for."""
        return int((state.memory * self.read).sum() % PRIME)
