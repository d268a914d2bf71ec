"""Held to SGLang: random cases over all of its modes, and what `serve_tokens` says of them."""

from random import Random
from typing import Any

from mambackpt.conformance.pieces import Answer, Case, Difference, Piece, by_request, seeded
from mambackpt.errors import CheckpointValueError
from mambackpt.replay import TokenRequest, serve_tokens


def random_case(seed: int) -> dict[str, Any]:
    """Return the case of a seed: settings, and requests that share prefixes and grow.

    >>> case = random_case(3)
    >>> sorted(case), sorted(case["requests"][0])
    (['requests', 'settings'], ['outputs', 'tokens'])

    One case in two has settings off every grid; limits of states are as likely as none.
    """
    rng = Random(seed)
    chunk = rng.choice([1, 3, 4, 4, 5, 8, 8, 16])
    aligned = rng.random() < 0.5
    settings = {
        "chunk": chunk,
        "budget": rng.choice([1, 2, 3, 5, 100]) * chunk if aligned else rng.randint(1, 40),
        "interval": rng.choice([1, 2, 4]) * chunk if aligned else rng.randint(1, 20),
        "strategy": rng.choice(["extra_buffer", "extra_buffer", "no_buffer"]),
        "per_path": rng.choice([None, None, 1, 2, 3]),
        "slots": rng.choice([None, None, rng.randint(4, 7), rng.randint(8, 20)]),
    }
    longest, decodes = rng.choice([20, 60, 120]), rng.random() < 0.7
    requests: list[dict[str, list[int]]] = []
    told: list[list[int]] = []  # prompts with what was answered
    for _ in range(rng.randint(3, 12)):
        fresh = _tokens(rng, rng.randint(1, longest))
        if told and rng.random() < 0.8:
            base = rng.choice(told[-3:] if rng.random() < 0.3 else told)
            cut = rng.choice([len(base), rng.randint(1, len(base)), rng.randint(1, len(base))])
            fresh = base[:cut] + fresh[: rng.choice([0, 1, 3, longest])]
        outputs = _tokens(rng, rng.choice([0, 1, 2, 9, 30]) if decodes else 0)
        requests.append({"tokens": fresh, "outputs": outputs})
        told.append(fresh + outputs)
    return {"settings": settings, "requests": requests}


def _tokens(rng: Random, count: int) -> list[int]:
    return [rng.randrange(1000) for _ in range(count)]


def answer_case(case: Case) -> Answer:
    """Return what `serve_tokens` says of a case, as the worker would answer it.

    >>> case = {"settings": {"chunk": 4}, "requests": [{"tokens": [*range(9)], "outputs": []}]}
    >>> answer_case(case)["rows"][0]["kept"]
    (8,)

    Where the engine has no room for a request, its row and the last is ``{"error": True}``.
    """
    asked = [TokenRequest(r["tokens"], r["outputs"]) for r in case["requests"]]
    for count in range(len(asked), -1, -1):
        try:
            served = serve_tokens(asked[:count], "sglang", **case["settings"])
        except CheckpointValueError:
            continue
        rows: list[dict[str, Any]] = [
            {
                "attention": one.attention,
                "reused": one.reused,
                "branch": one.branch,
                "created": one.created,
                "kept": one.kept,
            }
            for one in served
        ]
        return {"rows": rows if count == len(asked) else [*rows, {"error": True}]}
    return {"rows": [{"error": True}]}


def _differences(case: Case, theirs: Answer, ours: Answer) -> list[Difference]:
    said = [{"error": True} if "error" in row else row for row in theirs["rows"]]
    return by_request(case, {"requests": said}, {"requests": ours["rows"]})


PIECES = (
    Piece(
        name="cache",
        worker="sglang.py",
        cases=seeded(random_case),
        answer=answer_case,
        differences=_differences,
        reused=lambda answer: [row.get("reused", 0) for row in answer["rows"]],
    ),
)
