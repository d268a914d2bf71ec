"""The shapes in which traces are published: one file a family, each a reader of its records.

A reader's ``take(line, record)`` appends a record's requests to `TraceRows`, or does so when
``finish()`` is called, which says how they were read. `mambackpt.replay.files` finds a file's
reader.
"""

from mambackpt.replay.formats.conversations import ConversationReader
from mambackpt.replay.formats.listed import ListedReader
from mambackpt.replay.formats.records import Line, read_records
from mambackpt.replay.formats.tables import has_lengths, is_table, no_prefixes, read_lengths
from mambackpt.replay.formats.texts import MessageReader, ShareGptReader, TokenReader

__all__ = [
    "ConversationReader",
    "Line",
    "ListedReader",
    "MessageReader",
    "ShareGptReader",
    "TokenReader",
    "has_lengths",
    "is_table",
    "no_prefixes",
    "read_lengths",
    "read_records",
]
