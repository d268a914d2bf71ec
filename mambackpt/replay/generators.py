"""Generated traces: chats, agents and documents, calibrated to public traces."""

import math
from collections.abc import Callable, Iterator
from functools import cache
from heapq import heappop, heappush
from random import Random

from mambackpt.errors import checked_int
from mambackpt.replay.trace import Runs, Trace, TraceRows, TraceStatistics


class Text:
    """A text that grows at its end and can be cut back; its blocks get numbers as they fill up."""

    def __init__(self, used: list[int], grain: int) -> None:
        self.used, self.grain = used, grain  # ``used``: how many numbers all texts have taken
        self.tokens = self.blocks = 0
        self.runs: Runs = []

    def copy(self) -> "Text":
        """A text that begins like this one."""
        other = Text(self.used, self.grain)
        other.tokens, other.blocks = self.tokens, self.blocks
        other.runs = [list(run) for run in self.runs]
        return other

    def grow(self, tokens: int) -> None:
        """Add tokens that no other text has."""
        self.tokens += tokens
        new = self.tokens // self.grain - self.blocks
        if new:
            if self.runs and sum(self.runs[-1]) == self.used[0]:
                self.runs[-1][1] += new
            else:
                self.runs.append([self.used[0], new])
            self.used[0] += new
            self.blocks += new

    def cut(self, tokens: int) -> None:
        """Cut back to this many tokens; a number is never used again for another block."""
        self.tokens = max(tokens, 1)
        drop = self.blocks - self.tokens // self.grain
        self.blocks -= drop
        while drop > 0:
            last = self.runs[-1]
            taken = min(drop, last[1])
            last[1] -= taken
            drop -= taken
            if not last[1]:
                self.runs.pop()


class _Teller:
    """Tells stories to a trace: each starts at a time of its own and asks its requests after it."""

    def __init__(self, name: str, requests: int, seed: int, grain: int) -> None:
        self.name, self.wanted = name, checked_int("requests", requests, unit="requests")
        self.grain, self.rng = checked_int("grain", grain), Random(seed)
        self.used = [0]
        self.start, self.story = 0.0, -1
        self.waiting: list[float] = []  # arrivals after the newest story's start
        self.due = 0  # requests before it
        self.rows: list[tuple[float, int, int, int, Runs, int]] = []

    def text(self, tokens: int) -> Text:
        text = Text(self.used, self.grain)
        text.grow(tokens)
        return text

    def stories(self, gap: float) -> Iterator[Random]:
        """One after another, ``gap`` seconds apart on average, while requests are wanted."""
        while self.due < self.wanted:
            self.start += self.rng.expovariate(1 / gap)
            self.story += 1
            while self.waiting and self.waiting[0] <= self.start:
                heappop(self.waiting)
                self.due += 1
            yield self.rng

    def ask(self, text: Text, after: float, output: int, message: int = 0) -> None:
        """Add a request of this story, with the text as it is now."""
        runs = [list(run) for run in text.runs]
        arrival = self.start + after
        self.rows.append((arrival, self.story, text.tokens, output, runs, message))
        heappush(self.waiting, arrival)

    def trace(self) -> Trace:
        self.rows.sort(key=lambda row: row[:2])
        rows = TraceRows(self.name, self.grain)
        for arrival, story, prompt, output, runs, message in self.rows[: self.wanted]:
            rows.add(arrival, prompt, output, runs=runs, conversation=story, message=message)
        return rows.link()


def _skewed(rng: Random, middle: float, mean: float, most: float = 1e6) -> int:
    """A log-normal count with this median and mean, at least 1."""
    spread = math.sqrt(2 * math.log(mean / middle))
    return max(1, min(int(rng.lognormvariate(math.log(middle), spread)), int(most)))


def generate_chat(requests: int = 1000, *, seed: int = 0, grain: int = 512) -> Trace:
    """Return a trace of chats: system prompts, turns that append, and edits that branch.

    >>> from mambackpt.replay import describe_trace
    >>> describe_trace(generate_chat(200)).requests
    200

    Calibrated to the Mooncake conversation trace (12,031 requests: 38 % follow-ups, of which 85 %
    append; the reuse ceiling is 37 %). A short trace has had less time for follow-ups:

    * 1,000 requests: 28 % follow-ups, reuse ceiling 29 %
    * 2,000 requests: 33 % follow-ups, reuse ceiling 32 %
    * 6,000 requests: 39 % follow-ups, reuse ceiling 37 %

    The same seed gives the same trace.
    """
    teller = _Teller(f"chat:{requests}", requests, seed, grain)
    root = teller.text(600)  # the prompt that all share
    systems = [root]
    for _ in range(8):
        system = root.copy()
        system.grow(_skewed(teller.rng, 1500, 2500))
        systems.append(system)
    for rng in teller.stories(gap=0.48):
        text = rng.choices(systems, [40, 1, 0.5, 0.3, 0.25, 0.2, 0.16, 0.14, 0.12])[0].copy()
        text.grow(_skewed(rng, 5300, 10_300, 120_000))
        output = _skewed(rng, 300, 350, 4000)
        after, turns = 0.0, [text.copy()]
        teller.ask(text, after, output)
        while rng.random() < 0.385:
            after += _skewed(rng, 60, 150)
            if rng.random() < 0.06:  # an edited message: leave from an earlier turn
                text = rng.choice(turns).copy()
                text.cut(text.tokens - _skewed(rng, 600, 1500))
            else:
                text.grow(output)
            message = text.tokens
            text.grow(_skewed(rng, 250, 1300, 60_000))
            output = _skewed(rng, 300, 350, 4000)
            turns.append(text.copy())
            teller.ask(text, after, output, message)
    return teller.trace()


def generate_agents(requests: int = 1000, *, seed: int = 0, grain: int = 64) -> Trace:
    """Return a trace of agent loops: long contexts, mostly appends, some rewinds.

    >>> from mambackpt.replay import describe_trace
    >>> 0.9 < describe_trace(generate_agents(300)).append_share < 0.97
    True

    Calibrated to the Claude Code traces: 93 % of the follow-ups append, 4 % change the last block,
    the others rewind a little or start over from the system prompt. Those that do not append branch
    at a median near 70,000 tokens, in the public traces at 81,300.

    * 1,000 requests: 98 % follow-ups, reuse ceiling 96 %
    * 1,500 requests: 98 % follow-ups, reuse ceiling 96 %
    * 6,000 requests: 98 % follow-ups, reuse ceiling 97 %
    """
    teller = _Teller(f"agents:{requests}", requests, seed, grain)
    for rng in teller.stories(gap=600.0):
        system = teller.text(_skewed(rng, 15_000, 16_000))
        text, after, message = system.copy(), 0.0, system.tokens
        text.grow(_skewed(rng, 55_000, 85_000, 500_000))
        for _ in range(_skewed(rng, 44, 66, 400)):
            teller.ask(text, after, output := _skewed(rng, 217, 439, 30_000), message)
            after += _skewed(rng, 18, 130)
            move = rng.random()
            if move < 0.017:  # compaction: the system prompt and a summary
                text = system.copy()
                message = text.tokens
                text.grow(_skewed(rng, 20_000, 40_000, 200_000))
                continue
            if move < 0.028:
                text.cut(text.tokens - rng.randint(2 * grain, 5 * grain))
            elif move < 0.067:
                text.cut(text.tokens // grain * grain - rng.randint(1, grain))
            else:
                text.grow(output)
            message = text.tokens
            text.grow(_skewed(rng, 400, 1250, 60_000))
    return teller.trace()


def generate_documents(requests: int = 1000, *, seed: int = 0, grain: int = 512) -> Trace:
    """Return a trace of questions about shared documents, between short private prompts.

    >>> generate_documents(50).prompt.tolist() == generate_documents(50).prompt.tolist()
    True

    Calibrated to the Mooncake synthetic trace (3,993 requests: 44 % follow-ups, of which 76 %
    append; the reuse ceiling is 65 %). Follow-ups are fewer here, above all in a short trace; what
    does not append branches less deep, at a median near 20,000 tokens instead of 30,700:

    * 1,000 requests: 29 % follow-ups, reuse ceiling 54 %
    * 2,000 requests: 32 % follow-ups, reuse ceiling 60 %
    * 6,000 requests: 38 % follow-ups, reuse ceiling 65 %
    """
    teller = _Teller(f"documents:{requests}", requests, seed, grain)
    for rng in teller.stories(gap=0.45):
        if rng.random() < 0.66:
            teller.ask(teller.text(_skewed(rng, 150, 300)), 0.0, _skewed(rng, 70, 150))
            continue
        document = teller.text(_skewed(rng, 19_000, 24_000, 80_000))
        after = 0.0
        while True:
            text = document.copy()
            if after and rng.random() < 0.1:  # another version of its last pages
                text.cut(text.tokens - _skewed(rng, 600, 900))
                text.grow(_skewed(rng, 700, 900))
            text.grow(_skewed(rng, 40, 80))
            teller.ask(text, after, _skewed(rng, 70, 150))
            after += _skewed(rng, 30, 90)
            if rng.random() < (0.26 if document.tokens > 20_000 else 0.4):
                break
    return teller.trace()


GENERATORS: dict[str, Callable[..., Trace]] = {
    "chat": generate_chat,
    "agents": generate_agents,
    "documents": generate_documents,
}
# What each generator is calibrated to, as `describe_trace` finds it in the public traces: the
# conversation trace of Mooncake (kvcache-ai/Mooncake, FAST25-release), the 692 distinct
# conversations of the Claude Code traces (callanjfox/kv-cache-tester), Mooncake's synthetic trace.
PUBLIC_STATISTICS = {
    "chat": TraceStatistics(
        requests=12_031,
        prompt_median=6_909,
        prompt_mean=12_035.1,
        output_mean=342.62,
        follow_up_share=0.38484,
        append_share=0.85076,
        branch_depth=3_072,
        reuse_ceiling=0.37338,
    ),
    "agents": TraceStatistics(
        requests=45_542,
        prompt_median=101_495,
        prompt_mean=119_379.8,
        output_mean=439.06,
        follow_up_share=0.98384,
        append_share=0.93387,
        branch_depth=81_344,
        reuse_ceiling=0.96285,
    ),
    "documents": TraceStatistics(
        requests=3_993,
        prompt_median=11_587,
        prompt_mean=15_325.5,
        output_mean=149.12,
        follow_up_share=0.43777,
        append_share=0.76030,
        branch_depth=30_720,
        reuse_ceiling=0.65043,
    ),
}


@cache
def example_trace() -> Trace:
    """Return the generated trace that figures replay unless another one is given."""
    return generate_documents(2000)
