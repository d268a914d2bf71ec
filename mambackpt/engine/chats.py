"""Branching chats: conversations that share a system prompt and return to earlier turns."""

import random

from mambackpt.engine.settings import Request


def branching_chats(
    seed: int,
    *,
    conversations: int = 4,
    rounds: int = 6,
    branch: float = 0.4,
    vocabulary: int = 50_000,
) -> list[Request]:
    """Return the requests of one seed, a round of every conversation after the other.

    >>> [len(branching_chats(seed)) for seed in (0, 1)]
    [24, 24]

    A system prompt of 20-200 tokens starts all conversations. A request continues its
    conversation's newest history, with probability ``branch`` cut at a uniformly random token, with
    5-160 new tokens, and is answered with 1-89 tokens, which are given, so that the same chats can
    be run under different rules.
    """
    draw = random.Random(seed)

    def text(least: int, most: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(draw.randint(least, most)))

    histories = [text(20, 200)] * conversations
    requests = []
    for turn in range(rounds):
        for chat, history in enumerate(histories):
            if draw.random() < branch:
                history = history[: draw.randint(1, len(history))]
            request = Request(
                f"chat {chat + 1}, turn {turn + 1}", history + text(5, 160), text(1, 89)
            )
            histories[chat] = request.history
            requests.append(request)
    return requests
