"""The boot log of an engine: what it says, which settings it was started with, what follows.

The lines are those of vllm; their words changed between releases, and workers, colours and
timestamps stand before them.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product

from mambackpt.errors import CheckpointError, CheckpointValueError
from mambackpt.models.capacity import Capacity
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.presets import PRESETS

_COLOURS = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_NUMBER = r"([\d,]+)"
# What a line gives, and how it is found; the first is the one that every boot of a hybrid prints.
_LINES = {
    "block": rf"Setting attention block size to {_NUMBER} tokens",
    "padding": r"Padding mamba page size by ([\d.]+) ?%",
    "groups": r"kv cache group sizes[^\d]*([\d, ]+)",
    "scheduler_block": rf"kv lcm block sizes?[^\d]*{_NUMBER}",
    "pool_gib": r"Available KV cache memory: ([\d.]+) GiB",
    "cache_tokens": rf"GPU KV cache size: {_NUMBER} tokens",
    "concurrency": r"Maximum concurrency for [\d,]+ tokens per request: ([\d.]+) ?x",
    "max_len": rf"(?:Maximum concurrency for |max_model_len['\"]?[=:] ?|max_seq_len=){_NUMBER}",
    "seqs": rf"max_num_seqs['\"]?[=:] ?{_NUMBER}",
    "hash_unit": rf"(?:prefix_match_unit|hash_block_size)['\"]?[=:] ?{_NUMBER}",
    "checkpoint_blocks": rf"num_prefill_checkpoint_blocks['\"]?[=:] ?{_NUMBER}",
    "alignment": r"prefill_checkpoint_alignment['\"]?[=:] ?(None|\d+)",
}
_FOUND = {name: re.compile(pattern) for name, pattern in _LINES.items()}
_EXAMPLE = (
    "Setting attention block size to 784 tokens to ensure that attention page size is >= mamba "
    "page size."
)
_KV = ("bf16", "fp8", "int8_per_token_head")  # fp8_per_token_head takes the same bytes as int8
_DRAFTS, _RANKS = range(17), (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class BootLog:
    """What the lines of a boot log say; None where no line said it. Made by `read_boot_log`.

    ``block``, ``scheduler_block``, ``max_len``, ``cache_tokens`` and ``hash_unit`` in tokens,
    ``padding`` in percent of a state, ``pool_bytes`` of the worker with the least. ``alignment`` is
    0 where the log says that no layer can export.
    """

    block: int | None = None
    padding: float | None = None
    groups: tuple[int, ...] = ()
    scheduler_block: int | None = None
    pool_bytes: int | None = None
    cache_tokens: int | None = None
    concurrency: float | None = None
    max_len: int | None = None
    seqs: int | None = None
    hash_unit: int | None = None
    checkpoint_blocks: int | None = None
    alignment: int | None = None
    models: tuple[HybridModel, ...] = field(default=(), repr=False)

    @cached_property
    def settings(self) -> list[HybridModel]:
        """Every known model, served so that it gives this block and this padding, closest first."""
        if self.block is None:
            return []
        shapes = {(m.recurrent, m.attention, m.recurrent_layers): m for m in reversed(self.models)}
        fitting = [
            served
            for model in reversed(shapes.values())
            for served in _ways_to_serve(model)
            if self._fits(served)
        ]
        return sorted(fitting, key=self._distance)

    def _distance(self, served: HybridModel) -> tuple[bool, bool, int, int, float]:
        """First what also gives the logged concurrency, then the plainest settings."""
        off = True
        if self.concurrency and self.pool_bytes and self.max_len and served.attention_layers:
            holds = served.capacity(self.pool_bytes, self.max_len)
            off = abs(holds.concurrency / self.concurrency - 1) > 0.02
        window = served.conv_dtype != "bf16"
        padding = abs(served.padding_percent() - (self.padding or 0.0))
        return off, window, served.ranks, served.spec, padding

    def _fits(self, served: HybridModel) -> bool:
        if served.block_size() != self.block:
            return False
        return self.padding is None or abs(served.padding_percent() - self.padding) < 0.00501

    @property
    def capacity(self) -> Capacity | None:
        """What the pool holds of the closest model, where pool and layers are known."""
        if not self.settings or self.pool_bytes is None or self.max_len is None:
            return None
        try:
            return self.settings[0].capacity(
                self.pool_bytes, self.max_len, checkpoint_blocks=self.checkpoint_blocks or 0
            )
        except CheckpointError:
            return None

    @property
    def contradictions(self) -> list[str]:
        """What cannot be right, or will not do what was meant: a sentence each."""
        return list(_contradictions(self))


def read_boot_log(text: str, models: Iterable[HybridModel] = ()) -> BootLog:
    """Read the lines of an engine's boot log that tell what its cache can do.

    >>> log = read_boot_log("INFO Setting attention block size to 784 tokens to ensure that ...\\n"
    ...                     "INFO Padding mamba page size by 0.13% to ensure that ...")
    >>> log.block, log.settings[0].name
    (784, 'qwen3.5-27b')

    Prefixes, colours and several workers do not matter. ``models`` are those that may have been
    served (default: the presets). Raises CheckpointValueError where no line is recognised. Source:
    the messages of vllm 0.33.0, and of older releases where they differ.
    """
    plain = _COLOURS.sub("", text)
    said = {name: pattern.findall(plain) for name, pattern in _FOUND.items()}
    if not any(said.values()):
        raise CheckpointValueError(
            f"no line of the log is known ({len(plain.splitlines()):,} lines); expected such as "
            f"'{_EXAMPLE}' Try the log of the engine's start, at the level INFO."
        )
    whole = {
        name: int(said[name][-1].replace(",", ""))
        for name in (
            *("block", "scheduler_block", "cache_tokens", "max_len", "seqs", "hash_unit"),
            "checkpoint_blocks",
        )
        if said[name]
    }
    if said["alignment"]:
        whole["alignment"] = 0 if said["alignment"][-1] == "None" else int(said["alignment"][-1])
    sizes = (
        [part for part in said["groups"][-1].split(",") if part.strip()] if said["groups"] else []
    )
    return BootLog(
        **whole,
        padding=float(said["padding"][-1]) if said["padding"] else None,
        groups=tuple(map(int, sizes)),
        pool_bytes=round(min(map(float, said["pool_gib"])) * 2**30) if said["pool_gib"] else None,
        concurrency=float(said["concurrency"][-1]) if said["concurrency"] else None,
        models=tuple(models) or tuple(PRESETS.values()),
    )


def _ways_to_serve(model: HybridModel) -> Iterator[HybridModel]:
    """The model under every known dtype, number of draft tokens and of ranks that it can have."""
    dtypes = product(("fp32", "bf16"), ("bf16", "fp32"), _KV)
    for (recurrent, window, kv), drafts, ranks in product(dtypes, _DRAFTS, _RANKS):
        try:
            served = replace(
                model, recurrent_dtype=recurrent, conv_dtype=window, kv_dtype=kv, spec=drafts,
                ranks=ranks, source="solved for from the log",
            )  # fmt: skip
            served.block_size()
        except CheckpointError:
            continue  # ranks that do not divide the heads, a dtype that this attention has not
        yield served


def _contradictions(log: BootLog) -> Iterator[str]:
    holds = log.capacity
    if log.block and log.max_len and log.block > log.max_len:
        yield (
            f"A block has {log.block:,} tokens and the longest request {log.max_len:,}: no prompt "
            "can ever hit."
        )
    if log.block and log.hash_unit == log.block:
        yield (
            f"The hash unit is the block ({log.block:,} tokens): no prompt of up to {log.block:,} "
            "tokens can hit."
        )
    if log.checkpoint_blocks and log.alignment == 0:
        yield (
            f"{log.checkpoint_blocks} checkpoint blocks are reserved for each request and no layer "
            "can export: they stay empty."
        )
    if log.cache_tokens and log.concurrency and log.max_len:
        product = log.concurrency * log.max_len
        if abs(log.cache_tokens - product) > 0.00501 * log.max_len + 1:
            yield (
                f"The log says {log.cache_tokens:,} tokens and {log.concurrency:.2f} x "
                f"{log.max_len:,} = {product:,.0f}: older releases log ids // groups x block, "
                "which is no length that fits. Believe the concurrency."
            )
        if log.concurrency < 1:
            yield (
                f"Not one request of {log.max_len:,} tokens fits ({log.concurrency:.2f}): the "
                "longest that do will be preempted."
            )
    if holds and log.seqs and holds.admitted_ids < log.seqs * holds.live_ids(1):
        yield (
            f"{log.seqs:,} requests of the shortest length take {log.seqs * holds.live_ids(1):,} "
            f"block ids and there are {holds.admitted_ids:,}: requests will wait for ids, not for "
            "bytes."
        )
    if log.scheduler_block and log.block and log.scheduler_block % log.block:
        yield (
            f"The scheduler's block of {log.scheduler_block:,} tokens is no multiple of the block "
            f"of {log.block:,}: the lines are of two engines."
        )
