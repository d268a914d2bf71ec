"""What an engine is asked and what it answers, whichever engine it is."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from operator import index
from typing import TypeAlias

from mambackpt.errors import CheckpointTypeError, CheckpointValueError


@dataclass(frozen=True, slots=True)
class TokenRequest:
    """A prompt, the tokens that the model answered with, and where user messages start.

    >>> TokenRequest([5, 6, 7, 8, 9], outputs=[1, 2], users=[0, 3]).users
    (0, 3)

    ``tokens`` are any integers, at least one; ``users`` are positions in the prompt, ascending.
    Raises CheckpointTypeError for tokens that are no integers, CheckpointValueError for an empty
    prompt or a start outside of it.
    """

    tokens: Sequence[int]
    outputs: Sequence[int] = ()
    users: Sequence[int] = ()

    def __post_init__(self) -> None:
        for name in ("tokens", "outputs", "users"):
            object.__setattr__(self, name, _integers(name, getattr(self, name)))
        if not self.tokens:
            raise CheckpointValueError("tokens are empty; expected at least one. Try tokens=[1].")
        inside = [start for start in sorted({*self.users}) if 0 <= start < len(self.tokens)]
        if list(self.users) != inside:
            raise CheckpointValueError(
                f"users is {list(self.users)} for a prompt of {len(self.tokens)} tokens; expected "
                f"ascending positions from 0 to {len(self.tokens) - 1}. Try users={inside}."
            )


@dataclass(frozen=True, slots=True)
class Served:
    """What an engine did with one request, all in tokens.

    ``attention``: the longest prefix whose attention cache was there. ``reused``: the state it
    resumed after. ``branch``: the branching point, None without one; SGLang's lookup names it, the
    others' is where a state was made for it.
    ``created``: positions of the states made by this request, those of decode steps included.
    ``kept``: positions of the states that the engine holds afterwards on the path of the prompt and
    its outputs. Both ascend.
    """

    attention: int
    reused: int
    branch: int | None
    created: tuple[int, ...]
    kept: tuple[int, ...]


RequestLike: TypeAlias = "TokenRequest | Iterable[int]"


def as_request(request: RequestLike) -> TokenRequest:
    """Return the request of a plain list of tokens; a `TokenRequest` as it is.

    >>> as_request(range(3)).tokens
    (0, 1, 2)
    """
    return request if isinstance(request, TokenRequest) else TokenRequest(tuple(request))


def shared_length(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """Return how many tokens two sequences begin with together.

    >>> shared_length([1, 2, 3, 4], [1, 2, 9])
    2
    """
    length = min(len(ours), len(theirs))
    if ours[:length] == theirs[:length]:
        return length
    for place, (one, other) in enumerate(zip(ours, theirs, strict=False)):
        if one != other:
            return place
    return length


def _integers(name: str, values: Iterable[int]) -> tuple[int, ...]:
    try:
        return tuple(map(index, values))
    except TypeError as error:
        raise CheckpointTypeError(
            f"{name} is {values!r:.60}; expected integers in order. Try {name}=[1, 2, 3]."
        ) from error
