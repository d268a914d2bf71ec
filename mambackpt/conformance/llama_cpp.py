"""llama.cpp: random cases, and what `serve_tokens` says about them in the server's terms."""

from dataclasses import dataclass
from random import Random

from mambackpt.conformance.pieces import Answer, Case, Piece, seeded
from mambackpt.replay import TokenRequest, serve_llama_cpp

LETTERS = range(259, 285)  # the worker's text tokens
USER = 285  # its token that begins a user message


@dataclass(frozen=True, slots=True)
class _Sizes:
    """How long the prompts of a case are, and where its batches end: what edits aim at."""

    longest: int
    batch: int
    ubatch: int


def make_case(seed: int) -> Case:
    """Return a case as the worker reads it: settings, and up to forty requests that share prefixes.

    >>> case = make_case(3)
    >>> sorted(case), sorted(case["requests"][0])
    (['requests', 'settings'], ['forced', 'generated', 'tokens', 'users'])

    One case in eight has the server's default sizes. Requests extend, resend and edit earlier ones,
    with what was generated or without; half of the cases are chats. Same seed, same case.
    """
    random = Random(seed)
    settings = _random_settings(random)
    longest = random.choice((12, 60, 200, 800) if settings["batch"] > 8 else (12, 60, 200))
    if settings["batch"] == 2048 and random.random() < 0.5:
        longest = 6000
    sizes = _Sizes(longest, settings["batch"], settings["ubatch"])
    chats = random.random() < 0.5
    requests: list[Case] = []
    for _ in range(random.randint(2, random.choice((10, 10, 40)) if longest <= 200 else 10)):
        tokens = _random_tokens(random, requests, sizes, chats)
        generated = random.choice((0, 1, 1, 2, 3, 20))
        requests.append(
            {
                "tokens": tokens,
                "users": [place for place, token in enumerate(tokens) if token == USER],
                "generated": generated,
                "forced": random.choice(LETTERS[:3]),
            }
        )
    return {"settings": settings, "requests": requests}


def _random_settings(random: Random) -> Case:
    if random.random() < 0.125:
        sizes = (2048, 512, 32, 8192)
    else:
        sizes = (
            random.choice((2, 3, 4, 5, 8, 16, 32, 64, 100, 256, 2048)),
            random.choice((1, 2, 4, 8, 16, 32, 64, 512)),
            random.choice((0, 1, 2, 3, 4, 5, 8, 32)),
            random.choice((0, 1, 8, 32, 100, 8192)),
        )
    return {
        **dict(zip(("batch", "ubatch", "checkpoints", "min_step"), sizes, strict=True)),
        "host_cache": random.random() < 0.6,
        "model": random.choice(("mamba", "lfm2")),
    }


def _random_tokens(random: Random, requests: list[Case], sizes: _Sizes, chats: bool) -> list[int]:
    """A prompt that begins as an earlier one does, or a new one."""
    if not requests or random.random() < 0.2:
        return _new_tokens(random, random.randint(1, sizes.longest), chats)
    earlier = random.choice(requests)
    tokens = list(earlier["tokens"])
    if random.random() < 0.5:
        outputs = random.choice((earlier["generated"], random.randint(0, earlier["generated"])))
        tokens += [earlier["forced"]] * outputs
    L, near = len(tokens), min(sizes.batch, 4 + sizes.ubatch)
    cut = random.choice(
        (
            L,
            random.randint(1, L),
            L - random.randint(0, 10),
            L - near + random.randint(-1, 2),
            L - 4 + random.randint(-1, 2),
        )
    )
    tokens = tokens[: max(cut, 1)]
    more = random.choice((0, 1, 3, 8, random.randint(1, sizes.longest)))
    return tokens + _new_tokens(random, more, chats)


def _new_tokens(random: Random, length: int, chats: bool) -> list[int]:
    tokens = [random.choice(LETTERS) for _ in range(length)]
    if chats:
        often = random.choice((0.3, 0.05, 0.01))
        tokens = [USER if random.random() < often else token for token in tokens]
    return tokens


def answer_case(case: Case) -> Answer:
    """Return what `serve_tokens` says of a case, as the worker would answer it.

    >>> answer_case({"settings": {}, "requests": [{"tokens": [259] * 10000}]})
    {'requests': [{'cached': 0, 'created': [9484, 9996], 'erased': []}]}

    Created in order of time, erased in order of position, replaced ones too.
    """
    settings = {name: value for name, value in case["settings"].items() if name != "model"}
    requests = []
    for request in case["requests"]:
        outputs = [request.get("forced", -1)] * request.get("generated", 1)
        requests.append(TokenRequest(request["tokens"], outputs, request.get("users", ())))
    answers = [
        {"cached": served.reused, "created": list(served.created), "erased": sorted(erased)}
        for served, erased in serve_llama_cpp(requests, **settings)
    ]
    return {"requests": answers}


PIECES = (
    Piece(
        name="server",
        worker="llama_cpp.py",
        cases=seeded(make_case),
        answer=answer_case,
        reused=lambda answer: [request["cached"] for request in answer["requests"]],
    ),
)
