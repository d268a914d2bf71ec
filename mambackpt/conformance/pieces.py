"""What an engine is asked, and what this kit says of it: the protocol of each engine's file.

A case and an answer are JSON objects. An engine's worker is a script of its own environment: one
case a line on standard input, one answer a line on standard output, in order.
"""

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

Case: TypeAlias = dict[str, Any]
Answer: TypeAlias = dict[str, Any]

_SEEDS_APART = 1_000_000  # cases of one seed never meet those of the next


@dataclass(frozen=True, slots=True)
class Difference:
    """One request of a case on which the engine and this kit disagree.

    ``request`` is its place in the case; ``theirs`` is what the engine said, ``ours`` what the kit
    says, each cut down to what differs.
    """

    request: int
    theirs: Any
    ours: Any


def by_request(case: Case, theirs: Answer, ours: Answer) -> list[Difference]:
    """Return the requests on which two answers with a list of ``requests`` each disagree.

    >>> theirs = {"requests": [{"cached": 0, "created": [36]}, {"cached": 36, "created": []}]}
    >>> ours = {"requests": [{"cached": 0, "created": [36]}, {"cached": 0, "created": []}]}
    >>> by_request({}, theirs, ours)
    [Difference(request=1, theirs={'cached': 36}, ours={'cached': 0})]

    An answer that is no list of as many requests differs at request 0, whole.
    """
    said, say = theirs.get("requests"), ours.get("requests")
    if not isinstance(said, list) or not isinstance(say, list) or len(said) != len(say):
        return [] if theirs == ours else [Difference(0, theirs, ours)]
    differences = []
    for place, (one, other) in enumerate(zip(said, say, strict=True)):
        if one == other:
            continue
        if isinstance(one, dict) and isinstance(other, dict):
            names = [n for n in {**one, **other} if one.get(n) != other.get(n)]
            one, other = ({n: d.get(n) for n in names} for d in (one, other))
        differences.append(Difference(place, one, other))
    return differences


def count_requests(case: Case) -> int:
    """Return how many requests a case holds.

    >>> count_requests({"requests": [{"tokens": [1]}, {"tokens": [2]}]})
    2
    """
    return len(case["requests"])


def fewer_requests(case: Case) -> Iterator[Case]:
    """Yield cases that are a little smaller: a request less, or half a prompt, or its last token.

    >>> [smaller["requests"] for smaller in fewer_requests({"requests": [{"tokens": [1, 2]}]})]
    [[{'tokens': [1]}]]

    The requests are a list under ``requests``, each with ``tokens`` and, if any, ``users``, which
    are positions in them.
    """
    requests = case["requests"]
    for place in reversed(range(len(requests))):
        if len(requests) > 1:
            yield {**case, "requests": requests[:place] + requests[place + 1 :]}
    for place, request in enumerate(requests):
        length = len(request.get("tokens", ()))
        for shorter in sorted({length // 2, length - length // 8, length - 1}):
            if 0 < shorter < length:
                cut = {**request, "tokens": request["tokens"][:shorter]}
                if "users" in request:
                    cut["users"] = [start for start in request["users"] if start < shorter]
                yield {**case, "requests": [*requests[:place], cut, *requests[place + 1 :]]}


def nothing_reused(answer: Answer) -> list[int]:
    """Return no numbers: the answer is not about reuse, so releases are told apart as a whole."""
    return []


def seeded(make_case: Callable[[int], Case]) -> Callable[[int, int], Iterator[Case]]:
    """Return a piece's ``cases`` for a function that makes one case of one seed.

    >>> list(seeded(lambda seed: {"seed": seed})(7, 2))
    [{'seed': 7000000}, {'seed': 7000001}]
    """

    def cases(seed: int, number: int) -> Iterator[Case]:
        first = seed * _SEEDS_APART
        return map(make_case, range(first, first + number))

    return cases


def size_of(case: Case) -> int:
    """Return how much there is to read in a case: the length of its JSON text."""
    return len(json.dumps(case))


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """One piece of an engine, the worker that asks it, and this kit's answer.

    ``worker`` is a file of the folder ``workers``. ``cases(seed, number)`` yields cases;
    ``answer(case)`` says what the worker should answer, in JSON's types (tuples pass for lists).
    The rest has defaults for cases with a list of ``requests``. ``differences(case, theirs, ours)``
    tells where two answers differ, ``requests(case)`` how many there are; ``smaller(case)`` yields
    smaller cases to try. ``reused(answer)`` gives the tokens that each request resumes after, for a
    report of what changed between releases. ``environment`` holds variables that the worker needs.
    """

    name: str
    worker: str
    cases: Callable[[int, int], Iterable[Case]]
    answer: Callable[[Case], Answer]
    differences: Callable[[Case, Answer, Answer], Sequence[Difference]] = by_request
    requests: Callable[[Case], int] = count_requests
    smaller: Callable[[Case], Iterable[Case]] = fewer_requests
    reused: Callable[[Answer], Sequence[int]] = nothing_reused
    environment: tuple[tuple[str, str], ...] = ()
