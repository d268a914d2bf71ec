"""The explorer of three requests that branch: who restores a state that is not its own?"""

from mambackpt.draw import prefilled_lanes
from mambackpt.engine import VARIANTS, Request, Settings, simulate
from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.explore.controls import Knob, Values, knob_widgets
from mambackpt.explore.lanes import View, explore_knobs_of
from mambackpt.explore.widgets import Code, Explorer, Habits
from mambackpt.explore.words import command_line

_FIRST, _ANSWER = 100, 41  # tokens of A's prompt, and of its answer
_HISTORY = _FIRST + _ANSWER


def branches_view(
    shared: int = 139, length: int = 400, third: int = 130, *, variant: str = "vllm-0.33"
) -> View:
    """Return what three requests leave in their blocks, and which keys and restores are wrong.

    >>> view = branches_view(139, 400, 130)
    >>> print(view.finding)
    Under vllm-0.33, 1 key leads to another state and 1 request resumes from a wrong one.

    A has 100 tokens and an answer of 41; B shares the first ``shared`` of these and has ``length``;
    C shares the first ``third`` and has 10 more. Blocks of 64 tokens, hash units of 16, one request
    at a time. Raises CheckpointValueError for a share that A does not have or B is not longer than.
    """
    for name, tokens in (("shared", shared), ("third", third)):
        if checked_int(name, tokens) > _HISTORY:
            raise CheckpointValueError(
                f"{name} is {tokens:,} and A has {_HISTORY} tokens; expected at most as many. "
                f"Try {_HISTORY}."
            )
    if not shared < checked_int("length", length) <= 8192:
        raise CheckpointValueError(
            f"length is {length:,} and shared is {shared:,}; expected more, and at most 8,192. "
            f"Try {shared + 100}."
        )
    checked_choice("variant", variant, VARIANTS)
    first = Request("A", range(_FIRST), range(1000, 1000 + _ANSWER))
    second = Request("B", [*first.history[:shared], *range(2000, 2000 + length - shared)])
    requests = [first, second, Request("C", [*first.history[:third], *range(3000, 3010)])]
    settings = Settings(max_running=1, variant=variant)
    counts = simulate(requests, settings).counts
    wrong, restored = counts.mislabelled + counts.inherited, counts.wrong_restores
    finding = f"Under {variant}, " + (
        f"{wrong} key{'s' * (wrong != 1)} lead{'s' * (wrong == 1)} to another state and {restored} "
        f"request{'s' * (restored != 1)} resume{'s' * (restored == 1)} from a wrong one."
        if wrong or restored
        else "every key leads to the state that it promises."
    )
    lanes = tuple(frame.captioned for frame in prefilled_lanes(requests, settings))
    return View(finding, lanes)


def branches_knobs(shared: int = 139, length: int = 400, third: int = 130) -> dict[str, Knob]:
    """Return what can be moved in a view of branches."""
    return {
        "shared": Knob(label="B shares with A", option="shared", value=shared, most=_HISTORY),
        "length": Knob(label="B has", option="length", value=length, least=142, most=500),
        "third": Knob(label="C shares with A", option="third", value=third, most=_HISTORY),
        "variant": Knob(
            label="scheduler rules", option="variant", value="vllm-0.33", choices=tuple(VARIANTS)
        ),
    }


def branched(shared: int, length: int, third: int, variant: str) -> View:
    """Return the view of the knobs' values."""
    return branches_view(shared, length, third, variant=variant)


def _python_of(values: Values) -> str:
    shared, length, third, variant = values.values()
    return (
        "from mambackpt.explore import branches_view; "
        f"view = branches_view({shared}, {length}, {third}, variant={variant!r})"
    )


def explore_branches(shared: int = 139, length: int = 400, third: int = 130) -> Explorer:
    """Return an explorer of three requests that branch: what B and C share decides what is wrong.

    >>> explorer = explore_branches(third=127)
    >>> "1 key leads to another state and 0 requests resume" in explorer.page
    True
    >>> explorer.close()

    Raises as `branches_view` does.
    """
    knobs = branches_knobs(shared, length, third)
    habits = Habits(
        name="branches",
        code=lambda values: Code(command_line("branches", knobs, values), _python_of(values)),
        labels={"shared": "B shares with A", "length": "B has", "third": "C shares with A"},
    )
    return explore_knobs_of(branched, knob_widgets(knobs), habits)
