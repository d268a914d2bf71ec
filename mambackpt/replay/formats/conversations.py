"""Claude Code and AgentX traces: one conversation an object, whose ids are its own."""

import marshal
from collections.abc import Iterator
from hashlib import blake2b
from typing import Any

from mambackpt.replay.formats.records import Line
from mambackpt.replay.trace import Runs, TraceRows


class ConversationReader:
    """Objects of ``requests`` with ``hash_ids``, or ``runs`` of [first, count].

    Times of subagents' requests count from the group's start, or from the conversation's where none
    of a conversation's lies before its group (as AgentX writes them).
    """

    def __init__(self, rows: TraceRows, *, subagents: bool, duplicates: bool) -> None:
        self.rows, self.grain = rows, rows.grain
        self.subagents, self.duplicates = subagents, duplicates
        self.copies: set[bytes] = set()  # digests of the conversations read so far
        self.offset = self.number = 0

    def finish(self) -> list[str]:
        """Say how the conversations were read."""
        return []

    def take(self, line: Line, record: Any) -> None:
        """Append the requests of one conversation."""
        if type(record) is not dict or line.whole(record, "block_size", 1) != self.grain:
            expected = f"blocks of {self.grain} tokens"
            hint = "a file whose conversations have blocks of one size"
            raise line.error("block_size", f"{record!r:.60}", expected, hint)
        requests = [
            (
                start + line.seconds(request, "t"),
                line.whole(request, "in", 1),
                line.whole(request, "out"),
                _runs(line, request, self.grain),
            )
            for start, request in _requests(line, record, self.subagents)
        ]
        number, self.number = self.number, self.number + 1
        digest = blake2b(marshal.dumps(requests, 2)).digest()
        if digest in self.copies and not self.duplicates:
            return
        self.copies.add(digest)
        for arrival, prompt, output, runs in requests:
            self.rows.add(
                *(arrival, prompt, output),
                runs=runs,
                offset=self.offset,
                conversation=number,
                line=line.number,
            )
        if record.get("hash_id_scope", "local") == "local":
            # Ids are a conversation's own: the next one's start after the largest of this one.
            runs_of = (run for _, _, _, runs in requests for run in runs)
            self.offset += max(map(sum, runs_of), default=0)


def _requests(
    line: Line, record: dict[str, Any], subagents: bool
) -> Iterator[tuple[float, dict[str, Any]]]:
    """A conversation's requests, each with what its time counts from."""
    requests = _listed(line, record)
    groups = [group for group in requests if group.get("type") == "subagent" and subagents]
    absolute = all(
        line.seconds(inner, "t") >= line.seconds(group, "t")
        for group in groups
        for inner in _listed(line, group)
    )
    for request in requests:
        if request.get("type") != "subagent":
            yield 0.0, request
        elif subagents:
            start = 0.0 if absolute else line.seconds(request, "t")
            yield from ((start + t, inner) for t, inner in _requests(line, request, True))


def _listed(line: Line, record: dict[str, Any]) -> list[dict[str, Any]]:
    requests = line.get(record, "requests")
    if type(requests) is not list or not all(type(request) is dict for request in requests):
        hint = "removing the conversation"
        raise line.error("requests", f"{requests!r:.60}", "a list of requests", hint)
    return requests


def _runs(line: Line, record: dict[str, Any], grain: int) -> Runs:
    """Runs of [first, count], joined where one continues the other."""
    field = "runs" if "runs" in record else "hash_ids"
    blocks = record["in"] // grain
    if field == "hash_ids":
        counts = sorted({blocks, -(-record["in"] // grain)})
        pairs: Any = [[i, 1] for i in line.ids(record, field, tuple(counts))[:blocks]]
    else:
        pairs = line.get(record, field)
    joined: Runs = []
    total, end = 0, -1
    for pair in pairs if type(pairs) is list else [pairs]:
        if type(pair) is not list or len(pair) != 2 or {*map(type, pair)} != {int}:
            raise line.error(field, f"{pair!r:.60}", "pairs of [first id, count]", "[[0, 12]]")
        first, count = pair
        if first < 0 or count < 1:
            raise line.error(field, repr(pair), "an id from 0 and a count from 1", "[0, 1]")
        total += count
        if first == end:
            joined[-1] = [joined[-1][0], joined[-1][1] + count]
        else:
            joined.append(pair)
        end = first + count
    if total != blocks:
        expected = f"{blocks}, one for each full block of the prompt"
        raise line.error(field, f"{total} ids", expected, "the file's own block_size")
    return joined
