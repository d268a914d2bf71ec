"""The engine room held to vllm's scheduler: random histories of each kind, compared step by step.

B Mamba block, h hash unit: in tokens.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, TypeAlias

from mambackpt.conformance.pieces import Answer, Case, Difference, Piece, seeded
from mambackpt.engine import Request, Settings, trace_history

AMPLE = 4000  # blocks of a pool that never evicts

Options: TypeAlias = dict[str, Any]  # of Settings, and how to draw the requests
Change: TypeAlias = Callable[[random.Random, Options], None]

_OWN = ("variant", "recurrence")  # settings of the kit that no engine has


# -- what is drawn


def _hits_inside(draw: random.Random, options: Options) -> None:
    B = options["mamba_block_size"]
    options["hash_block_size"] = draw.choice([B // n for n in (2, 3, 4) if B % n == 0])


def _fine_attention(draw: random.Random, options: Options) -> None:
    _hits_inside(draw, options)
    options["attention_block_size"] = options["hash_block_size"]


def _drop(draw: random.Random, options: Options) -> None:
    options["drop_eagle_block"] = True


def _interval(draw: random.Random, options: Options) -> None:
    options["retention"] = options["mamba_block_size"] * draw.choice([1, 2, 3])


def _small_pool(draw: random.Random, options: Options) -> None:
    options["pool_blocks"] = 0  # follows from the requests
    options["most"] = 14


def _threshold(draw: random.Random, options: Options) -> None:
    B = options["mamba_block_size"]
    options["long_prefill_threshold"] = draw.choice([B, B // 2 + 3, B + 9])


def _same_step(draw: random.Random, options: Options) -> None:
    options["max_running"] = draw.choice([3, 4, 8])
    options["gaps"] = (0, 0, 0, 1)


def _preempted(draw: random.Random, options: Options) -> None:
    options["preempted"] = 0.5


def _offers(draw: random.Random, options: Options) -> None:
    """Budgets below a block, and offers that change from step to step."""
    B = options["mamba_block_size"]
    budget = options["budget"] = draw.choice([B // 2 + 1, B - 1, B, 2 * B])
    options["budgets"] = (budget, *(draw.randint(0, budget) for _ in range(draw.randint(0, 3))))


def _groups(draw: random.Random, options: Options) -> None:
    options["recurrent_groups"] = draw.choice([2, 3])


def _junctions(draw: random.Random, options: Options) -> None:
    options["shared_prefix_checkpoint"] = True


def _drafts(draw: random.Random, options: Options) -> None:
    drafts = options["speculative_tokens"] = draw.choice([1, 2, 3])
    options["num_lookahead_tokens"] = draw.choice([drafts, drafts, 0])


def _lookahead(draw: random.Random, options: Options) -> None:
    options["num_hash_lookahead_tokens"] = 1


KINDS: dict[str, tuple[Change, ...]] = {
    "h = B": (),
    "h < B": (_hits_inside,),
    "attention blocks of h": (_fine_attention,),
    "drop, h = B": (_drop,),
    "drop, h < B": (_hits_inside, _drop),
    "drop, attention blocks of h": (_fine_attention, _drop),
    "limited pool, h = B": (_small_pool,),
    "limited pool, h < B": (_hits_inside, _small_pool),
    "limited pool, drop": (_hits_inside, _drop, _small_pool),
    "limited pool, attention blocks of h": (_fine_attention, _small_pool),
    "threshold": (_hits_inside, _threshold),
    "interval": (_hits_inside, _interval),
    "interval, drop, h = B": (_drop, _interval),
    "interval, drop, h < B": (_hits_inside, _drop, _interval),
    "same step, h = B": (_same_step,),
    "same step, h < B": (_hits_inside, _same_step),
    "preemption": (_hits_inside, _preempted),
    "preemption, drop": (_hits_inside, _drop, _preempted),
    "offers": (_hits_inside, _offers),
    "several recurrent groups": (_hits_inside, _groups, _small_pool),
    "junctions": (_hits_inside, _drop, _junctions),
    "lookahead": (_hits_inside, _drop, _lookahead),
    "drafts, h = B": (_drafts,),
    "drafts, h < B": (_hits_inside, _drafts),
    "drafts, drop": (_hits_inside, _drop, _drafts),
    "drafts, limited pool": (_hits_inside, _drop, _small_pool, _drafts, _preempted),
    "all together": (
        _hits_inside,
        _drop,
        _offers,
        _threshold,
        _small_pool,
        _preempted,
        _groups,
        _junctions,
        _same_step,
    ),
}


def make_case(seed: int, kind: str | None = None) -> Case:
    """Return one history of one kind; without a kind the seeds take turns.

    >>> case = make_case(7, "limited pool, h < B")
    >>> case["settings"]["hash_block_size"] < case["settings"]["mamba_block_size"]
    True
    """
    kind = kind or list(KINDS)[seed % len(KINDS)]
    draw = random.Random(f"{kind}/{seed}")
    options = _draw_options(draw)
    for change in KINDS[kind]:
        change(draw, options)
    traffic = {name: options.pop(name) for name in ("gaps", "preempted", "most")}
    requests = _draw_requests(draw, **traffic)
    options["pool_blocks"] = options["pool_blocks"] or _draw_pool(draw, options, requests)
    settings = Settings(**options)
    told = {f.name: getattr(settings, f.name) for f in fields(Settings) if f.name not in _OWN}
    told["attention_block_size"] = settings.attention_block
    return {"kind": kind, "settings": told, "requests": requests}


def _draw_options(draw: random.Random) -> Options:
    B = draw.choice([16, 24, 32, 48, 64, 64, 96])
    checkpoints = draw.random() < 0.7
    alignment = draw.choice([1, 4, 8, 16, B // 2, B])
    running = draw.choice([1, 2, 3, 4])
    return {
        "mamba_block_size": B,
        "hash_block_size": B,
        "checkpoint_alignment": alignment if checkpoints else None,
        "internal_checkpoints": checkpoints,
        "retention": draw.choice([0, 0, 0, None, B, 2 * B, 3 * B]),
        "budget": draw.choice([B, B + 5, 2 * B, 300, 300, 8192, draw.randint(B, 4 * B)]),
        "max_running": running,
        "pool_blocks": AMPLE,
        "gaps": (0, 0, 1, 2, 5) if running > 1 else (0,),
        "preempted": 0.0,
        "most": 8,
    }


def _draw_requests(
    draw: random.Random, *, gaps: Sequence[int], preempted: float, most: int
) -> list[dict[str, Any]]:
    """Return three requests or more, most of which share a prefix with an earlier one."""

    def text(least: int, most: int) -> list[int]:
        return [draw.randrange(50_000) for _ in range(draw.randint(least, most))]

    known: list[list[int]] = []
    requests = []
    arrival = 1
    for n in range(draw.randint(3, most)):
        if known and draw.random() < 0.75:
            base = draw.choice(known)
            some = draw.randint(1, len(base))
            prompt = base[: draw.choice([len(base), some, -(-some // 16) * 16])]
            if draw.random() < 0.8:
                prompt = prompt + text(1, draw.choice([20, 160, 300]))
        else:
            prompt = text(1, 420)
        if draw.random() < 0.25:
            prompt = prompt[: max(1, len(prompt) // 16 * 16)]
        steps = {arrival + draw.randint(1, 25) for _ in range(draw.randint(1, 2))}
        output = text(1, draw.choice([1, 5, 60]))
        known.append(prompt + output)
        requests.append(
            {
                "name": f"r{n}",
                "prompt": prompt,
                "output": output,
                "arrival": arrival,
                "preempt_at": sorted(steps) if draw.random() < preempted else [],
                "accepted": [draw.randint(0, 3) for _ in range(3)],
            }
        )
        arrival += draw.choice(gaps)
    return requests


def _draw_pool(draw: random.Random, options: Options, requests: Sequence[dict[str, Any]]) -> int:
    """Return a size that holds the longest request, and seldom much more."""
    b: int = options.get("attention_block_size") or options["mamba_block_size"]
    longest = max(len(request["prompt"]) + len(request["output"]) for request in requests)
    states = 5 + 2 * options.get("speculative_tokens", 0)
    need = -(-longest // b) + states * options.get("recurrent_groups", 1)
    return min(draw.randint(need, 2 * need + 2) for _ in range(2))


# -- what is compared


def answer(case: Case) -> Answer:
    """Return the kit's steps of a case.

    >>> steps = answer(make_case(3))["steps"]
    >>> steps[0]["scheduled"][0][:2]
    ['r0', 0]
    """
    requests = [Request(**request) for request in case["requests"]]
    return {"steps": list(trace_history(requests, Settings(**case["settings"])))}


def differences(case: Case, theirs: Answer, ours: Answer) -> list[Difference]:
    """Return the first step in which two answers differ, cut down to what differs."""
    said, say = theirs["steps"], ours["steps"]
    for place, (one, other) in enumerate(zip(said, say, strict=False)):
        names = [name for name in {**one, **other} if one.get(name) != other.get(name)]
        if names:
            return [Difference(place, *({n: step.get(n) for n in names} for step in (one, other)))]
    if len(said) != len(say):
        place = min(len(said), len(say))
        return [Difference(place, said[place : place + 1], say[place : place + 1])]
    return []


def smaller(case: Case) -> Iterator[Case]:
    """Yield cases that are a little smaller: a request less, or less of one, or of all prompts."""
    requests = case["requests"]
    for place in reversed(range(len(requests))):
        if len(requests) > 1:
            yield {**case, "requests": requests[:place] + requests[place + 1 :]}
    for cut in (64, 16, 1):
        if all(len(request["prompt"]) > cut for request in requests):
            fronts = [{**request, "prompt": request["prompt"][cut:]} for request in requests]
            yield {**case, "requests": fronts}
    for place, request in enumerate(requests):
        for part in ("output", "prompt"):
            tokens = request[part]
            for left in sorted({len(tokens) // 2, len(tokens) - 16, len(tokens) - 1}):
                if left > 0:
                    shorter = {**request, part: tokens[:left]}
                    yield {**case, "requests": [*requests[:place], shorter, *requests[place + 1 :]]}


def reused(answer: Answer) -> list[int]:
    """Return the tokens that each request resumes after when it starts for the first time."""
    first: dict[str, int] = {}
    for step in answer["steps"]:
        for name, (hit, _) in step["hits"].items():
            first.setdefault(name, hit)
    return [first[name] for name in sorted(first)]


PIECES: tuple[Piece, ...] = (
    Piece(
        name="scheduler, step by step",
        worker="vllm_scheduler.py",
        cases=seeded(make_case),
        answer=answer,
        differences=differences,
        smaller=smaller,
        reused=reused,
        environment=(("VLLM_LOGGING_LEVEL", "ERROR"),),
    ),
)
