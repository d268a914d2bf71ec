"""Engines' caches on lists of tokens: placement, lookup and eviction of each, in plain words.

Requests are served one at a time, in sequence. Each engine is one file whose ``serve`` is the
readable truth that replays of traces are held to, as it is held itself to the running engine.
"""

from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from inspect import signature
from typing import Any

from mambackpt.errors import CheckpointValueError
from mambackpt.replay.serve.requests import RequestLike, Served, TokenRequest, as_request

__all__ = ["ENGINES", "Served", "TokenRequest", "serve_tokens"]

# engine: the module whose ``serve(requests, *, settings...)`` takes checked requests; loads when
# its engine is asked for
ENGINES = {
    "llama.cpp": "mambackpt.replay.serve.llama_cpp",
}


def serve_tokens(requests: Iterable[RequestLike], engine: str, **settings: object) -> list[Served]:
    """Return what an engine's cache does with token lists that are served one after another.

    >>> served = serve_tokens([range(100), range(120)], "llama.cpp", batch=64, ubatch=64)
    >>> [(s.reused, s.created) for s in served]
    [(0, (36, 96)), (100, (100, 116))]

    A request is a list of tokens or a `TokenRequest`. The engines and their settings, in tokens,
    are those of the modules in `ENGINES`. Raises CheckpointValueError for an engine or a setting
    that does not exist and for values that the engine refuses.
    """
    serve = _engine(engine)
    known = [name for name in signature(serve).parameters if name != "requests"]
    for name in settings:
        if name not in known:
            raise CheckpointValueError(
                f"{name!r} is no setting of {engine}; expected some of {', '.join(known)}. "
                f"{_nearest(name, known)}"
            )
    return serve([as_request(request) for request in requests], **settings)


def _engine(name: str) -> Callable[..., list[Served]]:
    if name not in ENGINES:
        raise CheckpointValueError(
            f"engine is {name!r}; expected one of {', '.join(ENGINES)}. "
            f"{_nearest(str(name), [*ENGINES])}"
        )
    serve: Callable[..., list[Served]] = import_module(ENGINES[name]).serve
    return serve


def _nearest(name: str, known: list[str]) -> str:
    near: list[Any] = get_close_matches(name, known, n=1, cutoff=0.5)
    return f"Did you mean {near[0]!r}?" if near else f"Try {known[0]!r}."
