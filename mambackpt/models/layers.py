"""Bytes of one layer: a recurrent state, a token's attention, and the block that holds both.

K conv_width (taps), t tensor-parallel ranks, spec draft tokens. A hybrid engine enlarges attention
blocks until one attention page is at least one state page: that is where a block size such as 528
comes from.
"""

from dataclasses import dataclass, fields
from math import prod
from typing import ClassVar

from mambackpt.errors import CheckpointValueError, checked_choice, checked_int

BYTES_OF = {
    **dict.fromkeys(("fp32", "float32"), 4),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "int8"), 1),
}
# One byte an element, with an fp32 scale for each of K and V, per token and head.
SCALED = ("int8_per_token_head", "fp8_per_token_head")
KV_DTYPES = (*BYTES_OF, *SCALED)
_SCALE_BYTES = 4


def bytes_of(dtype: str) -> int:
    """Return the bytes of one element of this dtype.

    >>> bytes_of("bf16")
    2

    Takes short and torch names, such as "fp32" or "torch.float32". Raises CheckpointValueError for
    an unknown one.
    """
    return BYTES_OF[checked_choice("dtype", _short(dtype), BYTES_OF)]


def _short(dtype: str) -> str:
    return str(dtype).removeprefix("torch.")


def _shard(name: str, size: int, ranks: int) -> int:
    if size % checked_int("ranks", ranks, unit="tensor-parallel ranks"):
        raise CheckpointValueError(
            f"{name} is {size}, which {ranks} tensor-parallel ranks do not divide; expected a "
            f"multiple of {ranks}. Try fewer ranks."
        )
    return size // ranks


@dataclass(frozen=True, slots=True)
class _Layer:
    def __post_init__(self) -> None:
        for field in fields(self):
            size = getattr(self, field.name)
            if size is not None:
                checked_int(f"{field.name} of {type(self).__name__}", size, unit="elements")


@dataclass(frozen=True, slots=True)
class RecurrentLayer(_Layer):
    """One recurrent layer: what `Mamba1`, `Mamba2`, `GDN`, `KDA` and the others share.

    >>> GDN(key_heads=16, value_heads=32, head_dim=128).state_bytes()
    2146304

    Shapes are of one rank and one state. ``spec`` draft tokens lengthen the convolution window.
    Sizes that are no positive integers, and ranks that do not divide them, are refused.
    """

    grows_with_drafts: ClassVar[bool] = True

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of the convolution on one rank."""
        raise NotImplementedError

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return the shape of the recurrent state on one rank; () where there is none."""
        raise NotImplementedError

    def conv_shape(
        self, ranks: int = 1, spec: int = 0, *, dim_first: bool = False
    ) -> tuple[int, int]:
        """Return the convolution window's shape, (tokens, channels) unless ``dim_first``."""
        taps: int = getattr(self, "conv_width")  # noqa: B009 - declared by each layer
        drafts = checked_int("spec", spec, least=0, unit="draft tokens")
        length = taps - 1 + (drafts if self.grows_with_drafts else 0)
        channels = self.conv_channels(ranks)
        return (channels, length) if dim_first else (length, channels)

    def conv_bytes(self, ranks: int = 1, spec: int = 0, dtype: str = "bf16") -> int:
        """Return the bytes of one convolution window on one rank."""
        return prod(self.conv_shape(ranks, spec)) * bytes_of(dtype)

    def recurrent_bytes(self, ranks: int = 1, dtype: str = "fp32") -> int:
        """Return the bytes of one recurrent state on one rank."""
        shape = self.recurrent_shape(ranks)
        return prod(shape) * bytes_of(dtype) if shape else 0

    def state_bytes(
        self, ranks: int = 1, spec: int = 0, recurrent_dtype: str = "fp32", conv_dtype: str = "bf16"
    ) -> int:
        """Return the bytes of one state: window and recurrent state, on one rank."""
        window = self.conv_bytes(ranks, spec, conv_dtype)
        return window + self.recurrent_bytes(ranks, recurrent_dtype)


@dataclass(frozen=True, slots=True)
class Mamba1(RecurrentLayer):
    """A Mamba-1 layer of ``inner`` channels, each with ``state`` numbers.

    >>> Mamba1(inner=8192, state=16).recurrent_shape()
    (8192, 16)
    """

    inner: int
    state: int
    conv_width: int = 4
    grows_with_drafts: ClassVar[bool] = False

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of the convolution on one rank."""
        return _shard("inner", self.inner, ranks)

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (channels, state) of one rank."""
        return (_shard("inner", self.inner, ranks), self.state)


@dataclass(frozen=True, slots=True)
class Mamba2(RecurrentLayer):
    """A Mamba-2 layer: heads of ``head_dim`` x ``state``, B and C shared by ``groups``.

    >>> Mamba2(heads=64, head_dim=64, state=128, groups=8).state_bytes()
    2134016

    Where the ranks do not divide the groups, every rank gets a group of its own.
    """

    heads: int
    head_dim: int
    state: int
    groups: int
    conv_width: int = 4

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of x, B and C on one rank."""
        groups = self.groups if self.groups % ranks == 0 else ranks
        return _shard("heads", self.heads, ranks) * self.head_dim + 2 * groups * self.state // ranks

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (heads, head_dim, state) of one rank."""
        return (_shard("heads", self.heads, ranks), self.head_dim, self.state)


@dataclass(frozen=True, slots=True)
class GDN(RecurrentLayer):
    """A gated delta-net layer; ``value_dim`` is ``head_dim`` unless given.

    >>> GDN(key_heads=16, value_heads=32, head_dim=128).conv_channels()
    8192
    """

    key_heads: int
    value_heads: int
    head_dim: int
    value_dim: int | None = None
    conv_width: int = 4

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of q, k and v on one rank."""
        values = self.value_heads * (self.value_dim or self.head_dim)
        return _shard("channels", 2 * self.key_heads * self.head_dim + values, ranks)

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (value heads, value dim, key dim) of one rank."""
        heads = _shard("value_heads", self.value_heads, ranks)
        return (heads, self.value_dim or self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class KDA(RecurrentLayer):
    """A Kimi delta-attention layer: q, k and v of ``heads`` x ``head_dim`` each.

    >>> KDA(heads=96, head_dim=128).state_bytes()
    6512640
    """

    heads: int
    head_dim: int
    conv_width: int = 4

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of q, k and v on one rank."""
        return 3 * _shard("heads", self.heads, ranks) * self.head_dim

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (heads, head_dim, head_dim) of one rank."""
        return (_shard("heads", self.heads, ranks), self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class ShortConv(RecurrentLayer):
    """A short convolution, all of whose state is its window.

    >>> ShortConv(dim=2048, conv_width=3).state_bytes()
    8192
    """

    dim: int
    conv_width: int = 4

    def conv_channels(self, ranks: int = 1) -> int:
        """Return the channels of the convolution on one rank."""
        return _shard("dim", self.dim, ranks)

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (): there is no recurrent state."""
        return ()


@dataclass(frozen=True, slots=True)
class LinearAttention(RecurrentLayer):
    """Linear attention without a convolution: one head_dim x head_dim state per head.

    >>> LinearAttention(heads=64, head_dim=128).state_bytes()
    4194304
    """

    heads: int
    head_dim: int
    conv_width: ClassVar[int] = 1
    grows_with_drafts: ClassVar[bool] = False

    def conv_channels(self, ranks: int = 1) -> int:
        """Return 0: there is no convolution."""
        return 0

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (heads, head_dim, head_dim) of one rank."""
        return (_shard("heads", self.heads, ranks), self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class GroupedAttention(_Layer):
    """Attention that caches a key and a value per token and key/value head.

    >>> GroupedAttention(kv_heads=4, head_dim=256).token_bytes(dtype="bf16")
    4096
    """

    kv_heads: int
    head_dim: int
    kernel_block: ClassVar[int] = 16

    def token_bytes(self, ranks: int = 1, dtype: str = "bf16") -> int:
        """Return the bytes one token leaves in one layer of one rank.

        >>> GroupedAttention(kv_heads=4, head_dim=256).token_bytes(dtype="int8_per_token_head")
        2080

        More ranks than heads: each head lies on several ranks, if that comes out even. Dtypes "per
        token and head" bring an fp32 scale for each of K and V.
        """
        heads = self.kv_heads
        spread = ranks > heads and ranks % heads == 0
        here = 1 if spread else _shard("kv_heads", heads, ranks)
        if checked_choice("kv_dtype", _short(dtype), KV_DTYPES) in SCALED:
            return 2 * here * (self.head_dim + _SCALE_BYTES)
        return 2 * here * self.head_dim * bytes_of(dtype)


@dataclass(frozen=True, slots=True)
class LatentAttention(_Layer):
    """Multi-head latent attention: one latent per token, whole on every rank.

    >>> LatentAttention(rank=512, rope=64).token_bytes(dtype="fp8")
    576
    """

    rank: int = 512
    rope: int = 64
    kernel_block: ClassVar[int] = 128

    def token_bytes(self, ranks: int = 1, dtype: str = "bf16") -> int:
        """Return the bytes one token leaves in one layer of one rank.

        Raises CheckpointValueError for a dtype with a scale per head: a latent has no heads.
        """
        if _short(dtype) in SCALED:
            raise CheckpointValueError(
                f"kv_dtype is {dtype!r}, a scale per head, and latent attention caches no heads; "
                "expected a dtype without. Try 'fp8'."
            )
        return (self.rank + self.rope) * bytes_of(dtype)


def mamba_block_size(state_bytes: int, token_bytes: int, alignment: int = 16) -> int:
    """Return the least multiple of ``alignment`` tokens whose attention page holds one state.

    >>> mamba_block_size(2_146_304, 4_096)
    528

    Bytes are of one layer; the result is in tokens. That page is why a prompt under 528 tokens
    never hits. Raises CheckpointTypeError or CheckpointValueError for sizes that are not positive.
    """
    checked_int("state_bytes", state_bytes, unit="bytes")
    page = checked_int("alignment", alignment) * checked_int(
        "token_bytes", token_bytes, unit="bytes"
    )
    return alignment * -(-state_bytes // page)
