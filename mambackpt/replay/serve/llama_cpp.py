"""The cache of llama.cpp's server, one slot, as build b11549 was seen to work.

Glossary, all counts in tokens:

* L: length of the prompt. b: ``batch``, what one step computes at most. ub: ``ubatch``, at most b.
* context: what a slot, or host memory, holds of one conversation: attention cache, the live end and
  checkpoints. A slot has one; with ``host_cache`` others wait in host memory, as many as there are.
* live end: the state that a context ends with, after L tokens, or L + outputs - 1.
* checkpoint: a copy of the state at a position, made when a batch begins there.
* tail: where batches end near the end of a prompt, L - min(b, 4 + ub) and L - min(b, 4).
* newest: the last checkpoint of a context's list.

Read `Slot.serve` first: it is the order of events. Held to the running server by
``python -m mambackpt conformance --engine llama.cpp``.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from mambackpt.errors import CheckpointTypeError, checked_choice, checked_int
from mambackpt.replay.serve.requests import Served, TokenRequest, shared_length

STEPS_BACK = 4  # tokens before the end of the prompt that the last batch begins at

# A prompt goes on in the slot's context where more than 1 in 10 of its own tokens are there already
# and at least half of the context would be kept; in one of host memory where a quarter would be.
LEAST_OF_PROMPT = np.float32(0.1)
LEAST_OF_SLOT = np.float32(0.5)
LEAST_OF_HOST = np.float32(0.25)


class Placement(NamedTuple):
    """What differs between releases: what is kept where a batch begins.

    ``messages``: whether batches end before user messages, of which the last and those that begin
    more than ``min_step`` after the newest checkpoint are kept. ``near_end``: batches that end near
    the prompt's end keep one however close to the newest. ``spacing``: how close the others may not
    come; None is ``min_step``. ``periodic``: whatever begins ``min_step`` after the newest is kept.
    ``least``: tokens computed before anything is.
    """

    messages: bool = True
    near_end: bool = True
    spacing: int | None = None
    periodic: bool = False
    least: int = 0


# By the oldest release known to place so, each held to that release on prompts by themselves.
# Placement only: lookup and eviction are those of b11549.
RELEASES = {
    "b9294": Placement(messages=False, near_end=False, spacing=64, periodic=True, least=64),
    "b9873": Placement(near_end=False),
    "b10229": Placement(),
}


@dataclass(frozen=True, slots=True)
class LlamaCppSettings:
    """The server's options, in tokens and counts; the comment is the option's name.

    >>> LlamaCppSettings(batch=64).ubatch
    64
    """

    batch: int = 2048  # --batch-size
    ubatch: int = 512  # --ubatch-size
    checkpoints: int = 32  # --ctx-checkpoints
    min_step: int = 8192  # --checkpoint-min-step
    host_cache: bool = True  # --cache-ram over 0
    version: str = "b10229"

    def __post_init__(self) -> None:
        checked_int("batch", self.batch)
        checked_int("ubatch", self.ubatch)
        checked_int("checkpoints", self.checkpoints, least=0, unit="checkpoints")
        checked_int("min_step", self.min_step, least=0)
        if not isinstance(self.host_cache, bool):
            raise CheckpointTypeError(
                f"host_cache is {self.host_cache!r}; expected True or False. Try True."
            )
        checked_choice("version", self.version, RELEASES)
        object.__setattr__(self, "ubatch", min(self.ubatch, self.batch))

    @property
    def placement(self) -> Placement:
        """How this release places checkpoints."""
        return RELEASES[self.version]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A request as a slot sees it: ids, each of ``grain`` tokens, and lengths in tokens.

    ``ids`` are the prompt's, ``after`` those of the context that it leaves behind, ``live`` its
    length. ``users``: where user messages start, in tokens.
    """

    ids: Sequence[int]
    length: int
    after: Sequence[int]
    live: int
    users: Sequence[int] = ()

    @classmethod
    def of(cls, request: TokenRequest) -> "Prompt":
        """The prompt of a list of tokens; the last output is not computed, so no state has it."""
        tokens = tuple(request.tokens)
        after = tokens + tuple(request.outputs[:-1])
        return cls(tokens, len(tokens), after, len(after), request.users)


class State(NamedTuple):
    """A state after ``position`` tokens, made by the request with this number."""

    position: int
    request: int


NOTHING = State(0, 0)


@dataclass(slots=True)
class Context:
    """One conversation's ids, its live end, and its checkpoints, oldest first."""

    ids: Sequence[int] = ()
    live: State = NOTHING
    checkpoints: list[State] = field(default_factory=list)


class Slot:
    """One slot of the server and the contexts that wait in host memory."""

    spared = 1  # how far above the resume position a checkpoint is not erased

    def __init__(self, settings: LlamaCppSettings, grain: int = 1) -> None:
        self.settings, self.grain = settings, grain
        self.context = Context()
        self.waiting: list[Context] = []
        self.request = 0
        self.erased: list[int] = []  # positions that the last request erased, in order of time

    def serve(self, prompt: Prompt) -> Served:
        """Serve one prompt: choose a context, resume in it, erase what is above, prefill."""
        self.request += 1
        self.erased = []
        self.choose(prompt)
        shared = self.shared(self.context.ids, prompt.ids)
        state = self.restore(shared, prompt)
        self.erase(state.position)
        reused = min(state.position, prompt.length - 1)
        created = list(self.prefill(reused, prompt))
        self.context.ids = prompt.after
        self.context.live = State(prompt.live, self.request)
        kept = sorted(checkpoint.position for checkpoint in self.context.checkpoints)
        attention = min(shared, prompt.length - 1)
        return Served(attention, reused, None, tuple(created), tuple(kept))

    def shared(self, ours: Sequence[int], theirs: Sequence[int]) -> int:
        """Tokens that two lists of ids begin with together."""
        return shared_length(ours, theirs) * self.grain

    # --- the context ------------------------------------------------------------------------------

    def choose(self, prompt: Prompt) -> None:
        """Leave the slot's context for a better one where the prompt would keep little of it."""
        context = self.context
        if not (self.settings.host_cache and context.live.position):
            return
        shared = self.shared(context.ids, prompt.ids)
        of_prompt, of_context = (
            share_of(shared, prompt.length),
            share_of(shared, context.live.position),
        )
        if of_prompt > LEAST_OF_PROMPT and of_context >= LEAST_OF_SLOT:
            return
        self.save()
        better = self.best_waiting(prompt, of_prompt, of_context)
        if better is not None:
            self.take(better)

    def save(self) -> None:
        """Copy the slot's context to host memory, in the place of those that it extends."""
        context = self.context
        if any(self.begins_with(other, context) for other in self.waiting):
            return
        self.waiting = [other for other in self.waiting if not self.begins_with(context, other)]
        self.waiting.append(replace(context, checkpoints=list(context.checkpoints)))

    def take(self, context: Context) -> None:
        """Move a waiting context into the slot; what the slot held is gone, if it is not saved."""
        self.waiting = [other for other in self.waiting if other is not context]
        self.context = context

    def begins_with(self, longer: Context, shorter: Context) -> bool:
        """Whether a context holds everything that another one does."""
        return self.shared(longer.ids, shorter.ids) == shorter.live.position

    def best_waiting(
        self, prompt: Prompt, of_prompt: np.float32, of_context: np.float32
    ) -> Context | None:
        """The last waiting context that has more of the prompt, and is kept more of, than before.

        "Before" begins with the slot's own context, then is the best one so far.
        """
        best = None
        for context in self.waiting:
            shared = self.shared(context.ids, prompt.ids)
            more_of_prompt = share_of(shared, prompt.length)
            more_kept = share_of(shared, context.live.position)
            if more_kept >= LEAST_OF_HOST and more_kept > of_context and more_of_prompt > of_prompt:
                best, of_prompt, of_context = context, more_of_prompt, more_kept
        return best

    # --- resuming ---------------------------------------------------------------------------------

    def restore(self, shared: int, prompt: Prompt) -> State:
        """The state to resume after: the live end, else the newest checkpoint that fits."""
        most = min(shared, prompt.length - 1)  # at least one token is computed
        if self.context.live.position <= most:
            return self.context.live
        for checkpoint in reversed(self.context.checkpoints):
            if checkpoint.position <= max(most, 1 if shared else 0):
                return checkpoint
        return NOTHING

    def erase(self, resume: int) -> None:
        """Erase checkpoints above the resume position, but the one exactly a token above it.

        That one was made one token later on the path of another prompt: see `serve.stale`.
        """
        spared = resume + self.spared
        self.forget([state for state in self.context.checkpoints if state.position > spared])

    def forget(self, gone: list[State]) -> None:
        """Erase these checkpoints of the slot's context."""
        self.erased += [checkpoint.position for checkpoint in gone]
        checkpoints = self.context.checkpoints
        checkpoints[:] = [checkpoint for checkpoint in checkpoints if checkpoint not in gone]

    # --- prefill ----------------------------------------------------------------------------------

    def prefill(self, start: int, prompt: Prompt) -> Iterator[int]:
        """Compute batch after batch; make and yield checkpoints where a batch begins."""
        users = prompt.users if self.settings.placement.messages else ()
        while start < prompt.length:
            end = self.batch_end(start, prompt.length, users)
            near = end + self.settings.ubatch > prompt.length
            wanted = near or start in users or self.is_due(start)
            exempt = start in users[-1:] or (near and self.settings.placement.near_end)
            if wanted and (exempt or self.is_apart(start)) and self.may_keep(start, end):
                self.create(start)
                yield start
            start = end

    def batch_end(self, start: int, L: int, users: Sequence[int]) -> int:
        """Where the batch that begins at ``start`` ends."""
        b, ub = self.settings.batch, self.settings.ubatch
        ends = [start + b, L, L - min(b, STEPS_BACK + ub), L - min(b, STEPS_BACK)]
        spaced = self.newest + self.settings.min_step if self.context.checkpoints else -1
        ends += [user for user in users if user > spaced or user == users[-1]]
        return min(end for end in ends if end > start)

    def is_due(self, start: int) -> bool:
        """Whether a checkpoint is due by its distance alone."""
        step = self.settings.min_step
        return self.settings.placement.periodic and 0 < step <= start - self.newest

    def is_apart(self, start: int) -> bool:
        """Whether a checkpoint would not crowd the newest."""
        spacing = self.settings.placement.spacing
        spacing = self.settings.min_step if spacing is None else spacing
        return not self.context.checkpoints or start > self.newest + spacing

    def may_keep(self, start: int, end: int) -> bool:
        """Whether there is a state to keep, and somewhere to."""
        return start > 0 and self.settings.checkpoints > 0 and end >= self.settings.placement.least

    @property
    def newest(self) -> int:
        """Position of the newest checkpoint, 0 without one."""
        return self.context.checkpoints[-1].position if self.context.checkpoints else 0

    def create(self, position: int) -> None:
        """Make a checkpoint, and room for it; one at the same position is replaced."""
        checkpoints, most = self.context.checkpoints, self.settings.checkpoints
        self.forget(self.crowding(len(checkpoints) - (most - 2)))
        self.forget(checkpoints[: max(len(checkpoints) - (most - 1), 0)])
        self.forget([checkpoint for checkpoint in checkpoints if checkpoint.position == position])
        checkpoints.append(State(position, self.request))

    def crowding(self, most: int) -> list[State]:
        """Up to ``most`` checkpoints of other requests within ``min_step`` of the one before."""
        crowd: list[State] = []
        before: State | None = None
        for checkpoint in self.context.checkpoints:
            near = before and checkpoint.position <= before.position + self.settings.min_step
            if near and checkpoint.request != self.request and len(crowd) < most:
                crowd.append(checkpoint)
            else:
                before = checkpoint
        return crowd


def share_of(part: int, whole: int) -> np.float32:
    """A part of a whole as the server compares it: in single precision."""
    return np.float32(part) / np.float32(whole)


def serve(
    requests: Iterable[TokenRequest],
    *,
    batch: int = 2048,
    ubatch: int = 512,
    checkpoints: int = 32,
    min_step: int = 8192,
    host_cache: bool = True,
    version: str = "b10229",
) -> list[Served]:
    """Serve token lists with one slot of llama.cpp's server.

    >>> [served] = serve([TokenRequest(range(14252))])
    >>> served.created
    (13736, 14248)

    ``attention`` is what the prompt shares with the context that it is served from, at most all but
    its last token. ``created`` and ``kept`` are checkpoints; the live end, after L tokens or
    L + outputs - 1, is a state besides. ``branch`` is None. ``checkpoints`` is the most that a
    context has; host memory has no limit here. Source: the running server of b11549; older versions
    by their placement only.
    """
    settings = LlamaCppSettings(batch, ubatch, checkpoints, min_step, host_cache, version)
    slot = Slot(settings)
    return [slot.serve(Prompt.of(request)) for request in requests]


def serve_llama_cpp(
    requests: Iterable[TokenRequest], **settings: Any
) -> Iterator[tuple[Served, tuple[int, ...]]]:
    """Serve as `serve` does, and tell too which positions each request erased, in order of time.

    >>> again = [TokenRequest(range(1000)), TokenRequest(range(990))]
    >>> [erased for _, erased in serve_llama_cpp(again)]
    [(), (996, 484)]

    A checkpoint that is replaced by one at the same position is erased.
    """
    slot = Slot(LlamaCppSettings(**settings))
    for request in requests:
        served = slot.serve(Prompt.of(request))
        yield served, tuple(slot.erased)
