"""Bytes of a recurrent state and of a token's attention, and the block size that follows.

K conv_width (taps), t tensor-parallel ranks, spec draft tokens. A hybrid engine enlarges attention
blocks until one attention page is at least one state page: that is where a block size such as 528
comes from. To add a model, add one line to `PRESETS`, or read its config.json with `from_config`.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from math import lcm, prod
from pathlib import Path
from typing import Any, ClassVar

from mambackpt.errors import CheckpointTypeError, CheckpointValueError
from mambackpt.geometry import checked_int

BYTES_OF = {
    **dict.fromkeys(("fp32", "float32"), 4),
    **dict.fromkeys(("bf16", "bfloat16", "fp16", "float16"), 2),
    **dict.fromkeys(("fp8", "fp8_e4m3", "fp8_e5m2", "float8_e4m3fn", "int8"), 1),
}


def bytes_of(dtype: str) -> int:
    """Return the bytes of one element of this dtype.

    >>> bytes_of("bf16")
    2

    Takes short and torch names, such as "fp32" or "torch.float32". Raises CheckpointValueError for
    an unknown one.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in BYTES_OF:
        raise CheckpointValueError(
            f"dtype is {dtype!r}; expected one of {', '.join(BYTES_OF)}. Try 'bf16'."
        )
    return BYTES_OF[name]


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

        More ranks than heads: each head lies on several ranks, if that comes out even.
        """
        heads = self.kv_heads
        spread = ranks > heads and ranks % heads == 0
        return (
            2
            * (1 if spread else _shard("kv_heads", heads, ranks))
            * self.head_dim
            * bytes_of(dtype)
        )


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
        """Return the bytes one token leaves in one layer of one rank."""
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


@dataclass(frozen=True, slots=True)
class HybridModel:
    """A model and how it is served: its two kinds of layers, dtypes, ranks, drafts and grids.

    >>> model = PRESETS["kimi-k3"]
    >>> model.state_bytes, model.block_size()
    (6512640, 11392)

    All sizes are of one rank, and of one layer unless they say ``model_``. Layer counts are None
    where they are not known. ``spec`` are draft tokens; ``checkpoint_alignment`` is what the
    recurrent layers ask for (None: nothing); ``user_block_size`` is what the user asked for.
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

    def __post_init__(self) -> None:
        checked_int("ranks", self.ranks, unit="tensor-parallel ranks")
        checked_int("spec", self.spec, least=0, unit="draft tokens")
        checked_int("user_block_size", self.user_block_size)
        checked_int("checkpoint_alignment", self.alignment)
        for dtype in (self.recurrent_dtype, self.conv_dtype, self.kv_dtype):
            bytes_of(dtype)

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
        """Bytes of one checkpoint of the whole model: one state per recurrent layer."""
        return self._layers("recurrent_layers") * self.state_bytes

    @property
    def model_token_bytes(self) -> int:
        """Bytes one token leaves in all attention layers."""
        return self._layers("attention_layers") * self.token_bytes

    @property
    def exchange_rate(self) -> float:
        """Tokens of attention cache that cost as many bytes as one checkpoint."""
        return self.model_state_bytes / self.model_token_bytes

    def block_size(self) -> int:
        """Return the tokens of a block: the platform rule of vllm 0.33.0.

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

        >>> PRESETS["qwen3.5-4b"].request_bytes(checkpoint_blocks=1)
        6488064

        Pages of two resident states, of each draft token, and of the reserved checkpoints: what
        vllm 0.33.0 admits a request with in its "align" mode.
        """
        kept = checked_int("checkpoint_blocks", checkpoint_blocks, least=0, unit="blocks")
        return self.page_bytes() * (2 + self.spec + kept)

    def _layers(self, kind: str) -> int:
        count: int | None = getattr(self, kind)
        if not count:
            raise CheckpointValueError(
                f"{kind} of {self.name} is {count}; expected a known count. "
                f"Try dataclasses.replace(model, {kind}=...)."
            )
        return count


_LOG = "block size published in a log or an engine's test"
_FORMULA = "shapes published, block size computed"
_COUNTED = "; layer counts inferred"  # from published bytes of whole models

_GDN_32, _GDN_48, _K3 = GDN(16, 32, 128), GDN(16, 48, 128), KDA(96, 128)
_NANO, _NANO_V2 = Mamba2(64, 64, 128, 8), Mamba2(128, 80, 128, 8)
_GQA, _MLA = GroupedAttention, LatentAttention()

_MODELS = [
    HybridModel("qwen3.5-0.8b", GDN(16, 16, 128), _GQA(2, 256), _LOG),
    _4b := HybridModel("qwen3.5-4b", _GDN_32, _GQA(4, 256), _LOG),
    replace(_4b, name="qwen3.5-9b"),
    HybridModel("qwen3.5-35b-a3b", _GDN_32, _GQA(2, 256), _LOG),
    _27b := HybridModel("qwen3.5-27b", _GDN_48, _GQA(4, 256), _LOG),
    replace(_27b, name="qwen3.5-27b-fp8", kv_dtype="fp8"),
    replace(_27b, name="qwen3.5-27b-fp8-mtp2", kv_dtype="fp8", spec=2),
    replace(_27b, name="qwen3.5-27b-fp8-mtp3", kv_dtype="fp8", spec=3),
    HybridModel("qwen3.5-397b-a17b-tp2", GDN(16, 64, 128), _GQA(2, 256), _LOG, ranks=2),
    _next := replace(
        HybridModel("qwen3-next", _GDN_32, _GQA(2, 256), _FORMULA + _COUNTED),
        recurrent_layers=36,
        attention_layers=12,
    ),
    replace(_next, name="qwen3-next-bf16", recurrent_dtype="bf16"),
    _nano := HybridModel("nemotron-3-nano", _NANO, _GQA(2, 128), _LOG),
    replace(_nano, name="nemotron-3-nano-fp16", recurrent_dtype="fp16"),
    replace(_nano, name="nemotron-3-nano-fp16-fp8", recurrent_dtype="fp16", kv_dtype="fp8"),
    HybridModel("nemotron-3-super", Mamba2(128, 64, 128, 8), _GQA(2, 128), _LOG, kv_dtype="fp8"),
    HybridModel("nemotron-nano-9b-v2", _NANO_V2, _GQA(8, 128), _FORMULA),
    HybridModel("nemotron-nano-9b-v2-bf16", _NANO_V2, _GQA(8, 128), _LOG, "bf16"),
    HybridModel("falcon-h1-0.5b", Mamba2(24, 64, 128, 1), _GQA(2, 64), _FORMULA, "bf16"),
    HybridModel("falcon-h1-7b", Mamba2(24, 128, 256, 1), _GQA(2, 128), _FORMULA, "bf16"),
    HybridModel("falcon-h1-34b", Mamba2(32, 128, 256, 2), _GQA(4, 128), _FORMULA, "bf16"),
    HybridModel("granite-4-h-small", Mamba2(128, 64, 128, 1), _GQA(8, 128), _FORMULA, "bf16"),
    HybridModel("granite-4-h-tiny", Mamba2(48, 64, 128, 1), _GQA(4, 128), _FORMULA, "bf16"),
    _linear := HybridModel("kimi-linear-48b", KDA(32, 128), _MLA, _FORMULA),
    replace(_linear, name="kimi-linear-48b-tp4", ranks=4),
    _kimi := replace(
        HybridModel("kimi-k3", _K3, _MLA, _LOG + _COUNTED, kv_dtype="fp8"),
        recurrent_layers=69,
        attention_layers=24,
    ),
    replace(_kimi, name="kimi-k3-tp8", ranks=8),
    replace(_kimi, name="kimi-k3-tp8-bf16", ranks=8, kv_dtype="bf16"),
    replace(_kimi, name="kimi-k3-tp16-bf16", ranks=16, kv_dtype="bf16"),
]
PRESETS: dict[str, HybridModel] = {model.name: model for model in _MODELS}


class _Config:
    """A config.json read field by field: what is missing is named, with what it stands for."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        inner = config.get("text_config") or {}
        if hasattr(inner, "to_dict"):
            inner = inner.to_dict()
        if not isinstance(inner, Mapping):
            raise CheckpointTypeError(
                f"text_config is a {type(inner).__name__}; expected a mapping. "
                "Try the config.json that lies beside the weights."
            )
        self.fields = {**config, **inner}
        self.kind = str(self.fields.get("model_type", "unknown"))

    def size(self, *names: str, default: int | None = None) -> int:
        """Read the first of these fields that is there, as a positive integer."""
        for name in names:
            if self.fields.get(name) is not None:
                return checked_int(f"{self.kind}: {name}", self.fields[name], unit="elements")
        if default is not None:
            return default
        raise CheckpointValueError(
            f"the config of a {self.kind!r} model has no {' or '.join(names)}; expected a positive "
            "whole number. Try the config.json that lies beside the weights."
        )

    def count_layers(self) -> tuple[int | None, int | None]:
        """Count recurrent and attention layers; None where the config does not tell."""
        get = self.fields.get
        kinds = get("layer_types") or get("layers_block_type") or get("hybrid_override_pattern")
        if kinds:  # a list of words, or Nemotron-H's string of letters
            if not set(kinds) <= _RECURRENT_WORDS | _ATTENTION_WORDS | _STATELESS_WORDS:
                return None, None
            counts = [
                sum(k in words for k in kinds) for words in (_RECURRENT_WORDS, _ATTENTION_WORDS)
            ]
            return counts[0], counts[1]
        if get("num_hidden_layers") is None:
            return None, None
        layers = self.size("num_hidden_layers")
        if self.kind == "falcon_h1":  # every layer has both, side by side
            return layers, layers
        nested = get("linear_attn_config") or {}
        indices = (
            get("attn_layer_indices") or get("full_attn_idxs") or nested.get("full_attn_layers")
        )
        if indices:
            attends = len(indices)
        elif get("full_attention_interval"):
            attends = layers // self.size("full_attention_interval")
        elif get("attn_layer_period"):
            first = int(get("attn_layer_offset") or 0)
            attends = len(range(first, layers, self.size("attn_layer_period")))
        else:
            return None, None
        return layers - attends, attends

    def attention(self) -> GroupedAttention:
        heads = self.size("num_attention_heads")
        names = ("head_dim", "attention_head_dim")
        given = any(self.fields.get(name) is not None for name in names)
        head_dim = self.size(*names) if given else self.size("hidden_size") // heads
        return GroupedAttention(self.size("num_key_value_heads", default=heads), head_dim)


_RECURRENT_WORDS = {"linear_attention", "mamba", "conv", "M"}
_ATTENTION_WORDS = {"full_attention", "attention", "*"}
_STATELESS_WORDS = {"moe", "mlp", "E", "-"}
_Layers = tuple[RecurrentLayer, GroupedAttention | LatentAttention]


def _gated_delta(c: _Config) -> _Layers:
    layer = GDN(
        c.size("linear_num_key_heads"),
        c.size("linear_num_value_heads"),
        c.size("linear_key_head_dim"),
        c.size("linear_value_head_dim"),
        c.size("linear_conv_kernel_dim"),
    )
    return layer, c.attention()


def _mamba2(c: _Config) -> _Layers:
    heads = c.size("mamba_num_heads", "mamba_n_heads")
    if c.fields.get("mamba_d_head") == "auto":
        head_dim = c.size("mamba_expand") * c.size("hidden_size") // heads
    else:
        head_dim = c.size("mamba_head_dim", "mamba_d_head")
    layer = Mamba2(
        heads,
        head_dim,
        c.size("ssm_state_size", "mamba_d_state"),
        c.size("n_groups", "mamba_n_groups"),
        c.size("conv_kernel", "mamba_d_conv"),
    )
    return layer, c.attention()


def _mamba1(c: _Config) -> _Layers:
    inner = c.size("mamba_expand") * c.size("hidden_size")
    return Mamba1(inner, c.size("mamba_d_state"), c.size("mamba_d_conv")), c.attention()


def _kimi_delta(c: _Config) -> _Layers:
    latent = LatentAttention(c.size("kv_lora_rank"), c.size("qk_rope_head_dim"))
    nested = c.fields.get("linear_attn_config")
    if nested is None:
        names = ("linear_num_heads", "linear_head_dim", "linear_conv_kernel_dim")
    else:  # read alone: the model's own head_dim is another number
        c = _Config({**nested, "model_type": f"{c.kind} (linear_attn_config)"})
        names = ("num_heads", "head_dim", "short_conv_kernel_size")
    return KDA(*(c.size(name) for name in names)), latent


def _short_conv(c: _Config) -> _Layers:
    return ShortConv(c.size("conv_dim", "hidden_size"), c.size("conv_L_cache")), c.attention()


_FAMILIES: dict[str, Callable[[_Config], _Layers]] = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid"), _gated_delta),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "granitemoehybrid", "bamba"), _mamba2),
    "jamba": _mamba1,
    "kimi_linear": _kimi_delta,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
}


def from_config(config: object, **serving: Any) -> HybridModel:
    """Return the model that a config.json describes: a mapping, a path, or a config object.

    >>> model = from_config({"model_type": "qwen3_next", "num_attention_heads": 16,
    ...     "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    ...     "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    ...     "linear_conv_kernel_dim": 4})
    >>> model.block_size()
    544

    ``serving`` gives what the config does not know (``ranks``, ``spec``, ``kv_dtype``, ...). The
    recurrent dtype is the config's own, or the engine's default for the family; window and
    attention cache are 16 bits wide, as engines cast wider weights. Raises CheckpointValueError for
    an unknown family or a missing field, CheckpointTypeError otherwise.
    """
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            config = json.loads(path.read_text())
        except (OSError, ValueError) as error:  # no file, no text, no JSON
            raise CheckpointValueError(
                f"{path} cannot be read as a config ({error}); expected a model's config.json. "
                f"Try a path, or one of the presets: {', '.join(PRESETS)}."
            ) from error
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise CheckpointTypeError(
            f"the config is a {type(config).__name__}; expected a mapping, a path or an object "
            "with to_dict(). Try json.load(open('config.json'))."
        )
    read = _Config(config)
    if read.kind not in _FAMILIES:
        raise CheckpointValueError(
            f"model_type is {read.kind!r}; expected one of {', '.join(_FAMILIES)}. "
            "Try HybridModel(name, recurrent layer, attention) for another family."
        )
    recurrent, attention = _FAMILIES[read.kind](read)
    # Engine defaults: Nemotron-H and KDA keep an fp32 state, the other families the model's dtype.
    default = "fp32" if read.kind in ("nemotron_h", "kimi_linear") else "bf16"
    dtype = read.fields.get("mamba_ssm_cache_dtype") or read.fields.get("mamba_ssm_dtype")
    recurs, attends = read.count_layers()
    model = HybridModel(
        str(read.fields.get("_name_or_path") or read.kind),
        recurrent,
        attention,
        "config.json",
        str(dtype or default),
        recurrent_layers=recurs,
        attention_layers=attends,
    )
    try:
        return replace(model, **serving)
    except TypeError as error:
        raise CheckpointTypeError(
            f"{error}; expected fields of HybridModel. Try ranks, spec, kv_dtype, recurrent_dtype."
        ) from error


def main(argv: Sequence[str]) -> int:
    """Print the sizes of one model, or of every preset; ``python -m mambackpt size``.

    >>> main(["qwen3.5-4b", "--alignment", "64", "--json"])  # doctest: +ELLIPSIS
    {"name": "qwen3.5-4b", ... "block_size": 576, ...}
    0

    Returns 0. A refused input raises a CheckpointError.
    """
    parser = argparse.ArgumentParser(prog="mambackpt size", description="Sizes of a hybrid model.")
    say = parser.add_argument
    say("model", nargs="?", help="a preset, or the path of a config.json [list the presets]")
    say("--tp", dest="ranks", type=int, help="tensor-parallel ranks")
    say("--spec", type=int, help="draft tokens")
    say("--kv-dtype", help="dtype of the attention cache, such as fp8")
    say("--recurrent-dtype", help="dtype of the recurrent state, such as bf16")
    say("--conv-dtype", help="dtype of the convolution window")
    say("--alignment", dest="checkpoint_alignment", type=int, help="the layers' grid, in tokens")
    say("--block", dest="user_block_size", type=int, help="the block you ask for, in tokens")
    say("--json", action="store_true", help="print JSON")
    given = vars(parser.parse_args(argv))
    name, as_json = given.pop("model"), given.pop("json")
    options = {option: value for option, value in given.items() if value is not None}
    chosen = list(PRESETS.values()) if name is None else [PRESETS.get(name) or from_config(name)]
    if options:
        source = (
            f"computed from {'its preset' if name in PRESETS or name is None else 'its config'}"
        )
        chosen = [replace(model, **options, source=source) for model in chosen]
    if as_json:
        rows = [
            asdict(model)
            | {"layer": type(model.recurrent).__name__}
            | {size: value for size, (value, _) in _sizes(model).items()}
            for model in chosen
        ]
        print(json.dumps(rows if name is None else rows[0]))
    elif name is None:
        print(
            f"{'state bytes':>12} {'token bytes':>11} {'block':>6} {'padding':>8}  preset: source"
        )
        for model in chosen:
            print(
                f"{model.state_bytes:>12,} {model.token_bytes:>11,} {model.block_size():>6,} "
                f"{model.padding_percent():>7.2f}%  {model.name}: {model.source}"
            )
    else:
        print(f"{chosen[0].name}: {chosen[0].source}; on one of {chosen[0].ranks} ranks")
        for value, words in _sizes(chosen[0]).values():
            print(f"{'unknown' if value is None else f'{value:,}':>16}  {words}")
    return 0


def _sizes(model: HybridModel) -> dict[str, tuple[float | None, str]]:
    """Return each size with its words; None for what needs layer counts that are not known."""
    window = model.recurrent.conv_bytes(model.ranks, model.spec, model.conv_dtype)
    counted = bool(model.recurrent_layers and model.attention_layers)
    per_layer = round(model.state_bytes / model.token_bytes)
    return {
        "state_bytes": (model.state_bytes, "bytes of one state of one recurrent layer"),
        "conv_bytes": (window, "  of them the convolution window"),
        "recurrent_bytes": (model.state_bytes - window, "  of them the recurrent state"),
        "token_bytes": (model.token_bytes, "bytes one token leaves in one attention layer"),
        "state_in_tokens": (
            per_layer,
            "tokens of one attention layer that cost as much as a state",
        ),
        "block_size": (model.block_size(), "tokens of a block"),
        "page_bytes": (model.page_bytes(), "bytes of a page (one block of one layer)"),
        "padding_percent": (
            round(model.padding_percent(), 2),
            "percent of a state that its page pads",
        ),
        "request_bytes": (model.request_bytes(), "bytes a request holds in one recurrent layer"),
        "model_state_bytes": (
            model.model_state_bytes if counted else None,
            "bytes of a checkpoint of all recurrent layers",
        ),
        "model_token_bytes": (
            model.model_token_bytes if counted else None,
            "bytes one token leaves in all attention layers",
        ),
        "exchange_rate": (
            round(model.exchange_rate) if counted else None,
            "tokens of attention cache that cost as much as a checkpoint",
        ),
    }
