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
_NUMBER = r"(\d[\d,]*)"
_DECIMAL = r"(\d+(?:\.\d+)?)"
# What a line gives, and how it is found; the first is the one that every boot of a hybrid prints.
_LINES = {
    "block": rf"Setting attention block size to {_NUMBER} tokens",
    "padding": rf"Padding mamba page size by {_DECIMAL} ?%",
    "groups": r"kv cache group sizes[^\d\n]*(\d[\d, ]*)",
    "scheduler_block": rf"kv lcm block sizes?[^\d\n]*{_NUMBER}",
    "pool_gib": rf"Available KV cache memory: (-?){_DECIMAL} GiB",
    "cache_tokens": rf"GPU KV cache size: {_NUMBER} tokens",
    "concurrency": rf"Maximum concurrency for [\d,]+ tokens per request: {_DECIMAL} ?x",
    "max_len": rf"(?:Maximum concurrency for |max_model_len['\"]?[=:] ?|max_seq_len=){_NUMBER}",
    "seqs": rf"max_num_seqs['\"]?[=:] ?{_NUMBER}",
    "hash_unit": rf"(?:prefix_match_unit|hash_block_size)['\"]?[=:] ?{_NUMBER}",
    "checkpoint_blocks": rf"num_prefill_checkpoint_blocks['\"]?[=:] ?{_NUMBER}",
    "alignment": r"prefill_checkpoint_alignment['\"]?[=:] ?(None|\d+)",
    "served": r"\bmodel['\"]?[=:] ?['\"]([^'\"\n]+)['\"]",
    "ranks": rf"tensor_parallel_size['\"]?[=:] ?{_NUMBER}",
    "drafts": rf"num_spec(?:ulative)?_tokens['\"]?[=:] ?{_NUMBER}",
}
_FOUND = {name: re.compile(pattern) for name, pattern in _LINES.items()}
_WHOLE = (
    *("block", "scheduler_block", "cache_tokens", "max_len", "seqs", "hash_unit"),
    *("checkpoint_blocks", "ranks", "drafts"),
)
_SETTINGS = ("seqs", "max_len", "served", "ranks", "drafts")  # any engine's log may name these
_EXAMPLE = (
    "Setting attention block size to 784 tokens to ensure that attention page size is >= mamba "
    "page size."
)
_KV = ("bf16", "fp8", "int8_per_token_head")  # fp8_per_token_head takes the same bytes as int8
_DRAFTS, _RANKS = range(17), (1, 2, 4, 8, 16)
_ROUNDED = 2**30 // 200  # bytes: the memory is logged to two decimals of a GiB
_GRIDS = (None, 64)  # what the kernels of recurrent layers ask a block to be a multiple of
# What a preset's name says of how it is served, and not of the model.
_SERVED_AS = re.compile(r"(-(fp8|fp16|bf16|mtp\d+|tp\d+))+$")


@dataclass(frozen=True)
class BootLog:
    """What the lines of a boot log say; None where no line said it. Made by `read_boot_log`.

    ``block``, ``scheduler_block``, ``max_len``, ``cache_tokens`` and ``hash_unit`` in tokens,
    ``padding`` in percent of a state, ``pool_bytes`` of the worker with the least. ``alignment`` is
    0 where the log says that no layer can export. ``blocks`` are all that it names: more than one
    where it has the lines of several engines.
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
    served: str | None = None
    ranks: int | None = None
    drafts: int | None = None
    blocks: tuple[int, ...] = ()
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

    def _distance(self, served: HybridModel) -> tuple[bool, int, bool, bool, int, int, float]:
        """First what the log's other lines name and its concurrency, then the plainest settings."""
        off = True
        if self.concurrency and self.max_len and served.attention_layers:
            holds = self._capacity_of(served)
            off = holds is None or abs(holds.concurrency / self.concurrency - 1) > 0.02
        missed = sum(
            (
                self.served is not None and not self.names(served),
                self.ranks not in (None, served.ranks),
                self.drafts not in (None, served.spec),
            )
        )
        window, grid = served.conv_dtype != "bf16", served.checkpoint_alignment is not None
        padding = abs(served.padding_percent() - (self.padding or 0.0))
        return off, missed, window, grid, served.ranks, served.spec, padding

    def names(self, model: HybridModel) -> bool:
        """Whether the model that the log names may be this one."""
        name = _SERVED_AS.sub("", model.name)
        return name in (self.served or "").lower().replace("-4.0-", "-4-")

    def _fits(self, served: HybridModel) -> bool:
        if served.block_size() != self.block:
            return False
        return self.padding is None or abs(served.padding_percent() - self.padding) < 0.00501

    @property
    def capacity(self) -> Capacity | None:
        """What the pool holds of the closest model; None where pool, length or layers are not said.

        The memory is logged to two decimals, so its ids may be one off; the logged tokens, where
        they agree with the concurrency, tell the ids exactly, also where the memory is not logged.
        """
        return self._capacity_of(self.settings[0]) if self.settings else None

    def _capacity_of(self, served: HybridModel) -> Capacity | None:
        told = self.cache_tokens if self.tokens_agree else None
        if self.max_len is None or (self.pool_bytes is None and told is None):
            return None
        try:
            holds = served.capacity(
                2**60 if self.pool_bytes is None else self.pool_bytes,
                self.max_len,
                checkpoint_blocks=self.checkpoint_blocks or 0,
            )
        except CheckpointError:
            return None  # layers that are not known, a pool without room for one id
        if told is None:
            return holds
        logged = replace(holds, ids=-(-told * holds.live_ids(self.max_len) // self.max_len))
        slack = 1 + _ROUNDED // holds.bytes_per_id
        near = self.pool_bytes is None or abs(logged.ids - holds.ids) <= slack
        if logged.logged_tokens == told and near:
            return logged
        return None if self.pool_bytes is None else holds

    @property
    def tokens_agree(self) -> bool:
        """Whether the logged tokens are those of the logged concurrency, as they are since 0.33."""
        if not (self.cache_tokens and self.concurrency and self.max_len):
            return False
        product = self.concurrency * self.max_len
        return abs(self.cache_tokens - product) <= 0.00501 * self.max_len + 1

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
    plain = _COLOURS.sub("", text.replace("\0", ""))  # NUL: UTF-16, read as bytes
    said = {name: pattern.findall(plain) for name, pattern in _FOUND.items()}
    if not any(found for name, found in said.items() if name not in _SETTINGS):
        lines = len(plain.splitlines())
        raise CheckpointValueError(
            f"no line of the log is known (of {lines:,}); expected one such as '{_EXAMPLE}' "
            "Try the log of the engine's start, at the level INFO."
        )
    whole = {name: _whole(said[name][-1]) for name in _WHOLE if said[name]}
    if said["alignment"]:
        whole["alignment"] = 0 if said["alignment"][-1] == "None" else int(said["alignment"][-1])
    pools = [float(f"{sign}{size}") for sign, size in said["pool_gib"]]
    groups = re.findall(r"\d+", said["groups"][-1]) if said["groups"] else []
    return BootLog(
        **whole,
        padding=float(said["padding"][-1]) if said["padding"] else None,
        groups=tuple(map(int, groups)),
        pool_bytes=round(min(pools) * 2**30) if pools else None,
        concurrency=float(said["concurrency"][-1]) if said["concurrency"] else None,
        served=said["served"][0] if said["served"] else None,  # a draft model's comes later
        blocks=tuple(sorted(set(map(_whole, said["block"])))),
        models=tuple(models) or tuple(PRESETS.values()),
    )


def _whole(digits: str) -> int:
    return int(digits.replace(",", ""))


def _ways_to_serve(model: HybridModel) -> Iterator[HybridModel]:
    """The model under every known dtype, number of draft tokens and of ranks that it can have."""
    dtypes = product(("fp32", "bf16"), ("bf16", "fp32"), _KV)
    for (recurrent, window, kv), drafts, ranks in product(dtypes, _DRAFTS, _RANKS):
        blocks = set()
        for grid in _GRIDS:
            try:
                served = replace(
                    model, recurrent_dtype=recurrent, conv_dtype=window, kv_dtype=kv, spec=drafts,
                    ranks=ranks, checkpoint_alignment=grid, source="solved for from the log",
                )  # fmt: skip
                block = served.block_size()
            except CheckpointError:
                break  # ranks that do not divide the heads, a dtype that this attention has not
            if block not in blocks:  # a grid that changes nothing is no other way
                yield served
            blocks.add(block)


def _contradictions(log: BootLog) -> Iterator[str]:
    if len(log.blocks) > 1:
        yield (
            f"The log has blocks of {' and '.join(f'{block:,}' for block in log.blocks)} tokens: "
            f"these are lines of several starts, and the last, of {log.block:,}, is read."
        )
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
            f"Blocks for checkpoints are reserved ({log.checkpoint_blocks} for each request and "
            "group) and no layer can export: they stay empty."
        )
    if log.scheduler_block and log.block and log.scheduler_block % log.block:
        yield (
            f"The scheduler's block of {log.scheduler_block:,} tokens is no multiple of the block "
            f"of {log.block:,}: the lines are of two engines."
        )
    yield from _wrong_sizes(log)


def _wrong_sizes(log: BootLog) -> Iterator[str]:
    """What the figures on memory, tokens and requests say against each other."""
    if log.pool_bytes is not None and log.pool_bytes <= 0:
        yield (
            f"{log.pool_bytes / 2**30:.2f} GiB are left for the cache: the weights fill the "
            "device, and no request fits."
        )
    if log.cache_tokens and log.concurrency and log.max_len:
        if not log.tokens_agree:
            yield (
                f"The log says {log.cache_tokens:,} tokens and {log.concurrency:.2f} x "
                f"{log.max_len:,} = {log.concurrency * log.max_len:,.0f}: older releases log "
                "ids // groups x block, which is no length that fits. Believe the concurrency."
            )
        if log.concurrency < 1:
            yield (
                f"Not one request of {log.max_len:,} tokens fits ({log.concurrency:.2f}): the "
                "longest that do will be preempted."
            )
    holds = log.capacity
    if holds and log.seqs and holds.admitted_ids < log.seqs * holds.live_ids(1):
        yield (
            f"{log.seqs:,} requests of the shortest length take {log.seqs * holds.live_ids(1):,} "
            f"block ids and there are {holds.admitted_ids:,}: requests will wait for ids, not for "
            "bytes."
        )
