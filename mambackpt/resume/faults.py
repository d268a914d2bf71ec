"""What goes wrong when a state is restored, each fault runnable and held against the same check.

To add one, decorate a function that returns the logits of a cold run and of the faulty one. Unless
a fault says otherwise, a prompt of 128 tokens resumes after 64 of them.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import torch

from mambackpt.engine import Request, Settings, simulate
from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.geometry import CacheGeometry
from mambackpt.resume.architectures import (
    ARCHITECTURES,
    VOCABULARY,
    Run,
    TinyModel,
    load_model,
    one_thread,
    random_prompt,
)
from mambackpt.resume.check import Comparison, compare, spread
from mambackpt.resume.pools import Pools, ShortWindows, Stored
from mambackpt.resume.state import take_states

PROMPT, CUT = 128, 64
Answers: TypeAlias = tuple[torch.Tensor, torch.Tensor]  # logits of a cold run, and of a faulty one


@dataclass(frozen=True, slots=True)
class Fault:
    """One way to restore a wrong state: what happens, and whom it can happen to.

    ``concerns`` says whether a model has what the fault needs.
    """

    name: str
    sentence: str
    answers: Callable[[TinyModel], Answers]
    concerns: Callable[[TinyModel], bool]

    def check(self, model: TinyModel) -> Comparison:
        """Return how the faulty answer differs from the cold one: the check of a right resume."""
        with one_thread():
            return compare(*self.answers(model), spread(model))


FAULTS: dict[str, Fault] = {}


def everyone(_: TinyModel) -> bool:
    """Return True: every model has a window."""
    return True


def with_memory(model: TinyModel) -> bool:
    """Return whether a model's recurrent layers have a memory beside their window."""
    return model.architecture.scan is not None


def on_any_token(model: TinyModel) -> bool:
    """Return whether a memory can be emitted after any token, also closer than a window."""
    return with_memory(model) and model.architecture.alignment == 1


def named(
    name: str, sentence: str, concerns: Callable[[TinyModel], bool] = everyone
) -> Callable[[Callable[[TinyModel], Answers]], Callable[[TinyModel], Answers]]:
    """Register the function below as the fault of this name."""

    def register(function: Callable[[TinyModel], Answers]) -> Callable[[TinyModel], Answers]:
        FAULTS[name] = Fault(name, sentence, function, concerns)
        return function

    return register


def _pools(model: TinyModel, memory_dtype: torch.dtype | None = None) -> Pools:
    geometry = CacheGeometry(CUT, CUT, model.architecture.alignment, CUT)
    return Pools(model, geometry, memory_dtype=memory_dtype)


def _resumed(model: TinyModel, prompt: list[int], pools: Pools, stored: Stored) -> Answers:
    cut = stored.position
    resumed = model.run(prompt[cut:], pools.restore(stored)).logits
    return model.run(prompt).logits[cut:], resumed


@named("window after the convolution", "values behind the convolution are stored as its window")
def _after_convolution(model: TinyModel) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model)
    [stored] = pools.store([model.run(prompt)], raw=convolved)
    return _resumed(model, prompt, pools, stored)


def convolved(model: TinyModel, run: Run) -> list[torch.Tensor]:
    """Return what the convolution of each recurrent layer makes of its inputs, [tokens, width]."""
    kernels = [part for part in model.module.modules() if isinstance(part, torch.nn.Conv1d)]
    act = torch.nn.functional.silu if with_memory(model) else torch.nn.Identity()
    with torch.no_grad():
        return [
            act(kernel(raw.T[None])[0, :, : len(raw)].T)
            for kernel, raw in zip(kernels, run.raw, strict=True)
        ]


@named("window one token late", "the window ends one token after the memory")
def _one_late(model: TinyModel) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model)
    return _resumed(model, prompt, pools, _stored_late(pools, model.run(prompt)))


def _stored_late(pools: Pools, run: Run) -> Stored:
    [late] = pools.store([run], raw=lambda _, run: [raw.roll(-1, 0) for raw in run.raw])
    return late


@one_thread()
def late_memories(model: TinyModel, after: Sequence[int] = (3, 16, 64)) -> dict[int, float]:
    """Return how far memories are off, so many tokens after a resume with a window one token late.

    >>> errors = late_memories(load_model("mamba-2"))
    >>> errors[3] > 0.5 > errors[64] > 0
    True

    Of the layer that is furthest off: the norm of the error, as a share of the memory's.
    """
    prompt, pools = random_prompt(PROMPT), _pools(model)
    run = model.run(prompt)
    kept = (*pools.store([run]), _stored_late(pools, run))
    errors = {}
    for count in after:
        words = prompt[CUT : CUT + count]
        right, late = (
            take_states(model.architecture, model.run(words, pools.restore(stored)).cache)
            for stored in kept
        )
        errors[count] = max(
            float((one.memory - other.memory).norm() / one.memory.norm())
            for one, other in zip(right, late, strict=True)
            if one.memory is not None and other.memory is not None
        )
    return errors


@named(
    "stale window",
    "a cut two tokens after the query's start stores the memory and leaves an old window",
    on_any_token,
)
def _stale_window(model: TinyModel) -> Answers:
    return short_cut(model, "engine")


def short_cut(model: TinyModel, short_windows: ShortWindows) -> Answers:
    """Cut two tokens into a query that starts at 64, in a block where another request has been.

    "engine" leaves that request's window in the block, "complete" takes the missing input from the
    window before the query, which is right.
    """
    prompt, pools = random_prompt(PROMPT), Pools(model, CacheGeometry(2, 2, 1, 2), blocks=200)
    other = pools.store_ends([model.run(random_prompt(CUT, 1))])[0]
    first = model.run(prompt[:CUT])
    before = take_states(model.architecture, first.cache)
    running = model.run(prompt[CUT : CUT + 3], first.cache)
    table = pools.table([CUT + 3])
    table[0, -2] = other.block
    [stored] = pools.store(
        [running], start=CUT, initial=before, short_windows=short_windows, table=table
    )
    return _resumed(model, prompt, pools, stored)


@named("another request's state", "two rows of a step are exchanged")
def _exchanged(model: TinyModel) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model)
    mine, other = pools.store([model.run(prompt), model.run(random_prompt(PROMPT, 1))])
    return _resumed(model, prompt, pools, replace(mine, block=other.block))


@named("another request's memory", "the window is right, the memory another's", with_memory)
def _exchanged_memory(model: TinyModel) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model)
    mine, other = pools.store([model.run(prompt), model.run(random_prompt(PROMPT, 1))])
    for pool in pools.states:
        if pool.memories is not None:
            pool.memories[mine.block] = pool.memories[other.block]
    return _resumed(model, prompt, pools, mine)


def _unwritten(model: TinyModel, byte: int) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model)
    [stored] = pools.store([model.run(prompt)])
    [reserved] = pools.take(1)
    for pool in pools.states:
        pool.pages[reserved] = byte
    return _resumed(model, prompt, pools, replace(stored, block=reserved))


@named("never written, zeros", "a block was reserved and keyed, and holds zeros")
def _zeros(model: TinyModel) -> Answers:
    return _unwritten(model, 0)


@named("never written, NaN", "a block was reserved and keyed, and holds what is no number")
def _nan(model: TinyModel) -> Answers:
    return _unwritten(model, 0xFF)


@dataclass(frozen=True, slots=True)
class WrongRestore:
    """A hit of the released rules that promises more tokens than the block's state has read."""

    prompt: tuple[int, ...]
    promised: int
    held: int


def wrong_restore() -> WrongRestore:
    """Run the three requests of notebook 04 under the released rules, and return the wrong hit.

    >>> wrong = wrong_restore()
    >>> len(wrong.prompt), wrong.promised, wrong.held
    (140, 128, 96)
    """
    first = Request("A", range(100), range(1000, 1041))
    second = Request("B", [*first.history[:139], *range(2000, 2261)])
    third = Request("C", [*first.history[:130], *range(3000, 3010)])
    run = simulate([first, second, third], Settings(retention=0, max_running=1))
    [wrong] = [one for one in run.violations if one.kind == "wrong restore"]
    if wrong.claimed is None or wrong.held is None:
        raise CheckpointValueError(
            f"the wrong restore is {wrong}; expected a claim and a state. Try notebook 04's rules."
        )
    words = tuple(token % VOCABULARY for token in third.prompt)
    return WrongRestore(words, wrong.claimed, wrong.held)


@named("the released wrong restore", "a key promises 128 tokens, its block holds the state of 96")
def _released(model: TinyModel) -> Answers:
    prompt, pools, _, wrong = _released_pools(model)
    return _resumed(model, prompt, pools, wrong)


def _released_pools(model: TinyModel) -> tuple[list[int], Pools, Stored, Stored]:
    """The prompt of the wrong hit, the pools, what its key promises, and what its block holds."""
    wrong = wrong_restore()
    prompt, pools = list(wrong.prompt), Pools(model, CacheGeometry(16, 64, None, 16))
    held, promised = pools.store_ends(
        [model.run(prompt[: wrong.held]), model.run(prompt[: wrong.promised])]
    )
    return prompt, pools, promised, replace(promised, block=held.block)


@one_thread()
def released_answers(model: TinyModel, length: int = 24) -> tuple[list[int], list[int]]:
    """Return what a model says after the wrong hit's prompt: from the right state, and from it.

    >>> right, wrong = released_answers(load_model("mamba-2"), 4)
    >>> len(right), len(wrong)
    (4, 4)

    Always the likeliest token.
    """
    prompt, pools, *kept = _released_pools(model)
    answers = []
    for stored in kept:
        run = model.run(prompt[stored.position :], pools.restore(stored))
        said = [int(run.logits[-1].argmax())]
        while len(said) < length:
            run = model.run(said[-1:], run.cache)
            said.append(int(run.logits[-1].argmax()))
        answers.append(said)
    return answers[0], answers[1]


@named("memory stored in bf16", "a float32 memory is rounded on its way to the pool", with_memory)
def _rounded(model: TinyModel) -> Answers:
    prompt, pools = random_prompt(PROMPT), _pools(model, torch.bfloat16)
    [stored] = pools.store([model.run(prompt)])
    return _resumed(model, prompt, pools, stored)


def ignores_old_names(model: TinyModel) -> bool:
    """Return whether a model takes an argument that it does not know, and says nothing."""
    return model.architecture.name == "mamba-2"


@named("the cache is not used", "it has a name that the model ignores", ignores_old_names)
def _ignored(model: TinyModel) -> Answers:
    prompt = random_prompt(PROMPT)
    cache = model.run(prompt[:CUT]).cache
    with torch.no_grad(), one_thread():
        rest = torch.tensor([prompt[CUT:]])
        answer = model.module(rest, past_key_values=cache, use_cache=True)
    return model.run(prompt).logits[CUT:], answer.logits[0]


def find_fault(name: str) -> Fault:
    """Return the fault of this name.

    >>> find_fault("stale window").concerns(load_model("lfm2"))
    False

    Raises CheckpointValueError for another name.
    """
    return FAULTS[checked_choice("fault", name, FAULTS)]


def fault_rows(names: Iterable[str] = ARCHITECTURES) -> list[tuple[str, Fault, Comparison]]:
    """Return what each fault changes, on each of these architectures that it concerns.

    >>> any(comparison.equal for _, _, comparison in fault_rows(["lfm2"]))
    False
    """
    models = [load_model(name) for name in names]
    return [
        (model.architecture.name, fault, fault.check(model))
        for fault in FAULTS.values()
        for model in models
        if fault.concerns(model)
    ]


@dataclass(frozen=True, slots=True)
class Rounding:
    """Errors of logits when a float32 memory is stored in bf16, so many tokens after the resume.

    ``once`` is stored once; ``cycles`` is stored and restored again after every block, ten times.
    """

    once: dict[int, float]
    cycles: dict[int, float]
    changed_once: int
    changed_cycles: int
    allowed: float


@one_thread()
def bf16_errors(model: TinyModel, after: tuple[int, ...] = (1, 10, 100, 1000)) -> Rounding:
    """Return the error of bf16 memories 1, 10, 100 and 1,000 tokens after a resume, and in cycles.

    The cycles store after 64, 128, ... 640 tokens; their errors are those after the last resume.
    """
    cycles = 10
    last = CUT * cycles
    prompt = random_prompt(last + max(after))
    cold = model.run(prompt).logits[last:]
    pools = _pools(model, torch.bfloat16)
    once, again = pools.stored_once(model.run(prompt[:last]).cache), None
    for end in range(CUT, last + 1, CUT):
        again = pools.stored_once(model.run(prompt[end - CUT : end], again).cache)
    compared = [
        compare(cold, model.run(prompt[last:], cache).logits, spread(model))
        for cache in (once, again)
    ]
    errors = [{n: one.by_token[n - 1] for n in after} for one in compared]
    changed = [one.changed for one in compared]
    return Rounding(errors[0], errors[1], changed[0], changed[1], compared[0].allowed)
