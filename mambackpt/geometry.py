"""The sizes that decide where a checkpoint may land, validated once.

H hash unit, M Mamba block, A checkpoint alignment, U cache-hit alignment: all in tokens.
"""

from dataclasses import dataclass

from mambackpt.errors import CheckpointValueError, checked_int


@dataclass(frozen=True, slots=True)
class CacheGeometry:
    """The block sizes and grids of one recurrent cache group.

    >>> g = CacheGeometry(hash_block_size=128, mamba_block_size=1536, checkpoint_alignment=16,
    ...                   cache_hit_alignment_tokens=128)
    >>> g.H, g.M, g.A, g.U
    (128, 1536, 16, 128)

    Sizes are in tokens. ``checkpoint_alignment=None`` means that the prefill kernel cannot export.
    M and U must be multiples of H; U may be larger than M. A checkpoint is dropped one unit earlier
    with ``drop_eagle_block``; a block's hash covers ``num_hash_lookahead_tokens`` more tokens.
    Raises CheckpointTypeError for a non-integer, CheckpointValueError for an impossible size.
    """

    hash_block_size: int
    mamba_block_size: int
    checkpoint_alignment: int | None
    cache_hit_alignment_tokens: int
    drop_eagle_block: bool = False
    num_hash_lookahead_tokens: int = 0

    def __post_init__(self) -> None:
        checked = {
            "hash_block_size": checked_int("hash_block_size", self.hash_block_size),
            "mamba_block_size": checked_int("mamba_block_size", self.mamba_block_size),
            "cache_hit_alignment_tokens": checked_int(
                "cache_hit_alignment_tokens", self.cache_hit_alignment_tokens
            ),
            "num_hash_lookahead_tokens": checked_int(
                "num_hash_lookahead_tokens", self.num_hash_lookahead_tokens, least=0
            ),
            "checkpoint_alignment": (
                None
                if self.checkpoint_alignment is None
                else checked_int("checkpoint_alignment", self.checkpoint_alignment)
            ),
            "drop_eagle_block": bool(self.drop_eagle_block),
        }
        for name, value in checked.items():
            object.__setattr__(self, name, value)
        for name in ("mamba_block_size", "cache_hit_alignment_tokens"):
            size = getattr(self, name)
            if size % self.hash_block_size:
                multiple = -(-size // self.hash_block_size) * self.hash_block_size
                raise CheckpointValueError(
                    f"{name} is {size} and hash_block_size is {self.hash_block_size}; expected "
                    f"{name} to be a multiple of hash_block_size. Try {multiple}."
                )

    @property
    def H(self) -> int:
        """Tokens under one key: the hash unit."""
        return self.hash_block_size

    @property
    def M(self) -> int:
        """Tokens per recurrent-state block."""
        return self.mamba_block_size

    @property
    def A(self) -> int | None:
        """The grid, from the query's start, on which the kernel can emit a state."""
        return self.checkpoint_alignment

    @property
    def U(self) -> int:
        """The grid on which a cache hit may land."""
        return self.cache_hit_alignment_tokens
