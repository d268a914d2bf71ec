"""Placement rules: where each system keeps a recurrent state.

A rule is one function from (request, match, settings) to positions. L prompt length, B block,
a attention hit, h joint hit, C prefill budget: all in tokens. Adding a rule is one function:

>>> @placement("halfway")
... def halfway(request, match, settings):
...     "Keep the state in the middle of the prompt."
...     return [request.prompt // 2]
>>> rule = get_rule("halfway+last")
>>> rule.place(Lengths(prompt=1000), Match(), Sizes(block=64))
[500, 960]

Positions that are not a token count inside the prompt (0, say) keep nothing; a replay takes a
position between two block ends of its trace at the earlier one. Arguments stand in brackets:
``"interval(4096)"``, ``"trtllm(from_end=[0, 512])"``. A rule registered with ``arrays=True``
computes with whole arrays of requests as well, which the fast replays use; it cannot read
``match.splits``.
"""

import ast
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Signature, signature
from itertools import accumulate
from math import lcm
from typing import Any, NamedTuple, TypeAlias

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.planner import (
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

# A token count, or an array of them with one entry per request: the formulas are the same.
Tokens: TypeAlias = Any


@dataclass(slots=True)
class Lengths:
    """A request as a rule sees it: tokens of prompt and output.

    ``message`` is the token at which the last user message starts; 0 means unknown.
    """

    prompt: Tokens
    output: Tokens = 0
    message: Tokens = 0


@dataclass(slots=True)
class Match:
    """What a lookup found, in tokens.

    ``attention`` is the longest prefix with attention cache, ``joint`` the deepest kept state in
    it. ``splits``: the request leaves an earlier one inside an edge of the tree of prompts, so that
    a radix tree makes a new interior node.
    """

    attention: Tokens = 0
    joint: Tokens = 0
    splits: bool = False


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes in tokens: ``block`` between states, ``budget`` of one prefill step."""

    block: int
    budget: int = 8192


class Span(NamedTuple):
    """The positions first, first + step, ... up to ``last``; empty where ``last < first``."""

    first: Tokens
    last: Tokens
    step: int


Positions: TypeAlias = "Sequence[Any]"  # of Tokens and Span
Place: TypeAlias = Callable[[Lengths, Match, Sizes], Positions]


@dataclass(frozen=True)
class Rule:
    """A named rule, ready to call.

    ``arrays``: it takes arrays too, and does not read ``match.splits``. ``reads``: what it reads of
    the match, beyond leaving out what is kept at the joint hit already. ``states=False`` stands for
    a model without recurrent layers: the attention hit is the hit. ``eviction`` is what its source
    evicts by in a pool. ``parts`` are the rules that it joins.
    """

    name: str
    place: Place
    arrays: bool = False
    reads: tuple[str, ...] = ("attention", "joint")
    states: bool = True
    eviction: str = "lru"
    parts: "tuple[Rule, ...]" = ()


RULES: dict[str, Callable[..., Rule]] = {}


def placement(
    name: str,
    *,
    arrays: bool = False,
    reads: tuple[str, ...] = ("attention", "joint"),
    states: bool = True,
    eviction: str = "lru",
    check: Callable[..., None] | None = None,
) -> Callable[[Callable[..., Positions]], Callable[..., Positions]]:
    """Register a rule's function under a name; its further parameters become the rule's.

    ``check`` is called with those parameters when a rule is made, and raises where they are wrong.
    """

    def register(function: Callable[..., Positions]) -> Callable[..., Positions]:
        parameters = list(signature(function).parameters.values())[3:]
        takes = Signature(
            [p.replace(kind=p.POSITIONAL_OR_KEYWORD, annotation=p.empty) for p in parameters]
        )

        def make(text: str, arguments: list[Any], named: dict[str, Any]) -> Rule:
            try:
                bound = takes.bind(*arguments, **named)
            except TypeError as error:
                wanted = [p.name for p in parameters if p.default is p.empty]
                example = ", ".join(f"{word}=4096" for word in wanted)
                raise CheckpointValueError(
                    f"rule is {text!r} ({error}); expected {name}{takes}. "
                    f"Try {name}{f'({example})' if example else ''}."
                ) from None
            bound.apply_defaults()
            if check is not None:
                check(**bound.arguments)
            return Rule(text, partial(function, **bound.arguments), arrays, reads, states, eviction)

        RULES[name] = make
        return function

    return register


def get_rule(
    rule: str | Rule | Place, *, overlaps: Iterable[int] | None = None, grain: int = 1
) -> Rule:
    """Return the rule of a name, of names joined with "+", or of a plain function.

    >>> get_rule("last+junction").place(Lengths(8000), Match(attention=3000), Sizes(block=512))
    [7680, 2560]

    ``overlaps`` and ``grain`` are what the name "optimal(M)" stands on; a replay gives its trace's.
    Raises CheckpointValueError for a name that is not registered or arguments it does not take.
    """
    if isinstance(rule, Rule):
        return rule
    if not isinstance(rule, str):
        return Rule(getattr(rule, "__name__", "rule"), rule)
    try:
        parts = [
            _part(node, overlaps, grain) for node in _summands(ast.parse(rule, mode="eval").body)
        ]
    except (SyntaxError, ValueError) as error:
        if isinstance(error, CheckpointValueError):
            raise
        raise CheckpointValueError(
            f"rule is {rule!r}; expected names joined with '+' out of {', '.join(RULES)}. Try "
            "'last+junction', or 'interval(4096)'."
        ) from error
    if len(parts) == 1:
        return parts[0]
    for part in parts:
        if not part.states:
            raise CheckpointValueError(
                f"rule is {rule!r}; {part.name} stands for a model without states, so there is "
                f"nothing to join. Try {part.name!r} by itself."
            )
    return Rule(
        rule,
        partial(_union, [part.place for part in parts]),
        all(part.arrays for part in parts),
        tuple(sorted({name for part in parts for name in part.reads})),
        True,
        next((part.eviction for part in parts if part.eviction != "lru"), "lru"),
        tuple(parts),
    )


def _union(places: list[Place], request: Lengths, match: Match, settings: Sizes) -> Positions:
    return [position for place in places for position in place(request, match, settings)]


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _part(node: ast.expr, overlaps: Iterable[int] | None, grain: int) -> Rule:
    call = node if isinstance(node, ast.Call) else None
    name = ast.unparse(node if call is None else call.func)
    if name == "optimal" and call and len(call.args) == 1 and overlaps is not None:
        count = checked_int("count", ast.literal_eval(call.args[0]), least=0, unit="positions")
        return optimal(count, overlaps, grain=grain)
    checked_choice("rule", name, [*RULES, "optimal(M)"])
    arguments = [] if call is None else [ast.literal_eval(value) for value in call.args]
    named = {k.arg: ast.literal_eval(k.value) for k in (call.keywords if call else [])}
    return RULES[name](ast.unparse(node), arguments, named)


def _last(request: Lengths, settings: Sizes) -> Tokens:
    """The last block boundary that a lookup can ask for: one token is always computed again."""
    return (request.prompt - 1) // settings.block * settings.block


@placement("attention", arrays=True, reads=(), states=False)
def attention(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """A model without recurrent layers: every cached token can be resumed from (the ceiling)."""
    return []


@placement("none", arrays=True, reads=())
def none(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep no state: nothing is reused. Source: prefix caching off."""
    return []


@placement("all", arrays=True, reads=())
def every_block(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep every multiple of B up to L - 1. Source: vLLM 0.31 and before, cache mode "all"."""
    return [Span(settings.block, _last(request, settings), settings.block)]


@placement("last", arrays=True, reads=())
def last(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep the prompt's last boundary. Source: vLLM, cache mode "align" with retention 0."""
    position = _last(request, settings)
    return [position * (position > match.joint)]


@placement("junction", arrays=True, reads=("attention",))
def junction(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep the boundary where a prefix seen before stops being shared, beyond the joint hit.

    Useful from the third occurrence on. Source: vLLM's shared-prefix junction, after Marconi
    (arXiv 2411.19379).
    """
    position = match.attention // settings.block * settings.block
    return [position * (position > match.joint)]


def _budget_fits(settings: Sizes) -> None:
    if settings.budget < settings.block:
        raise CheckpointValueError(
            f"budget is {settings.budget} and block is {settings.block}; expected a prefill "
            f"budget of at least one block. Try budget={settings.block}."
        )


@placement("chunk", arrays=True, reads=("joint",))
def chunk(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep every chunk end of the budget C that is cut to the block grid, before the last boundary.

    Source: vLLM, cache mode "align" with dense retention under chunked prefill.
    """
    _budget_fits(settings)
    B, C = settings.block, settings.budget
    return [Span((match.joint + C) // B * B, _last(request, settings) - 1, C // B * B)]


def _interval_set(*, every: int) -> None:
    checked_int("every", every)


@placement("interval", arrays=True, reads=(), check=_interval_set)
def interval(request: Lengths, match: Match, settings: Sizes, *, every: int) -> Positions:
    """Keep every K tokens, and the last boundary.

    Source: vLLM retention R, TensorRT-LLM ``periodic_snapshot_interval``, Ollama's spacing.
    """
    return [Span(every, request.prompt - 1, every), _last(request, settings)]


def _lattice_set(*, budget: int) -> None:
    checked_int("budget", budget, unit="positions")


@placement("lattice", reads=(), check=_lattice_set)
def lattice(request: Lengths, match: Match, settings: Sizes, *, budget: int) -> Positions:
    """Keep all multiples of the least power of two that has at most ``budget`` inside the prompt.

    Positions are absolute, so that prompts of any length share them. Source: public proposals; no
    engine's default.
    """
    step = 1
    while (request.prompt - 1) // step > budget:
        step *= 2
    return [Span(step, request.prompt - 1, step)]


def _ladder_set(*, base: int, most: int) -> None:
    checked_int("base", base)
    checked_int("most", most, unit="positions")


@placement("ladder", reads=(), check=_ladder_set)
def ladder(request: Lengths, match: Match, settings: Sizes, *, base: int, most: int) -> Positions:
    """Keep block boundaries whose least distance from the one before doubles from ``base`` on.

    The first boundary at or beyond each least distance is kept, ``most`` of them. Source: public
    proposals; no engine's default.
    """
    kept: list[int] = []
    position, distance, B = 0, base, settings.block
    while len(kept) < most:
        position = -(-(position + distance) // B) * B
        if position >= request.prompt:
            break
        kept.append(position)
        distance *= 2
    return kept


@placement("internal")
def internal(
    request: Lengths,
    match: Match,
    settings: Sizes,
    *,
    hash_block: int = 0,
    alignment: int | None = 16,
    drop: bool = False,
) -> Positions:
    """Keep vLLM's prefill checkpoint of the step that reaches the prompt's end.

    Where the kernel cannot write it, that step stops at the last boundary instead and keeps the
    state there. ``hash_block`` H and ``alignment`` A in tokens (H = 0: the block). Source:
    vLLM 0.33, one forward instead of two.
    """
    B, H, L = settings.block, hash_block or settings.block, request.prompt
    _budget_fits(settings)
    start = match.joint
    while L - start > settings.budget:
        start = (start + settings.budget) // B * B
    position = get_mamba_prefill_checkpoint_position(L, H, drop)
    if is_mamba_prefill_checkpoint_valid(start, L, position, H, B, alignment):
        return [position]
    return [get_mamba_prefill_checkpoint_position(L, B, drop)]


def sglang_extends(
    L: int, h: int, branch: int, chunk: int, budget: int, buffered: bool = True
) -> Iterator[tuple[int, int]]:
    """Yield where each extend of SGLang's prefill keeps a state (0: nowhere), and where it ends.

    >>> list(sglang_extends(1000, 64, 448, 64, 256))
    [(320, 320), (448, 576), (832, 832), (960, 1000)]

    L tokens of prompt are computed from the joint hit h on, ``budget`` at a time. Without buffers
    to track states in (``buffered``) that is each extend's end.
    """
    s = h
    while s < L:
        e = min(s + budget, L)
        position = s + (e - s) // chunk * chunk if buffered else e
        if buffered and s < branch < e and (branch - s) % chunk == 0:
            position = branch
        yield position * (position > s), e
        s = e


SGLANG_STRATEGIES = ("extra_buffer", "no_buffer")


def _sglang_set(*, chunk: int, interval: int, strategy: str) -> None:
    checked_int("chunk", chunk)
    checked_int("interval", interval)
    checked_choice("strategy", strategy, SGLANG_STRATEGIES)


@placement("sglang", check=_sglang_set)
def sglang(
    request: Lengths,
    match: Match,
    settings: Sizes,
    *,
    chunk: int = 64,
    interval: int = 256,
    strategy: str = "extra_buffer",
) -> Positions:
    """Keep one state per extend: its last kernel chunk's end, or the branching point inside it.

    The budget cuts a prefill into extends. While tokens are decoded the newest multiple of the
    track ``interval`` (on the chunk grid) is kept as well; with "no_buffer" it is each extend's end
    and the last cached token's, and no fork. The cache around the rule is that of
    ``serve_tokens(..., "sglang")``. Source: SGLang 0.5.23's radix cache, PR #11214 and #14792.
    """
    L, buffered = request.prompt, strategy == "extra_buffer"
    branch = match.attention // chunk * chunk
    extends = sglang_extends(L, match.joint, branch, chunk, settings.budget, buffered)
    kept = [position for position, _ in extends if position]
    end, grid = L + max(request.output, 1) - 1, lcm(chunk, interval)
    decoded = end // grid * grid if buffered else end
    return [*kept, *[decoded] * (decoded > L)]


def _trtllm_set(
    *,
    interval: int,
    from_start: Sequence[int],
    from_end: Sequence[int],
    branches: bool,
    tokens_per_block: int,
) -> None:
    checked_int("interval", interval, least=0)
    checked_int("tokens_per_block", tokens_per_block)
    for offset in from_start:
        checked_int("from_start", offset)
    for offset in from_end:
        checked_int("from_end", offset, least=0)
    if not (interval or from_start or from_end or branches):
        warnings.warn(
            "trtllm without any snapshot setting keeps no state: reuse is disabled", stacklevel=4
        )


@placement("trtllm", check=_trtllm_set)
def trtllm(
    request: Lengths,
    match: Match,
    settings: Sizes,
    *,
    interval: int = 0,
    from_start: Sequence[int] = (),
    from_end: Sequence[int] = (),
    branches: bool = False,
    tokens_per_block: int = 32,
) -> Positions:
    """Keep snapshots at an interval, at offsets from either end, and at branch points.

    All in tokens, each optional. A branch point is the attention hit cut to ``tokens_per_block``,
    where it lies at least such a block beyond the joint hit. Where no point applies, the prompt's
    end is kept; with nothing set reuse is disabled, with a warning. Source: TensorRT-LLM's
    MambaStateConfig and PR #18272 (branch points), from its public tests.
    """
    if not (interval or from_start or from_end or branches):
        return []
    L, fork = request.prompt, match.attention // tokens_per_block * tokens_per_block
    kept = {
        *(range(interval, L + 1, interval) if interval else ()),
        *(offset for offset in from_start if offset <= L),
        *(L - offset for offset in from_end if offset < L),
        *((fork,) if branches and fork - match.joint >= tokens_per_block else ()),
    }
    return sorted(kept or {L})


@placement("marconi", eviction="flops-as-published")
def marconi(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep at most two states: the new interior node of the radix tree, and the sequence's end.

    The end is the prompt's last boundary, as a trace has no ids for outputs. Evicts by recency and
    FLOPs saved per byte with the published cost model. Source: Marconi, arXiv 2411.19379.
    """
    return [match.attention * match.splits, _last(request, settings)]


@placement("marconi_corrected", eviction="flops")
def marconi_corrected(request: Lengths, match: Match, settings: Sizes) -> Positions:
    """Keep what `marconi` keeps; evict with the cost model's flaws corrected (`MarconiCosts`)."""
    return marconi(request, match, settings)


def _llamacpp_set(*, b: int, ub: int, n: int, cms: int) -> None:
    checked_int("b", b)
    checked_int("ub", ub)
    checked_int("n", n, unit="checkpoints")
    checked_int("cms", cms, least=0)


@placement("llamacpp", check=_llamacpp_set)
def llamacpp(
    request: Lengths,
    match: Match,
    settings: Sizes,
    *,
    b: int = 2048,
    ub: int = 512,
    n: int = 32,
    cms: int = 8192,
) -> Positions:
    """Keep L - min(b, 4 + ub), L - min(b, 4), the last user message's start, and the live end L.

    Batch b, micro-batch ub, the newest n checkpoints. ``cms`` is the least distance of earlier
    messages, of which a trace does not tell; the last one and the end are exempt. A rule has
    neither slots nor what they erase: `replay_engine` does. Source: llama.cpp's server, b10229 and
    later.
    """
    L = request.prompt
    places = sorted({L - min(b, 4 + ub), L - min(b, 4), request.message})
    return [*[position for position in places if position > match.joint][-n:], L]


def optimal_positions(weights: Sequence[int], count: int) -> list[int]:
    """Return the ``count`` positions that minimise the expected recomputation.

    >>> optimal_positions([1] * 12, 2)  # overlaps of 0 to 11, all as likely
    [4, 8]

    ``weights[o]`` says how often a later request shares o units; it recomputes from the deepest
    position at or before o, or from 0. Positions in the same units, ascending; fewer than ``count``
    where more save nothing. An exact dynamic programme in O(N * count), exact for integer weights.
    """
    # With i the last position before j, overlaps in [i, j) cost their weight times their distance
    # from i. Sorted out by j that is a line in x = W[j] with slope -i, so the best i for each j is
    # on the lower hull of lines, which x crosses from left to right.
    checked_int("count", count, least=0, unit="positions")
    N = len(weights)
    W = [0, *accumulate(weights)]  # overlaps before j
    T = [0, *accumulate(w * o for o, w in enumerate(weights))]  # and their tokens
    cost = list(T)  # of overlaps before j, with no position below j
    choices: list[list[int]] = []
    for _ in range(min(count, N)):
        hull: list[tuple[int, int]] = []  # (i, intercept)
        best, choice, at = [0] * (N + 1), [0] * (N + 1), 0
        for j in range(N + 1):
            line = (j, cost[j] - T[j] + j * W[j])
            while len(hull) > 1 and _hides(hull[-2], hull[-1], line):
                hull.pop()
            hull.append(line)
            at = min(at, len(hull) - 1)
            while at + 1 < len(hull) and _at(hull[at + 1], W[j]) <= _at(hull[at], W[j]):
                at += 1
            best[j], choice[j] = T[j] + _at(hull[at], W[j]), hull[at][0]
        if best[N] == cost[N]:
            break
        cost = best
        choices.append(choice)
    positions, j = [], N
    for choice in reversed(choices):
        j = choice[j]
        positions.append(j)
    return sorted({p for p in positions if 0 < p < N})


def _at(line: tuple[int, int], x: int) -> int:
    return line[1] - line[0] * x


def _hides(a: tuple[int, int], b: tuple[int, int], c: tuple[int, int]) -> bool:
    """Whether b is nowhere below both a and c (slopes fall from a to c)."""
    return (c[1] - a[1]) * (b[0] - a[0]) <= (b[1] - a[1]) * (c[0] - a[0])


def expected_recompute(weights: Sequence[int], positions: Iterable[int]) -> float:
    """Return the mean units between an overlap and the deepest position at or before it.

    >>> expected_recompute([1] * 12, [4, 8])
    1.5
    """
    grid = [0, *sorted(positions)]
    cost = sum(w * (o - grid[bisect_left(grid, o + 1) - 1]) for o, w in enumerate(weights))
    return cost / sum(weights)


def optimal(count: int, overlaps: Iterable[int], *, grain: int = 1) -> Rule:
    """Return the rule that keeps the best ``count`` positions for these overlaps.

    >>> optimal(1, [512, 1024, 1024], grain=512).place(Lengths(4096), Match(), Sizes(512))
    [1024]

    ``overlaps`` are tokens that requests share with earlier ones (`Replay.ceiling`), counted on a
    grid of ``grain`` tokens. No rule with ``count`` fixed positions recomputes less on average; a
    rule that looks at each request may.
    """
    units = [int(o) // grain for o in overlaps]
    weights = [0] * (max(units, default=0) + 1)
    for unit in units:
        weights[unit] += 1
    positions = [p * grain for p in optimal_positions(weights, count)]
    return Rule(f"optimal({count})", partial(_within, positions))


def _within(positions: list[int], request: Lengths, match: Match, settings: Sizes) -> Positions:
    return [p for p in positions if p < request.prompt]


@dataclass(frozen=True, slots=True)
class MarconiCosts:
    """What a state saves and weighs in Marconi's model, as published or corrected.

    >>> costs = MarconiCosts(published=True)
    >>> (10_000 // 16 * costs.state_bytes + 10_000 * costs.attention_bytes) / 1e9
    17.39776

    The defaults are its 7B hybrid in fp16. As published, the saving of an MLP subtracts the
    parent's *attention* FLOPs, and a state omits the expansion factor and counts four convolution
    taps instead of three. FLOPs and bytes; lengths in tokens. Source: arXiv 2411.19379, and the
    code beside it.
    """

    published: bool = False
    attention_layers: int = 4
    recurrent_layers: int = 24
    mlp_layers: int = 28
    D: int = 4096
    N: int = 128
    expand: int = 2

    @property
    def attention_bytes(self) -> int:
        """Keys and values of one token, all layers."""
        return self.attention_layers * 2 * self.D * 2

    @property
    def state_bytes(self) -> int:
        """One state with its convolution window, all layers."""
        inner = self.expand * self.D
        state = (self.D if self.published else inner) * self.N
        window = (inner + 2 * self.N) * (4 if self.published else 3)
        return self.recurrent_layers * (state + window) * 2

    def flops_saved(self, length: int, parent: int) -> int:
        """FLOPs that a hit at ``length`` saves over a hit at ``parent``."""
        D, N = self.D, self.N

        def attend(n: int) -> int:
            return 8 * n * D * D + 4 * n * n * D

        mlp = 16 * length * D * D - (attend(parent) if self.published else 16 * parent * D * D)
        scan = (12 * D * D + 16 * D * N + 10) * (length - parent)
        return (
            self.attention_layers * (attend(length) - attend(parent))
            + self.mlp_layers * mlp
            + self.recurrent_layers * scan
        )

    def efficiency(self, length: int, parent: int) -> float:
        """FLOPs saved per byte that the state and its edge of attention cache take."""
        weight = self.state_bytes + self.attention_bytes * (length - parent)
        return self.flops_saved(length, parent) / weight
