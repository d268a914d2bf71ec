"""Engines' caches on lists of tokens and on traces: placement, lookup, eviction, in plain words.

Requests are served one at a time, in sequence. Each engine is one file whose ``serve`` is the
readable truth that replays of traces are held to, as it is held itself to the running engine.
"""

from collections.abc import Callable, Iterable
from importlib import import_module
from inspect import Parameter, signature

from mambackpt.errors import checked_choice
from mambackpt.replay.serve.requests import RequestLike, Served, TokenRequest, as_request

__all__ = ["ENGINES", "Served", "TokenRequest", "serve_tokens", "settings_of"]

# engine: the module whose ``serve(requests, *, settings...)`` takes checked requests; loads when
# its engine is asked for. A module of that name with "_traces" behind it serves whole traces.
ENGINES = {
    "llama.cpp": "mambackpt.replay.serve.llama_cpp",
    "sglang": "mambackpt.replay.serve.sglang",
    "vllm": "mambackpt.replay.serve.vllm",
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
    checked_settings(engine, settings)
    return _serve(engine)([as_request(request) for request in requests], **settings)


def settings_of(engine: str) -> dict[str, Parameter]:
    """Return an engine's settings by name, each with its default.

    >>> settings_of("llama.cpp")["ubatch"].default
    512
    """
    parameters = signature(_serve(engine)).parameters
    return {name: one for name, one in parameters.items() if one.kind is Parameter.KEYWORD_ONLY}


def checked_settings(engine: str, settings: Iterable[str]) -> None:
    """Refuse the name of a setting that the engine does not have, and name one like it."""
    known = settings_of(engine)
    for name in settings:
        checked_choice(f"a setting of {engine}", name, known)


def _serve(engine: str) -> Callable[..., list[Served]]:
    serve: Callable[..., list[Served]] = import_module(
        ENGINES[checked_choice("engine", engine, ENGINES)]
    ).serve
    return serve
