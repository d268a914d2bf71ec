"""The worker: it moves states between blocks, runs the recurrence, and stores what it is told to.

It asks the shared predicate itself where a checkpoint goes; nothing tells it what was reserved.
"""

from collections.abc import Sequence

from mambackpt.engine.blocks import NO_TOKENS, Block, Content, digests, extend
from mambackpt.engine.events import Copied, Written
from mambackpt.engine.groups import Live, Log, checkpoint_column
from mambackpt.engine.lockstep import Lockstep
from mambackpt.engine.recurrence import PRIME, Recurrence, State
from mambackpt.engine.recurrent import RecurrentGroup
from mambackpt.engine.settings import Settings
from mambackpt.engine.variants import Query, find_variant


class Worker:
    """What the model's forward passes do to the blocks; ``outputs`` are the tokens they sample."""

    def __init__(
        self, settings: Settings, groups: Sequence[RecurrentGroup], log: Log, lockstep: Lockstep
    ) -> None:
        self.variant = find_variant(settings.variant)
        self.groups = groups
        self.layers = [Recurrence(group.number) for group in groups if settings.recurrence]
        self.log = log
        self.lockstep = lockstep
        self.outputs: dict[str, list[int]] = {}

    def compute(self, scheduled: Sequence[tuple[Live, Query]]) -> None:
        """Run one step: copy, read every initial state, then write, as a batch does."""
        for group in self.groups:
            for live, source, target in group.copies:
                self._copy(live, group, source, target)
        initial = [
            [self._initial_state(live, query, group) for group in self.groups]
            for live, query in scheduled
        ]
        for (live, query), contents in zip(scheduled, initial, strict=True):
            self._forward(live, query, contents)

    def _copy(self, live: Live, group: RecurrentGroup, source: Block, target: Block) -> None:
        if source is not target:
            target.content = source.content
            self.log.add(Copied, live, group.number, source.id, target.id)
            self.lockstep.wrote(live, group, target, None)

    def _initial_state(self, live: Live, query: Query, group: RecurrentGroup) -> Content:
        """Bring the state to the column that will run, and return what is there."""
        if not query.start:
            return Content(0, NO_TOKENS, self._initial(group))
        blocks = live.rows[group.number].blocks
        block = blocks[live.running + live.accepted - 1]
        column = -(-query.end // group.B) - 1
        if live.running != column:
            self._copy(live, group, block, blocks[column])
            block = blocks[column]
        return block.content or Content(0, -block.id, self._initial(group))  # bytes of nobody

    def _initial(self, group: RecurrentGroup) -> State | None:
        return self.layers[group.number - 1].initial() if self.layers else None

    def _advance(self, live: Live, group: int, content: Content, start: int, end: int) -> Content:
        """Return what a state becomes when the tokens [start, end) of the request are applied."""
        if content.digest == live.digests[start]:
            digest = live.digests[end]
        else:
            digest = digests(live.tokens[start:end], content.digest)[-1]
        state = content.state
        if state is not None:
            state = self.layers[group].run(state, live.tokens[start:end])
        return Content(content.tokens + end - start, digest, state)

    def _forward(self, live: Live, query: Query, contents: list[Content]) -> None:
        """Compute one query, store its states, and sample the tokens that follow it."""
        start, end, B = query.start, query.end, query.mamba_block_size
        known = min(end, len(live.tokens))
        live.running = -(-end // B) - 1
        inside = end - start > query.hash_block_size and self.variant.writes_inside(query)
        for n, group in enumerate(self.groups):
            at = start
            if inside:
                column, at = checkpoint_column(query), query.position
                contents[n] = self._advance(live, n, contents[n], start, at)
                if live.rows[group.number].blocks[column] is not group.pool.null:
                    self._write(live, group, column, at, contents[n])
            contents[n] = self._advance(live, n, contents[n], at, known)
            self._write(live, group, live.running, known, contents[n])
        live.computed, live.accepted = known, 1
        live.decodes_now = known == len(live.tokens)
        if not live.decodes_now:
            return
        self._sample(live, contents)
        if end > known:
            self._verify_drafts(live, contents, known, end)

    def _write(
        self, live: Live, group: RecurrentGroup, column: int, position: int, content: Content
    ) -> None:
        block = live.rows[group.number].blocks[column]
        block.content = content
        self.log.add(Written, live, group.number, column, block.id, position)
        self.lockstep.wrote(live, group, block, position)

    def _sample(self, live: Live, contents: list[Content]) -> None:
        """Append the next token: the one the states vote for, or the one that is given."""
        if self.layers:
            votes = (
                layer.emit(content.state)
                for layer, content in zip(self.layers, contents, strict=True)
                if content.state is not None
            )
        else:
            votes = (content.digest for content in contents)
        token = sum(votes) % PRIME
        self.outputs[live.name].append(token)
        place = len(live.tokens) - live.prompt
        live.append(live.request.forced[place] if live.request.forced else token)

    def _verify_drafts(self, live: Live, contents: list[Content], known: int, end: int) -> None:
        """Compute the draft tokens [known, end), one state each, and keep the accepted ones."""
        cycle = live.request.accepted
        accepted = min(cycle[live.decodes % len(cycle)], end - known, live.total - len(live.tokens))
        if live.padded:  # nobody made these drafts
            accepted, live.padded = 0, False
        else:
            live.decodes += 1
        for place in range(known, end):
            right = place < known + accepted
            for n, group in enumerate(self.groups):
                if right:
                    contents[n] = self._advance(live, n, contents[n], place, place + 1)
                else:
                    contents[n] = self._misadvance(n, contents[n])
                column = live.running + place + 1 - known
                self._write(live, group, column, place + 1, contents[n])
            if right:
                self._sample(live, contents)
        live.computed, live.accepted = known + accepted, 1 + accepted
        # The state of a boundary that an accepted draft reached moves to that boundary's column.
        B = self.groups[0].B
        boundary = live.computed // B * B
        if boundary >= known:
            for group in self.groups:
                blocks = live.rows[group.number].blocks
                source = blocks[live.running + boundary - known]
                self._copy(live, group, source, blocks[boundary // B - 1])
            if live.running == boundary // B - 1:
                live.accepted = 1

    def _misadvance(self, group: int, content: Content) -> Content:
        """Return what a rejected draft makes of a state; no request reads it."""
        wrong = PRIME - 1
        state = content.state
        if state is not None:
            state = self.layers[group].run(state, [wrong])
        return Content(content.tokens + 1, extend(content.digest, -2), state)
