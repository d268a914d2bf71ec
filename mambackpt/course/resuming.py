"""What notebook 03 shows of resumed models: rows of its tables."""

from collections.abc import Mapping, Sequence
from typing import Any

from mambackpt import resume
from mambackpt.models import PRESETS


def architecture_rows(table: Sequence[resume.Row]) -> list[tuple[str, str, int, str, str]]:
    """Return each architecture with its layers, its kernel's grid, and how many resumes are equal.

    ``table``: the rows of `mambackpt.resume.equality_rows`.
    """
    rows = []
    for name, one in resume.ARCHITECTURES.items():
        mine = [row for row in table if row.model == name]
        inside = sum(row.inside for row in mine)
        equal = sum(row.comparison.equal for row in mine)
        told = f"{inside} of {len(mine)}", f"{equal} of {len(mine)}"
        rows.append((name, one.layer, one.alignment, *told))
    return rows


def fading_errors(names: Sequence[str]) -> dict[str, dict[str, resume.Comparison]]:
    """Return for two models what each of these faults does to the tokens after a resume."""
    models = {name: resume.load_model(name) for name in ("mamba-2", "qwen3-next")}
    return {
        name: {fault: resume.FAULTS[fault].check(model) for fault in names}
        for name, model in models.items()
    }


def late_rows(names: Sequence[str]) -> list[tuple[str, ...]]:
    """Return how far memories are off after a window one token late, in percent of themselves.

    After 3, 16 and 64 tokens.
    """
    off = {name: resume.late_memories(resume.load_model(name)) for name in names}
    return [(name, *(f"{100 * error:.0f} %" for error in of.values())) for name, of in off.items()]


def fault_table(rows: Sequence[tuple[str, Any, resume.Comparison]]) -> list[tuple[str, str, str]]:
    """Return for each fault by how much a logit is off, and how often the check catches it.

    ``rows`` as `mambackpt.resume.fault_rows` returns them.
    """
    found = {name: [one for _, f, one in rows if f.name == name] for name in resume.FAULTS}
    return [
        (
            name,
            _span([one.difference for one in mine]),
            f"{sum(not one.equal for one in mine)} of {len(mine)}",
        )
        for name, mine in found.items()
    ]


def _span(values: Sequence[float]) -> str:
    if max(values) == float("inf"):
        return "no number"
    return f"{min(values):.1g} to {max(values):.1g}" if len(values) > 1 else f"{values[0]:.1g}"


def parted_rows() -> list[tuple[str, int, int | str]]:
    """Return where C's answers from the right and from the wrong state part, in each architecture.

    24 tokens, always the likeliest: how many agree, and after how many they part.
    """
    rows = []
    for name in resume.ARCHITECTURES:
        right, wrong = resume.released_answers(resume.load_model(name))
        same = [one == other for one, other in zip(right, wrong, strict=True)]
        rows.append((name, sum(same), same.index(False) if False in same else "never"))
    return rows


def rounded_rows() -> list[tuple[str, ...]]:
    """Return the errors 1, 10, 100 and 1,000 tokens after a memory was stored in bf16.

    Stored once, and ten times, in each architecture that has a memory.
    """
    rows: list[tuple[str, ...]] = []
    for name, one in resume.ARCHITECTURES.items():
        if one.scan:
            found = resume.bf16_errors(resume.load_model(name))
            rows.append((name, "once", *map(_small, found.once.values())))
            rows.append((name, "ten times", *map(_small, found.cycles.values())))
    return rows


def _small(error: float) -> str:
    return f"{error:.1g}" if error >= 1e-4 else "below 0.0001"


def prefix_rows(prefixes: Mapping[str, Sequence[int]]) -> list[tuple[str, int, str, str]]:
    """Return one checkpoint beside the attention cache of prefixes of these lengths, in MB.

    >>> prefix_rows({"kimi-k3": [8000]})
    [('kimi-k3', 8000, '449', '111')]
    """
    rows = []
    for name, lengths in prefixes.items():
        model = PRESETS[name]
        for tokens in lengths:
            sizes = model.model_state_bytes, tokens * model.model_token_bytes
            state, attention = (f"{size / 1e6:,.0f}" for size in sizes)
            rows.append((name, tokens, state, attention))
    return rows
