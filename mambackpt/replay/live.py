"""Several conversations in one pool: the requests of a trace, turn by turn."""

from collections import deque
from collections.abc import Iterator

import numpy as np

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.replay.trace import Trace, TraceRows


def interleave(trace: Trace, live: int) -> Trace:
    """Return the trace with ``live`` conversations at once, one turn of each after the other.

    >>> from mambackpt.replay import generate_shared
    >>> trace = generate_shared(6, groups=1, turns=3)
    >>> interleave(trace, 1).conversation.tolist(), interleave(trace, 2).conversation.tolist()
    ([0, 0, 0, 1, 1, 1], [0, 1, 0, 1, 0, 1])

    Conversations begin in the order of their first requests; when one ends, the next one takes its
    place. Arrivals become the numbers of the turns: times are not kept. Raises CheckpointValueError
    where ``live`` is below 1, or requests name no conversation.
    """
    checked_int("live", live, unit="conversations")
    if (trace.conversation < 0).any():
        raise CheckpointValueError(
            f"live is {live} and the requests of {trace.name} name no conversation; expected "
            "session_id, chat_id or conversations in the file. Try a generator, as chat:2000."
        )
    rows = TraceRows(f"{trace.name}, {live:,} live", trace.grain)
    columns = (trace.prompt, trace.output, trace.conversation, trace.message, trace.row)
    prompt, output, conversation, message, row = (column.tolist() for column in columns)
    first, count = trace.first.tolist(), trace.count.tolist()
    for turn, i in enumerate(_turns(conversation, live)):
        runs = [[first[r], count[r]] for r in range(row[i], row[i + 1])]
        chat, asked = conversation[i], message[i]
        rows.add(turn, prompt[i], output[i], runs=runs, conversation=chat, message=asked)
    told = f"{live:,} conversations are live at once, a turn of each after the other"
    return rows.link([*trace.notes, told])


def _turns(conversation: list[int], live: int) -> Iterator[int]:
    """The requests in their new order."""
    order = np.argsort(conversation, kind="stable")
    chats: dict[int, deque[int]] = {chat: deque() for chat in conversation}
    for i in order.tolist():
        chats[conversation[i]].append(i)
    waiting = deque(chats.values())
    active: deque[deque[int]] = deque()
    while waiting or active:
        while waiting and len(active) < live:
            active.append(waiting.popleft())
        turns = active.popleft()
        yield turns.popleft()
        if turns:
            active.append(turns)
        elif waiting:
            active.append(waiting.popleft())
