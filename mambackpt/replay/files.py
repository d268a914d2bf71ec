"""Trace files as they are published: which shape a file has, and the trace that it holds.

A new shape is a reader in `mambackpt.replay.formats`, the field that gives it away in `_SIGNS`, and
its name in `LAYOUTS` and `_reader`.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int
from mambackpt.replay.formats import (
    ConversationReader,
    Line,
    ListedReader,
    MessageReader,
    ShareGptReader,
    TokenReader,
    has_lengths,
    is_table,
    no_prefixes,
    read_records,
)
from mambackpt.replay.trace import NotChained, Trace, TraceRows

_GRAINS = {"mooncake": 512}  # tokens per block of the published files; 16 where none is said
LAYOUTS = ("mooncake", "bailian", "claude-code", "messages", "sharegpt", "tokens")
_TEXTS = ("messages", "sharegpt")
# What a record has, and the layout that it is of then: the first that fits.
_SIGNS = {
    "requests": "claude-code",
    "conversations": "sharegpt",
    "chat_id": "bailian",
    "hash_ids": "mooncake",
    **dict.fromkeys(("messages", "text_input", "prompt", "body", "request", "payload"), "messages"),
}


def load_trace(
    path: str | Path,
    *,
    layout: str | None = None,
    grain: int | None = None,
    subagents: bool = False,
    duplicates: bool = False,
    tokenizer: str | Path | None = None,
) -> Trace:
    """Read a trace as it is published: a file, ``.gz`` or not, or a folder of files.

    >>> load_trace("traces/conversation_trace.jsonl.gz")  # doctest: +SKIP

    Records are JSON: one a line, over several lines, or all in one list. ``layout`` is found from
    the first one unless given:

    * "mooncake": ``timestamp`` (ms), ``input_length``, ``output_length``, ``hash_ids`` (one per
      512-token block, the last one partial). Source: kvcache-ai/Mooncake, FAST25-release. Dynamo's
      and AIPerf's rows as well: ``input_tokens``, ``output_tokens``, ``created_time``,
      ``session_id``, ``delay`` or ``delay_ms``, ``block_size``.
    * "bailian": the same with seconds, 16-token blocks, ``chat_id``, ``parent_chat_id``, ``turn``.
      Source: alibaba-edu/qwen-bailian-usagetraces-anon.
    * "claude-code": one conversation an object, 64-token blocks, ids local to it, as ``hash_ids``
      or as ``runs`` of [first, count]. ``subagents=True`` keeps their requests, ``duplicates=True``
      conversations that repeat another one exactly. Source: callanjfox/kv-cache-tester, AgentX.
    * "messages": OpenAI requests as they were sent, with or without ``usage``.
    * "sharegpt": ``conversations`` of ``from`` and ``value``.
    * "tokens": lists of token ids.

    Texts are cut into words and marks, one for a token (or for as many as ``usage`` has it for the
    whole file), which the trace's name and notes call an estimate; with ``tokenizer``, the path of
    a tokenizer.json, they are tokens. Ids that name a
    block's own content instead of the whole prefix are chained, and the notes say so. ``grain``
    (tokens per block) overrides the layout's. Raises CheckpointValueError with file, line and field
    for malformed input, FileNotFoundError for no file; nothing half-read is returned.
    """
    path = Path(path)
    if layout is not None:
        checked_choice("layout", layout, LAYOUTS, hint="Try leaving it out.")
    if grain is not None:
        checked_int("grain", grain)
    rows: TraceRows | None = None
    take: Callable[[Line, Any], None] | None = None
    finish: Callable[[], list[str]] = list
    for line, record in read_records(path):
        if rows is None or take is None:
            kind = layout or _layout_of(path, line, record)
            rows = TraceRows(path.name, grain or _grain_of(kind, line, record))
            if tokenizer is not None and kind not in _TEXTS:
                raise CheckpointValueError(
                    f"--tokenizer is given and {path.name} is of the layout {kind}, which has ids "
                    f"and no texts; expected one of {', '.join(_TEXTS)}. Try leaving it out."
                )
            words = None if tokenizer is None else Path(tokenizer)
            reader = _reader(rows, kind, subagents, duplicates, words)
            take, finish = reader.take, reader.finish
        take(line, record)
    notes = finish()
    if rows is None or not len(rows.prompt):
        raise CheckpointValueError(
            f"{path.name} is empty; expected at least one request. Try another file."
        )
    return _linked(rows, path, notes)


def _reader(
    rows: TraceRows, kind: str, subagents: bool, duplicates: bool, tokenizer: Path | None
) -> ConversationReader | ListedReader | MessageReader | ShareGptReader | TokenReader:
    """What reads the records of this layout."""
    if kind == "claude-code":
        return ConversationReader(rows, subagents=subagents, duplicates=duplicates)
    if kind == "messages":
        return MessageReader(rows, tokenizer)
    if kind == "sharegpt":
        return ShareGptReader(rows, tokenizer)
    return TokenReader(rows) if kind == "tokens" else ListedReader(rows, kind)


def _grain_of(kind: str, line: Line, record: Any) -> int:
    """Tokens per block: what the first record says, or what is usual."""
    if kind == "claude-code" or (kind == "mooncake" and "block_size" in record):
        return line.whole(record, "block_size", 1)
    return _GRAINS.get(kind, 16)


def _linked(rows: TraceRows, path: Path, notes: Iterable[str]) -> Trace:
    """The trace; where ids are of blocks alone, they are chained first."""
    try:
        return rows.link(notes)
    except NotChained as clash:
        where = f"line {rows.lines[clash.row]} has {clash.block} after another prefix"
        rows.chain()
        note = f"ids name blocks, not whole prefixes ({where}): chained by (previous id, id)"
        return rows.link([*notes, note])


def _layout_of(path: Path, line: Line, record: object) -> str:
    """The layout of a file whose first record this is."""
    if isinstance(record, list):
        return "tokens"
    if isinstance(record, dict):
        for field, layout in _SIGNS.items():
            if field in record:
                return layout
        if has_lengths(record):
            raise no_prefixes(path, "has no hash_ids")
    if isinstance(record, str) and is_table(record):
        raise no_prefixes(path, "is a table of lengths")
    raise line.error(
        "(all)",
        f"{record!r:.60}",
        f"a known layout, one of {', '.join(LAYOUTS)}",
        "JSON with hash_ids, requests, messages, conversations or token ids",
    )
