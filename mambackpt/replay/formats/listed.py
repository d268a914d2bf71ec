"""One request a row, with the ids of its blocks: Mooncake, Dynamo, AIPerf and Bailian."""

from typing import Any

from mambackpt.replay.formats.records import Line
from mambackpt.replay.trace import TraceRows


class ListedReader:
    """Rows of ``hash_ids``: times in ms; Bailian's in seconds, with chats by ``chat_id``.

    Dynamo's and AIPerf's rows may name a session: later turns may then have a ``delay`` after the
    turn before instead of a time. How long that one took is not in the file and counts as nothing.
    """

    def __init__(self, rows: TraceRows, layout: str) -> None:
        self.rows, self.grain, self.bailian = rows, rows.grain, layout == "bailian"
        self.chats: dict[Any, int] = {}
        self.newest: dict[int, float] = {}  # when the newest turn of each session arrived
        self.sessions = False

    def take(self, line: Line, record: Any) -> None:
        """Append one row."""
        if type(record) is not dict:
            raise line.error("(all)", f"{record!r:.60}", "an object", "removing the line")
        prompt = line.whole(record, "input_length", 1)
        counts = sorted({prompt // self.grain, -(-prompt // self.grain)})
        if record.get("block_size", self.grain) != self.grain:
            expected = f"blocks of {self.grain} tokens, as in the row before"
            hint = "a file whose rows have blocks of one size"
            raise line.error("block_size", repr(record["block_size"]), expected, hint)
        chat, arrival = self._chat(line, record)
        self.rows.add(
            arrival,
            prompt,
            line.whole(record, "output_length"),
            ids=line.ids(record, "hash_ids", tuple(counts))[: prompt // self.grain],
            conversation=chat,
            line=line.number,
        )

    def finish(self) -> list[str]:
        """Say how the rows were read."""
        return ["a turn's delay counts from the arrival of the turn before"] * self.sessions

    def _chat(self, line: Line, record: dict[str, Any]) -> tuple[int, float]:
        """The number of the conversation, and the time."""
        if self.bailian:
            chat_id = line.whole(record, "chat_id")
            parent = line.whole(record, "parent_chat_id", -1)
            chat = self.chats[chat_id] = self.chats.get(parent, len(self.chats))
            return chat, line.seconds(record, "timestamp")
        session = record.get("session_id")
        if session is None:
            return -1, line.seconds(record, "timestamp", 1e-3)
        if type(session) not in (str, int):
            raise line.error("session_id", repr(session), "a name or a number", "'session-1'")
        chat = self.chats.setdefault(session, len(self.chats))
        timed = record.get("timestamp", record.get("created_time")) is not None
        if timed or chat not in self.newest:
            arrival = line.seconds(record, "timestamp", 1e-3)
        else:
            self.sessions = True
            arrival = self.newest[chat] + line.seconds(record, "delay", 1e-3)
        self.newest[chat] = arrival
        return chat, arrival
