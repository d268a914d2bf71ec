"""A hybrid model: its two kinds of layers, their counts, and the sizes that follow."""

from dataclasses import dataclass
from math import lcm

from mambackpt.errors import CheckpointValueError, checked_int
from mambackpt.models.capacity import Capacity, pool_capacity
from mambackpt.models.layers import (
    GroupedAttention,
    LatentAttention,
    RecurrentLayer,
    bytes_of,
    mamba_block_size,
)


@dataclass(frozen=True, slots=True)
class HybridModel:
    """A model and how it is served: its two kinds of layers, dtypes, ranks, drafts and grids.

    >>> from mambackpt.models import PRESETS
    >>> model = PRESETS["kimi-k3"]
    >>> model.state_bytes, model.block_size()
    (6512640, 11392)

    All sizes are of one rank, and of one layer unless they say ``model_``. Layer counts are of the
    whole model, None where they are not known. ``ranks`` are tensor-parallel, ``context_ranks``
    share the tokens of the attention cache, ``stages`` share the layers. ``spec`` are draft tokens;
    ``checkpoint_alignment`` is what the recurrent layers ask for (None: nothing);
    ``user_block_size`` is what the user asked for. ``notes`` say in sentences what a number rests
    on where it was not given.
    """

    name: str
    recurrent: RecurrentLayer
    attention: GroupedAttention | LatentAttention
    source: str = ""
    recurrent_dtype: str = "fp32"
    conv_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    ranks: int = 1
    spec: int = 0
    recurrent_layers: int | None = None
    attention_layers: int | None = None
    checkpoint_alignment: int | None = None
    user_block_size: int = 1
    context_ranks: int = 1
    stages: int = 1
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        checked_int("ranks", self.ranks, unit="tensor-parallel ranks")
        checked_int("context_ranks", self.context_ranks, unit="context-parallel ranks")
        checked_int("stages", self.stages, unit="pipeline stages")
        checked_int("spec", self.spec, least=0, unit="draft tokens")
        checked_int("user_block_size", self.user_block_size)
        checked_int("checkpoint_alignment", self.alignment)
        for dtype in (self.recurrent_dtype, self.conv_dtype):
            bytes_of(dtype)
        self.attention.token_bytes(dtype=self.kv_dtype)

    @property
    def alignment(self) -> int:
        """Tokens that a block is a multiple of, as far as the recurrent layers ask."""
        return 1 if self.checkpoint_alignment is None else self.checkpoint_alignment

    @property
    def state_bytes(self) -> int:
        """Bytes of one state of one recurrent layer."""
        return self.recurrent.state_bytes(
            self.ranks, self.spec, self.recurrent_dtype, self.conv_dtype
        )

    @property
    def token_bytes(self) -> int:
        """Bytes one token leaves in one attention layer."""
        return self.attention.token_bytes(self.ranks, self.kv_dtype)

    @property
    def model_state_bytes(self) -> int:
        """Bytes of one checkpoint: one state per recurrent layer of a stage."""
        return self.layers_here("recurrent_layers") * self.state_bytes

    @property
    def model_token_bytes(self) -> int:
        """Bytes one token leaves in all attention layers of a stage."""
        return self.layers_here("attention_layers") * self.token_bytes

    @property
    def exchange_rate(self) -> float:
        """Tokens of attention cache that cost as many bytes as one checkpoint."""
        return self.model_state_bytes / self.model_token_bytes

    def block_size(self) -> int:
        """Return the tokens of a block: as the platform of vllm 0.33.0 does.

        >>> from dataclasses import replace
        >>> from mambackpt.models import PRESETS
        >>> model = PRESETS["qwen3.5-4b"]
        >>> model.block_size(), replace(model, checkpoint_alignment=64).block_size()
        (528, 576)

        The unit is the attention kernel's block or the user's, whichever is larger, made a multiple
        of the checkpoint alignment.
        """
        unit = max(self.attention.kernel_block, self.user_block_size)
        return mamba_block_size(self.state_bytes, self.token_bytes, lcm(unit, self.alignment))

    def page_bytes(self) -> int:
        """Return the bytes of one block of one layer: an attention page, a padded state."""
        return self.block_size() * self.token_bytes

    def padding_percent(self) -> float:
        """Return what a state page wastes, in percent of the state."""
        return 100 * (self.page_bytes() - self.state_bytes) / self.state_bytes

    def request_bytes(self, *, checkpoint_blocks: int = 0) -> int:
        """Return the bytes one request holds in one recurrent layer.

        >>> from mambackpt.models import PRESETS
        >>> PRESETS["qwen3.5-4b"].request_bytes(checkpoint_blocks=1)
        6488064

        Pages of two resident states, of each draft token, and of the reserved checkpoints: what
        vllm 0.33.0 admits a request with in its "align" mode.
        """
        kept = checked_int("checkpoint_blocks", checkpoint_blocks, least=0, unit="blocks")
        return self.page_bytes() * (2 + self.spec + kept)

    @property
    def scheduler_block(self) -> int:
        """Tokens of a block as the scheduler counts it: context-parallel ranks widen it."""
        return self.block_size() * self.context_ranks

    def capacity(self, pool_bytes: int, max_len: int, *, checkpoint_blocks: int = 0) -> Capacity:
        """Return what a pool of one device holds of this model.

        >>> from mambackpt.models import PRESETS
        >>> PRESETS["qwen3.5-27b"].capacity(20 * 10**9, 262_144).logged_tokens
        299044

        Bytes and tokens; raises CheckpointValueError where the layer counts are not known.
        """
        return pool_capacity(
            attention_layers=self.layers_here("attention_layers"),
            recurrent_layers=self.layers_here("recurrent_layers"),
            page_bytes=self.page_bytes(),
            block=self.scheduler_block,
            pool_bytes=pool_bytes,
            max_len=max_len,
            drafts=self.spec,
            checkpoint_blocks=checkpoint_blocks,
        )

    def layers_here(self, kind: str) -> int:
        """Return the recurrent or attention layers of one stage, the fullest one.

        ``kind`` is "recurrent_layers" or "attention_layers". Raises CheckpointValueError where the
        count is not known.
        """
        count: int | None = getattr(self, kind)
        if not count:
            raise CheckpointValueError(
                f"{kind} of {self.name} is {count}; expected a known count. Try --layers R,A on "
                f"the command line, or dataclasses.replace(model, {kind}=...)."
            )
        if count < self.stages:
            raise CheckpointValueError(
                f"stages is {self.stages} and {kind} of {self.name} is {count}; expected at most "
                f"as many stages. Try {count}."
            )
        return -(-count // self.stages)
