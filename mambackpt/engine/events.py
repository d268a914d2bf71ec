"""What happens in a step, as data: the animations draw these, the check reads the rest."""

from dataclasses import dataclass
from typing import Literal, TypeAlias

Role: TypeAlias = Literal["attention", "running", "checkpoint", "speculative", "copy"]


@dataclass(frozen=True, slots=True)
class Event:
    """Something that a request caused in a step; group 0 is attention, 1 and on are recurrent."""

    step: int
    request: str


@dataclass(frozen=True, slots=True)
class Scheduled(Event):
    """The query [start, end) runs in this step."""

    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Deferred(Event):
    """The request waits for the next step, and why."""

    reason: str


@dataclass(frozen=True, slots=True)
class Allocated(Event):
    """A block takes a place in the request's row; a copy is what its column will work on."""

    group: int
    column: int
    block: int
    role: Role


@dataclass(frozen=True, slots=True)
class Copied(Event):
    """A state is copied from block to block before the forward pass (or after it, for drafts)."""

    group: int
    source: int
    target: int


@dataclass(frozen=True, slots=True)
class Written(Event):
    """The forward pass stores the state after ``position`` tokens of the request."""

    group: int
    column: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class Keyed(Event):
    """From now on a lookup finds this block for the first ``position`` tokens."""

    group: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class Unkeyed(Event):
    """The key is taken from the block, which stays in use."""

    group: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class Hit(Event):
    """The request resumes after ``position`` tokens from this block."""

    group: int
    position: int
    block: int


@dataclass(frozen=True, slots=True)
class Evicted(Event):
    """The block is reused for this request and loses its key."""

    group: int
    block: int
    position: int


@dataclass(frozen=True, slots=True)
class Freed(Event):
    """Nobody refers to the block any more; its key, if any, stays until it is reused."""

    block: int


@dataclass(frozen=True, slots=True)
class Preempted(Event):
    """The request loses its blocks and starts again from the longest hit."""


@dataclass(frozen=True, slots=True)
class Aborted(Event):
    """The request is gone; what its step would have written and keyed never happens."""


@dataclass(frozen=True, slots=True)
class Finished(Event):
    """The request has its last token."""
