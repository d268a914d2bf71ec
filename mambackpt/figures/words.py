"""What figures call things: rules, traces and settings in words, with their code word once."""

import re
from collections.abc import Sequence

from mambackpt.draw import wrap
from mambackpt.replay import Trace

# The rules of the ladder: each keeps what the one before it keeps, and more.
PLACEMENTS = ("all", "last", "last+junction", "last+junction+chunk")
_RULES = {
    "attention": "attention alone, no states",
    "none": "nothing",
    "all": "every block boundary",
    "last": "the prompt's last boundary",
    "junction": "where prefixes part",
    "chunk": "every chunk end",
    "internal": "the last step's checkpoint",
    "sglang": "each step's end, and forks",
    "trtllm": "snapshots",
    "marconi": "new forks, and the last boundary",
    "marconi_corrected": "new forks, and the last boundary",
    "llamacpp": "near the end, and the last message",
}
_SHORT = {
    "last": "only the prompt's last boundary",
    "last+junction": "last boundary + where prefixes part",
    "last+junction+chunk": "last boundary + where prefixes part + chunk ends",
}


def rule_in_words(rule: str) -> str:
    """Return after which tokens a rule keeps a state, in words.

    >>> rule_in_words("last+junction")
    "the prompt's last boundary and where prefixes part"
    >>> rule_in_words("interval(2048)")
    'every 2,048 tokens, and the last boundary'

    A rule without words of its own keeps its code word.
    """
    if found := re.fullmatch(r"interval\((?:every=)?(\d+)\)", rule):
        return f"every {int(found[1]):,} tokens, and the last boundary"
    parts = [_RULES.get(part, part) for part in rule.split("+")]
    return " and ".join((", ".join(parts[:-1]), parts[-1])) if len(parts) > 1 else parts[0]


def short_words(rule: str, *, width: float = 100.0) -> str:
    """Return the words of a rule for a label, in lines of ``width`` em.

    >>> short_words("last+junction")
    'last boundary + where prefixes part'
    """
    return wrap(_SHORT.get(rule) or rule_in_words(rule), width)


def code_words(rules: Sequence[str], *, rows: bool = False) -> str:
    """Return what to type for these rules: said once in a figure.

    >>> code_words(["all", "last"])
    'As --rule these are all and last.'
    >>> code_words(["all", "last"], rows=True)
    'From the top, --rule is all, last.'

    ``rows``: they stand below each other in this order.
    """
    if rows:
        return f"From the top, --rule is {', '.join(rules)}."
    return f"As --rule these are {listed(rules)}."


def asked(trace: Trace, whole: Trace | None = None) -> str:
    """Return how many requests a trace has, and whose they are.

    >>> from mambackpt.replay import example_trace
    >>> asked(example_trace())
    '2,000 requests (generated documents)'

    ``whole`` is the trace of which these are the first.
    """
    name, colon, count = trace.name.partition(":")
    source = f"generated {name}" if colon and count.isdecimal() else trace.name
    if whole is not None and len(whole) > len(trace):
        return f"the first {len(trace):,} of {len(whole):,} requests ({source})"
    return f"{len(trace):,} requests ({source})"


def listed(words: Sequence[str]) -> str:
    """Return words with commas, and "and" before the last.

    >>> listed(["one", "two", "three"])
    'one, two and three'
    """
    return " and ".join([*([", ".join(words[:-1])] if len(words) > 1 else []), words[-1]])
