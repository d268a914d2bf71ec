"""Logs of texts: OpenAI requests, ShareGPT conversations; and lists of token ids.

Without a tokenizer a text is cut into words and marks, one for a token, or for as many as the
file's usage has it. Which prompts share a prefix is as the texts say; how long that is, is an
estimate, and the trace says so.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointValueError
from mambackpt.replay.formats.records import Line
from mambackpt.replay.trace import BlockNumbers, TraceRows

_WORD = re.compile(r"\w+|[^\w\s]")
Encode = Callable[[str], Sequence[int]]


class TokenReader:
    """One prompt's token ids a record."""

    def __init__(self, rows: TraceRows) -> None:
        self.rows, self.numbers = rows, BlockNumbers()

    def finish(self) -> list[str]:
        """Say how the lists were read."""
        return []

    def take(self, line: Line, record: Any) -> None:
        """Append one prompt."""
        if type(record) is not list or not record or {*map(type, record)} != {int}:
            raise line.error("(all)", f"{record!r:.60}", "a list of token ids", "[1, 2, 3]")
        ids = self.numbers.blocks(record, self.rows.grain)
        arrival = float(len(self.rows.prompt))
        self.rows.add(arrival, len(record), 0, ids=ids, line=line.number)


@dataclass(frozen=True, slots=True)
class _Request:
    """A request in words, or in a tokenizer's tokens: its messages, and where the last one starts.

    ``in_words``: the output is counted as the prompt is, not told by the file.
    """

    line: int
    pieces: list[Sequence[int]]
    output: int
    in_words: bool
    arrival: float
    chat: int
    message: int


class _Texts:
    """Texts as numbers, and what is said about them."""

    def __init__(self, rows: TraceRows, tokenizer: Path | None) -> None:
        self.rows, self.numbers = rows, BlockNumbers()
        self.encoded: dict[str, Sequence[int]] = {}  # a message comes again with every turn
        self.asked: list[_Request] = []
        self.tokenizer = tokenizer
        self.left_out = self.counted = self.told = 0
        words: dict[str, int] = {}
        if tokenizer is None:
            rows.name += " (words, an estimate)"
            self.encode: Encode = lambda text: [
                words.setdefault(word, len(words)) for word in _WORD.findall(text)
            ]
        else:
            self.encode = _encoder(tokenizer)

    def finish(self) -> list[str]:
        """Append the requests, now that the tokens of a word are known; say how they were read.

        That is one number for the whole file, so that equal prefixes have equal lengths.
        """
        tokens, words = (self.told, self.counted) if self.told else (1, 1)
        if self.tokenizer is not None:
            tokens = words = 1
        grain = self.rows.grain
        for request in self.asked:
            text = [number for piece in request.pieces for number in piece]
            prompt = max(len(text) * tokens // words, 1)
            ends = [-(-end * words // tokens) for end in range(grain, prompt + 1, grain)]
            output = request.output * tokens // words if request.in_words else request.output
            self.rows.add(
                *(request.arrival, prompt, output),
                ids=self.numbers.between(text, ends),
                conversation=request.chat,
                message=request.message * tokens // words,
                line=request.line,
            )
        return self._notes()

    def _notes(self) -> list[str]:
        ratio = self.told / self.counted if self.told else 0.0
        if self.tokenizer is None:
            each = f", {ratio:.2f} each as the file's usage has it" if ratio else ""
            notes = [f"an estimate: words and marks count as tokens{each} (--tokenizer is exact)"]
        else:
            notes = [f"tokens of {self.tokenizer.name}, without what a chat template adds"]
            notes += [f"the file's usage counts {ratio:.2f} times as many"] if ratio else []
        if self.left_out:
            notes.append(f"left out: parts of messages that are no text ({self.left_out:,})")
        return notes

    def pieces(self, text: str) -> Sequence[int]:
        """The numbers of a text."""
        known = self.encoded.get(text)
        if known is None:
            known = self.encoded[text] = self.encode(text)
        return known

    def message(self, line: Line, message: Any) -> list[Sequence[int]]:
        """The pieces of one message: its role, its text, and the tools that it calls."""
        if type(message) is not dict or type(message.get("role")) is not str:
            raise line.error("messages", f"{message!r:.60}", "objects with a role", _EXAMPLE)
        pieces = [self.pieces(message["role"]), *self.content(line, message.get("content"))]
        for call in ("tool_calls", "function_call"):
            if message.get(call):
                pieces.append(self.pieces(json.dumps(message[call], sort_keys=True)))
        return pieces

    def content(self, line: Line, content: Any) -> list[Sequence[int]]:
        """The pieces of a message's content: a text, parts of which some are texts, or nothing."""
        if content is None:
            return []
        if type(content) is str:
            return [self.pieces(content)]
        if type(content) is not list:
            raise line.error("content", f"{content!r:.60}", "a text, or a list of parts", _EXAMPLE)
        pieces: list[Sequence[int]] = []
        for part in content:
            text = part.get("text") if type(part) is dict else part
            if type(text) is str:
                pieces.append(self.pieces(text))
            else:
                self.left_out += 1
        return pieces


_EXAMPLE = '{"role": "user", "content": "Hello"}'


class MessageReader(_Texts):
    """OpenAI requests, logged as they were sent: ``messages``, a ``prompt``, or AIPerf's names.

    The body may stand in ``body``, ``request`` or ``payload``; output tokens come from ``usage``,
    ``output_length`` or the reply's words. A last message of the assistant's is the reply.
    """

    def __init__(self, rows: TraceRows, tokenizer: Path | None) -> None:
        super().__init__(rows, tokenizer)
        self.sessions: dict[Any, int] = {}

    def take(self, line: Line, record: Any) -> None:
        """Append one request."""
        if type(record) is not dict:
            raise line.error(
                "(all)", f"{record!r:.60}", "an object", f'{{"messages": [{_EXAMPLE}]}}'
            )
        if record.get("message_mode") == "delta":
            hint = "a log whose rows hold the whole conversation"
            raise line.error("message_mode", "'delta'", "the replies to be in the file", hint)
        body = next((record[name] for name in BODIES if type(record.get(name)) is dict), record)
        messages = list(self._messages(line, body))
        reply: list[Sequence[int]] = []
        if len(messages) > 1 and messages[-1][0] == "assistant":
            reply = messages.pop()[1]
        pieces: list[Sequence[int]] = []
        if body.get("tools"):
            pieces.append(self.pieces(json.dumps(body["tools"], sort_keys=True)))
        last_user = 0
        for role, message in messages:
            last_user = _size(pieces) if role == "user" else last_user
            pieces += message
        if not _size(pieces):
            raise line.error("messages", "no text", "at least one word", _EXAMPLE)
        answer = next((record[name] for name in _ANSWERS if type(record.get(name)) is dict), record)
        answer = answer["body"] if type(answer.get("body")) is dict else answer
        told = self._told(line, record, answer, _size(pieces))
        output = self._said(line, answer, reply) if told is None else told
        place = (self._arrival(line, record), self._chat(line, record), last_user)
        self.asked.append(_Request(line.number, pieces, output, told is None, *place))

    def _messages(
        self, line: Line, body: dict[str, Any]
    ) -> Iterator[tuple[str, list[Sequence[int]]]]:
        prompt = body.get("prompt", body.get("text_input"))
        if "messages" not in body and type(prompt) is str:
            yield "user", [self.pieces(prompt)]
            return
        messages = line.get(body, "messages")
        if type(messages) is not list or not messages:
            raise line.error("messages", f"{messages!r:.60}", "a list of messages", f"[{_EXAMPLE}]")
        for message in messages:
            pieces = self.message(line, message)
            yield message["role"], pieces

    def _told(
        self, line: Line, record: dict[str, Any], answer: dict[str, Any], words: int
    ) -> int | None:
        """Output tokens, where the file tells them; ``usage`` tells the prompt's as well."""
        usage = answer.get("usage")
        if type(usage) is dict:
            if "prompt_tokens" in usage:
                self.told += line.whole(usage, "prompt_tokens", 1)
                self.counted += words
            if "completion_tokens" in usage:
                return line.whole(usage, "completion_tokens")
        if "output_length" in record or "output_tokens" in record:
            return line.whole(record, "output_length")
        return None

    def _said(self, line: Line, answer: dict[str, Any], reply: list[Sequence[int]]) -> int:
        """The size of the reply, where there is one."""
        choices = answer.get("choices")
        if not reply and type(choices) is list and choices and type(choices[0]) is dict:
            said = choices[0].get("message")
            reply = self.message(line, said) if type(said) is dict else []
        return _size(reply)

    def _arrival(self, line: Line, record: dict[str, Any]) -> float:
        if record.get("timestamp") is not None:
            return line.seconds(record, "timestamp", 1e-3)
        if type(record.get("created")) in (int, float):
            return line.seconds(record, "created")
        return float(len(self.asked))

    def _chat(self, line: Line, record: dict[str, Any]) -> int:
        session = record.get("session_id")
        if session is None:
            return -1
        if type(session) not in (str, int):
            raise line.error("session_id", repr(session), "a name or a number", "'session-1'")
        return self.sessions.setdefault(session, len(self.sessions))


BODIES = ("body", "request", "payload")
_ANSWERS = ("response", "output")


class ShareGptReader(_Texts):
    """ShareGPT: ``conversations`` of ``from`` and ``value``; each answer was one request."""

    number = -1

    def take(self, line: Line, record: Any) -> None:
        """Append the requests of one conversation."""
        turns = line.get(record, "conversations") if type(record) is dict else record
        if type(turns) is not list or not all(map(_is_turn, turns)):
            expected = "a list of objects with from and value"
            hint = '[{"from": "human", "value": "Hello"}]'
            raise line.error("conversations", f"{turns!r:.60}", expected, hint)
        self.number += 1
        pieces: list[Sequence[int]] = []
        last_user, waiting = 0, False
        for turn in turns:
            answers = turn["from"] in _ANSWERING
            piece = [self.pieces(turn["from"]), self.pieces(turn["value"])]
            if not answers:
                last_user = _size(pieces)
            elif pieces:
                self._ask(line, pieces, _size(piece), last_user)
            waiting = not answers
            pieces = pieces + piece
        if waiting:
            self._ask(line, pieces, 0, last_user)

    def _ask(self, line: Line, pieces: list[Sequence[int]], output: int, last_user: int) -> None:
        place = (float(len(self.asked)), self.number, last_user)
        self.asked.append(_Request(line.number, pieces, output, True, *place))


_ANSWERING = ("gpt", "assistant", "model", "chatgpt", "bing", "bard")


def _size(pieces: Sequence[Sequence[int]]) -> int:
    return sum(map(len, pieces))


def _is_turn(turn: Any) -> bool:
    return type(turn) is dict and type(turn.get("from")) is str and type(turn.get("value")) is str


def _encoder(path: Path) -> Encode:
    """How the tokenizer of a tokenizer.json, or of a folder with one, encodes a text."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise CheckpointValueError(
            "--tokenizer needs the package tokenizers, which is not installed; expected it beside "
            "this kit. Try pip install tokenizers, or leave --tokenizer out for an estimate."
        ) from None
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        tokenizer = Tokenizer.from_file(str(file))
    except Exception as error:  # the package raises plain Exceptions
        raise CheckpointValueError(
            f"--tokenizer {path} cannot be read ({error}); expected a tokenizer.json, or a folder "
            "with one. Try the folder that holds the model."
        ) from error
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids
