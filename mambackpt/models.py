"""Bytes of a recurrent state and of a token's attention, and the block size that follows.

K conv_width (taps), t tensor-parallel ranks, spec draft tokens. A hybrid engine enlarges attention
blocks until one attention page is at least one state page: that is where a block size such as 528
comes from. To add a model, add one line to `PRESETS`, or read its config.json with `from_config`.
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
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
    if size % ranks:
        raise CheckpointValueError(
            f"{name} is {size}, which {ranks} tensor-parallel ranks do not divide; expected a "
            f"multiple of {ranks}. Try fewer ranks."
        )
    return size // ranks


@dataclass(frozen=True, slots=True)
class RecurrentLayer:
    """One recurrent layer: what `Mamba1`, `Mamba2`, `GDN`, `KDA` and the others share.

    >>> GDN(key_heads=16, value_heads=32, head_dim=128).state_bytes()
    2146304

    Shapes are of one rank and one state. ``spec`` draft tokens lengthen the convolution window.
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
        length = taps - 1 + (spec if self.grows_with_drafts else 0)
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
    conv_width: int = 1

    def conv_channels(self, ranks: int = 1) -> int:
        """Return 0: there is no convolution."""
        return 0

    def recurrent_shape(self, ranks: int = 1) -> tuple[int, ...]:
        """Return (heads, head_dim, head_dim) of one rank."""
        return (_shard("heads", self.heads, ranks), self.head_dim, self.head_dim)


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Attention that caches a key and a value per token and key/value head.

    >>> GroupedAttention(kv_heads=4, head_dim=256).token_bytes(dtype="bf16")
    4096
    """

    kv_heads: int
    head_dim: int
    kernel_block: ClassVar[int] = 16

    def token_bytes(self, ranks: int = 1, dtype: str = "bf16") -> int:
        """Return the bytes one token leaves in one layer; every rank has a head at least."""
        return 2 * max(1, self.kv_heads // ranks) * self.head_dim * bytes_of(dtype)


@dataclass(frozen=True, slots=True)
class LatentAttention:
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
    """A model and how it is served: its two kinds of layers, dtypes, ranks and draft tokens.

    >>> model = PRESETS["kimi-k3"]
    >>> model.state_bytes, model.block_size()
    (6512640, 11392)

    Layer counts are None where they are not published. All sizes are of one rank.
    """

    name: str
    recurrent: RecurrentLayer
    attention: GroupedAttention | LatentAttention
    recurrent_dtype: str = "fp32"
    conv_dtype: str = "bf16"
    kv_dtype: str = "bf16"
    ranks: int = 1
    spec: int = 0
    recurrent_layers: int | None = None
    attention_layers: int | None = None
    source: str = ""

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

    def block_size(
        self, *, checkpoint_alignment: int | None = None, kernel_block: int | None = None
    ) -> int:
        """Return the tokens of a block, given the layers' checkpoint alignment, if there is one.

        >>> PRESETS["qwen3.5-4b"].block_size(), PRESETS["qwen3.5-4b"].block_size(
        ...     checkpoint_alignment=64)
        (528, 576)

        ``kernel_block`` raises the tokens that the attention kernel works on at once. Platform rule
        of vllm 0.33.0. Raises CheckpointTypeError or CheckpointValueError for a bad alignment.
        """
        unit = max(self.attention.kernel_block, kernel_block or 0)
        if checkpoint_alignment is not None:
            unit = lcm(unit, checked_int("checkpoint_alignment", checkpoint_alignment))
        return mamba_block_size(self.state_bytes, self.token_bytes, unit)

    def page_bytes(self, *, checkpoint_alignment: int | None = None) -> int:
        """Return the bytes of one block of one layer: an attention page, a padded state."""
        return self.block_size(checkpoint_alignment=checkpoint_alignment) * self.token_bytes

    def padding_percent(self, *, checkpoint_alignment: int | None = None) -> float:
        """Return what a state page wastes, in percent of the state."""
        page = self.page_bytes(checkpoint_alignment=checkpoint_alignment)
        return 100 * (page - self.state_bytes) / self.state_bytes

    def request_bytes(self, *, checkpoint_blocks: int = 0) -> int:
        """Return the bytes one request holds in one recurrent layer, drafts included.

        Two resident states, one for each draft token, and the reserved checkpoints.
        """
        checked_int("checkpoint_blocks", checkpoint_blocks, least=0, unit="blocks")
        return self.page_bytes() * (2 + self.spec + checkpoint_blocks)

    def _layers(self, kind: str) -> int:
        count: int | None = getattr(self, kind)
        if not count:
            raise CheckpointValueError(
                f"{kind} of {self.name} is {count}; expected a published count. "
                f"Try dataclasses.replace(model, {kind}=...)."
            )
        return count


_LOG = "block size published in an engine's start-up log or its own tests"
_FORMULA = "shapes published, block size computed"
_INFERRED = "layer counts inferred from published bytes"

_QWEN_4B, _QWEN_27B = GDN(16, 32, 128), GDN(16, 48, 128)
_NANO, _NANO_V2 = Mamba2(64, 64, 128, 8), Mamba2(128, 80, 128, 8)
_K3 = KDA(96, 128)

_MODELS = [
    HybridModel("qwen3.5-0.8b", GDN(16, 16, 128), GroupedAttention(2, 256), source=_LOG),
    HybridModel("qwen3.5-4b", _QWEN_4B, GroupedAttention(4, 256), source=_LOG),
    HybridModel("qwen3.5-35b-a3b", _QWEN_4B, GroupedAttention(2, 256), source=_LOG),
    _27b := HybridModel("qwen3.5-27b", _QWEN_27B, GroupedAttention(4, 256), source=_LOG),
    replace(_27b, name="qwen3.5-27b-fp8", kv_dtype="fp8"),
    replace(_27b, name="qwen3.5-27b-fp8-mtp2", kv_dtype="fp8", spec=2),
    replace(_27b, name="qwen3.5-27b-fp8-mtp3", kv_dtype="fp8", spec=3),
    HybridModel(
        *("qwen3.5-397b-a17b-tp2", GDN(16, 64, 128), GroupedAttention(2, 256)),
        ranks=2,
        source=_LOG,
    ),
    _next := HybridModel(
        *("qwen3-next", _QWEN_4B, GroupedAttention(2, 256)),
        recurrent_layers=36,
        attention_layers=12,
        source=f"{_FORMULA}; {_INFERRED}; fp32 state",
    ),
    replace(_next, name="qwen3-next-bf16", recurrent_dtype="bf16"),
    _nano := HybridModel("nemotron-3-nano", _NANO, GroupedAttention(2, 128), source=_LOG),
    replace(_nano, name="nemotron-3-nano-fp16", recurrent_dtype="fp16"),
    replace(_nano, name="nemotron-3-nano-fp16-fp8", recurrent_dtype="fp16", kv_dtype="fp8"),
    HybridModel(
        *("nemotron-3-super", Mamba2(128, 64, 128, 8), GroupedAttention(2, 128)),
        kv_dtype="fp8",
        source=_LOG,
    ),
    _v2 := HybridModel("nemotron-nano-9b-v2", _NANO_V2, GroupedAttention(8, 128), source=_FORMULA),
    replace(_v2, name="nemotron-nano-9b-v2-bf16", recurrent_dtype="bf16", source=_LOG),
    HybridModel(
        *("falcon-h1-0.5b", Mamba2(24, 64, 128, 1), GroupedAttention(2, 64), "bf16"),
        source=_FORMULA,
    ),
    HybridModel(
        *("falcon-h1-7b", Mamba2(24, 128, 256, 1), GroupedAttention(2, 128), "bf16"),
        source=_FORMULA,
    ),
    HybridModel(
        *("falcon-h1-34b", Mamba2(32, 128, 256, 2), GroupedAttention(4, 128), "bf16"),
        source=_FORMULA,
    ),
    HybridModel(
        *("granite-4-h-small", Mamba2(128, 64, 128, 1), GroupedAttention(8, 128), "bf16"),
        source=_FORMULA,
    ),
    HybridModel(
        *("granite-4-h-tiny", Mamba2(48, 64, 128, 1), GroupedAttention(4, 128), "bf16"),
        source=_FORMULA,
    ),
    _linear := HybridModel("kimi-linear-48b", KDA(32, 128), LatentAttention(), source=_FORMULA),
    replace(_linear, name="kimi-linear-48b-tp4", ranks=4),
    _kimi := HybridModel(
        *("kimi-k3", _K3, LatentAttention()),
        kv_dtype="fp8",
        recurrent_layers=69,
        attention_layers=24,
        source=f"{_LOG}; {_INFERRED}",
    ),
    replace(_kimi, name="kimi-k3-tp8", ranks=8),
    replace(_kimi, name="kimi-k3-tp8-bf16", ranks=8, kv_dtype="bf16"),
    replace(_kimi, name="kimi-k3-tp16-bf16", ranks=16, kv_dtype="bf16"),
]
PRESETS: dict[str, HybridModel] = {model.name: model for model in _MODELS}


class _Config:
    """A config.json read field by field: what is missing is named, with what it stands for."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        inner = fields.get("text_config")
        if inner is not None and not isinstance(inner, Mapping):
            inner = inner.to_dict()
        self.fields = {**fields, **(inner or {})}
        self.kind = str(self.fields.get("model_type", fields.get("model_type", "unknown")))

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
        """Count recurrent and attention layers, where the config lists its layers."""
        layers = self.fields.get("layer_types") or self.fields.get("layers_block_type")
        if isinstance(self.fields.get("hybrid_override_pattern"), str):  # Nemotron-H's letters
            layers = list(self.fields["hybrid_override_pattern"])
        if not layers:
            return None, None
        attends = sum(layer in ("full_attention", "attention", "*") for layer in layers)
        recurs = sum(layer in ("linear_attention", "mamba", "conv", "M") for layer in layers)
        return recurs or None, attends or None

    def attention(self) -> GroupedAttention:
        heads = self.size("num_attention_heads")
        given = self.fields.get("head_dim") or self.fields.get("attention_head_dim")
        head_dim = given or self.size("hidden_size") // heads
        return GroupedAttention(self.size("num_key_value_heads", default=heads), head_dim)


_Layers = tuple[RecurrentLayer, GroupedAttention | LatentAttention]


def _gated_delta(c: _Config) -> _Layers:
    layer = GDN(
        c.size("linear_num_key_heads"),
        c.size("linear_num_value_heads"),
        c.size("linear_key_head_dim"),
        c.size("linear_value_head_dim"),
        c.size("linear_conv_kernel_dim", default=4),
    )
    return layer, c.attention()


def _mamba2(c: _Config) -> _Layers:
    layer = Mamba2(
        c.size("mamba_num_heads", "mamba_n_heads"),
        c.size("mamba_head_dim", "mamba_d_head"),
        c.size("ssm_state_size", "mamba_d_state"),
        c.size("n_groups", "mamba_n_groups"),
        c.size("conv_kernel", "mamba_d_conv", default=4),
    )
    return layer, c.attention()


def _mamba1(c: _Config) -> _Layers:
    inner = c.size("mamba_expand", default=2) * c.size("hidden_size")
    return Mamba1(inner, c.size("mamba_d_state"), c.size("mamba_d_conv")), c.attention()


def _kimi_delta(c: _Config) -> _Layers:
    c = _Config({**c.fields, **(c.fields.get("linear_attn_config") or {})})
    head_dim = c.fields.get("linear_head_dim") or c.size("head_dim")
    layer = KDA(
        c.size("linear_num_heads", "num_heads"),
        head_dim,
        c.size("linear_conv_kernel_dim", "short_conv_kernel_size", default=4),
    )
    return layer, LatentAttention(
        c.size("kv_lora_rank", default=512), c.size("qk_rope_head_dim", default=64)
    )


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
    ...     "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128})
    >>> model.block_size()
    544

    ``serving`` gives what the config does not know (``ranks``, ``spec``, ``kv_dtype``, ...). The
    recurrent dtype is the config's own, or the engine's default for the family. Raises
    CheckpointValueError for an unknown family or a missing field, CheckpointTypeError otherwise.
    """
    if isinstance(config, str | Path):
        path = Path(config)
        try:
            config = json.loads(path.read_text())
        except (OSError, json.JSONDecodeError) as error:
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
        str(dtype or default),
        recurrent_layers=recurs,
        attention_layers=attends,
        source="config.json",
    )
    try:
        return replace(model, **serving)
    except TypeError as error:
        raise CheckpointTypeError(
            f"{error}; expected fields of HybridModel. Try ranks, spec, kv_dtype, recurrent_dtype."
        ) from error


def main(argv: Sequence[str]) -> int:
    """Print the sizes of one model; the command ``python -m mambackpt size``."""
    parser = argparse.ArgumentParser(prog="mambackpt size", description="Sizes of a hybrid model.")
    parser.add_argument("model", help="a preset's name, or the path of a config.json")
    parser.add_argument("--tp", type=int, help="tensor-parallel ranks")
    parser.add_argument("--spec", type=int, help="draft tokens")
    parser.add_argument("--kv-dtype", help="dtype of the attention cache, such as fp8")
    parser.add_argument("--recurrent-dtype", help="dtype of the recurrent state, such as bf16")
    parser.add_argument("--alignment", type=int, help="checkpoint alignment of the layers, tokens")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args(argv)
    model = PRESETS[args.model] if args.model in PRESETS else from_config(args.model)
    options = {
        "ranks": args.tp,
        "spec": args.spec,
        "kv_dtype": args.kv_dtype,
        "recurrent_dtype": args.recurrent_dtype,
    }
    model = replace(model, **{name: value for name, value in options.items() if value is not None})
    checked_int("tp", model.ranks, unit="ranks")
    checked_int("spec", model.spec, least=0)
    counted = bool(model.recurrent_layers and model.attention_layers)
    sizes = {
        "state_bytes": model.state_bytes,
        "conv_bytes": model.recurrent.conv_bytes(model.ranks, model.spec, model.conv_dtype),
        "recurrent_bytes": model.recurrent.recurrent_bytes(model.ranks, model.recurrent_dtype),
        "attention_bytes_per_token": model.token_bytes,
        "block_size": model.block_size(checkpoint_alignment=args.alignment),
        "page_bytes": model.page_bytes(checkpoint_alignment=args.alignment),
        "padding_percent": round(model.padding_percent(checkpoint_alignment=args.alignment), 2),
        "checkpoint_bytes": model.model_state_bytes if counted else None,
        "checkpoint_in_tokens": round(model.exchange_rate) if counted else None,
    }
    if args.json:
        print(json.dumps({"model": asdict(model), **sizes}))
        return 0
    said = {
        "state_bytes": "bytes of one state of one recurrent layer",
        "conv_bytes": "  of them the convolution window",
        "recurrent_bytes": "  of them the recurrent state",
        "attention_bytes_per_token": "bytes one token leaves in one attention layer",
        "block_size": "tokens of a block",
        "page_bytes": "bytes of a page (one block of one layer)",
        "padding_percent": "percent of a state that its page pads",
        "checkpoint_bytes": "bytes of one checkpoint of the whole model",
        "checkpoint_in_tokens": "tokens of attention cache that cost as much",
    }
    print(f"{model.name}: {model.source}")
    for name, size in sizes.items():
        if size is not None:
            print(f"{size:>16,}  {said[name]}")
    return 0
