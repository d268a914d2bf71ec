"""Logs of texts: OpenAI requests, ShareGPT conversations; and lists of token ids.

Without a tokenizer a text is cut into words and marks, one for a token. Which prompts share a
prefix is as the texts say; how long that is, is an estimate, and the trace says so.
"""

import json
import re
from collections.abc import Callable, Iterator, Sequence
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

    def notes(self) -> list[str]:
        """How the lists were read."""
        return []

    def take(self, line: Line, record: Any) -> None:
        """Append one prompt."""
        if type(record) is not list or not record or {*map(type, record)} != {int}:
            raise line.error("(all)", f"{record!r:.60}", "a list of token ids", "[1, 2, 3]")
        ids = self.numbers.blocks(record, self.rows.grain)
        arrival = float(len(self.rows.prompt))
        self.rows.add(arrival, len(record), 0, ids=ids, line=line.number)


class _Texts:
    """Texts as numbers, and what is said about them."""

    def __init__(self, rows: TraceRows, tokenizer: Path | None) -> None:
        self.rows, self.numbers = rows, BlockNumbers()
        self.encoded: dict[str, Sequence[int]] = {}  # a message comes again with every turn
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

    def notes(self) -> list[str]:
        """How the texts were read."""
        if self.tokenizer is not None:
            notes = [f"tokens of {self.tokenizer.name}, without what a chat template adds"]
        else:
            notes = ["an estimate: words and marks stand for tokens (exact with --tokenizer)"]
            if self.told:
                ratio = self.told / self.counted
                notes.append(f"the file's usage counts {ratio:.2f} times as many prompt tokens")
        if self.left_out:
            notes.append(f"left out: parts of messages that are no text ({self.left_out:,})")
        return notes

    def pieces(self, text: str) -> Sequence[int]:
        """The numbers of a text."""
        known = self.encoded.get(text)
        if known is None:
            known = self.encoded[text] = self.encode(text)
        return known

    def message(self, line: Line, message: Any) -> list[int]:
        """The numbers of one message: its role, its text, and the tools that it calls."""
        if type(message) is not dict or type(message.get("role")) is not str:
            raise line.error("messages", f"{message!r:.60}", "objects with a role", _EXAMPLE)
        tokens = [*self.pieces(message["role"]), *self.content(line, message.get("content"))]
        for call in ("tool_calls", "function_call"):
            if message.get(call):
                tokens += self.pieces(json.dumps(message[call], sort_keys=True))
        return tokens

    def content(self, line: Line, content: Any) -> list[int]:
        """The numbers of a message's content: a text, parts of which some are texts, or nothing."""
        if content is None:
            return []
        if type(content) is str:
            return list(self.pieces(content))
        if type(content) is not list:
            raise line.error("content", f"{content!r:.60}", "a text, or a list of parts", _EXAMPLE)
        tokens: list[int] = []
        for part in content:
            text = part.get("text") if type(part) is dict else part
            if type(text) is str:
                tokens += self.pieces(text)
            else:
                self.left_out += 1
        return tokens

    def ask(
        self, line: Line, prompt: list[int], output: int, *, arrival: float, chat: int, message: int
    ) -> None:
        """Append one request."""
        ids = self.numbers.blocks(prompt, self.rows.grain)
        self.rows.add(
            *(arrival, len(prompt), output),
            ids=ids,
            conversation=chat,
            message=message,
            line=line.number,
        )


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
        reply: list[int] = []
        if len(messages) > 1 and messages[-1][0] == "assistant":
            reply = messages.pop()[1]
        tokens: list[int] = []
        if body.get("tools"):
            tokens += self.pieces(json.dumps(body["tools"], sort_keys=True))
        asked = 0
        for role, piece in messages:
            asked = len(tokens) if role == "user" else asked
            tokens += piece
        if not tokens:
            raise line.error("messages", "no text", "at least one word", _EXAMPLE)
        answer = next((record[name] for name in _ANSWERS if type(record.get(name)) is dict), record)
        self.ask(
            *(line, tokens, self._output(line, record, answer, reply, len(tokens))),
            arrival=self._arrival(line, record),
            chat=self._chat(line, record),
            message=asked,
        )

    def _messages(self, line: Line, body: dict[str, Any]) -> Iterator[tuple[str, list[int]]]:
        prompt = body.get("prompt", body.get("text_input"))
        if "messages" not in body and type(prompt) is str:
            yield "user", list(self.pieces(prompt))
            return
        messages = line.get(body, "messages")
        if type(messages) is not list or not messages:
            raise line.error("messages", f"{messages!r:.60}", "a list of messages", f"[{_EXAMPLE}]")
        for message in messages:
            tokens = self.message(line, message)
            yield message["role"], tokens

    def _output(
        self, line: Line, record: dict[str, Any], answer: Any, reply: list[int], prompt: int
    ) -> int:
        """Output tokens; a prompt's length by ``usage`` is set beside the one counted here."""
        answer = answer["body"] if type(answer.get("body")) is dict else answer
        usage = answer.get("usage")
        if type(usage) is dict:
            if "prompt_tokens" in usage:
                self.told += line.whole(usage, "prompt_tokens", 1)
                self.counted += prompt
            return line.whole(usage, "completion_tokens") if "completion_tokens" in usage else 0
        if "output_length" in record or "output_tokens" in record:
            return line.whole(record, "output_length")
        choices = answer.get("choices")
        if not reply and type(choices) is list and choices and type(choices[0]) is dict:
            said = choices[0].get("message")
            reply = self.message(line, said) if type(said) is dict else []
        return len(reply)

    def _arrival(self, line: Line, record: dict[str, Any]) -> float:
        if record.get("timestamp") is not None:
            return line.seconds(record, "timestamp", 1e-3)
        if type(record.get("created")) in (int, float):
            return line.seconds(record, "created")
        return float(len(self.rows.prompt))

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
        tokens: list[int] = []
        asked, waiting = 0, False
        for turn in turns:
            piece = [*self.pieces(turn["from"]), *self.pieces(turn["value"])]
            answers = turn["from"] in ("gpt", "assistant", "model", "chatgpt", "bing", "bard")
            if answers and tokens:
                self._ask(line, tokens, len(piece), asked)
            elif not answers:
                asked = len(tokens)
            waiting = not answers
            tokens = tokens + piece
        if waiting and tokens:
            self._ask(line, tokens, 0, asked)

    def _ask(self, line: Line, tokens: list[int], output: int, asked: int) -> None:
        arrival = float(len(self.rows.prompt))
        self.ask(line, tokens, output, arrival=arrival, chat=self.number, message=asked)


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
