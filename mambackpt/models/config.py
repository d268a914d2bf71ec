"""Models from a config.json: one function a family."""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from mambackpt.errors import CheckpointTypeError, CheckpointValueError, checked_choice, checked_int
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.layers import (
    GDN,
    KDA,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    Mamba1,
    Mamba2,
    RecurrentLayer,
    ShortConv,
)
from mambackpt.models.presets import PRESETS


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

    def draft_layers(self) -> int:
        """Count the layers that draft tokens, 0 where the config names none."""
        names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        return next((self.size(n) for n in names if self.fields.get(n)), 0)

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


def _lightning(c: _Config) -> _Layers:
    attention = c.attention()
    return LinearAttention(c.size("num_attention_heads"), attention.head_dim), attention


_FAMILIES: dict[str, Callable[[_Config], _Layers]] = {
    **dict.fromkeys(("qwen3_next", "olmo_hybrid"), _gated_delta),
    **dict.fromkeys(("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text"), _gated_delta),
    **dict.fromkeys(("nemotron_h", "falcon_h1", "granitemoehybrid", "bamba"), _mamba2),
    "jamba": _mamba1,
    "kimi_linear": _kimi_delta,
    **dict.fromkeys(("lfm2", "lfm2_moe"), _short_conv),
    "minimax": _lightning,
}


_PURE = ("mamba", "mamba2", "falcon_mamba", "rwkv", "xlstm")
# How the names of fields begin that only a model with recurrent layers has.
_RECURRENT_FIELDS = ("linear_", "mamba", "ssm_", "conv_L_", "layers_block_type", "rwkv", "lru_")


def from_config(config: object, **serving: Any) -> HybridModel:
    """Return the model that a config.json describes: a mapping, a path, or a config object.

    >>> model = from_config({"model_type": "qwen3_next", "num_attention_heads": 16,
    ...     "num_key_value_heads": 2, "head_dim": 256, "linear_num_key_heads": 16,
    ...     "linear_num_value_heads": 32, "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    ...     "linear_conv_kernel_dim": 4})
    >>> model.block_size(), model.notes[0]
    (544, "recurrent state bf16: the config names no dtype, and this is the engine's default")

    A path may be a file, a folder with a config.json, or a model's folder in the cache of Hugging
    Face. ``serving`` gives what the config does not know (``ranks``, ``spec``, ``kv_dtype``, ...).
    The recurrent dtype is the config's own, or the engine's default for the family; window and
    attention cache are 16 bits wide, as engines cast wider weights; what was assumed is in
    ``notes``. Raises CheckpointValueError for an unknown family, for a model without recurrent
    layers and for a missing field, CheckpointTypeError otherwise.
    """
    if isinstance(config, str | Path):
        config = _read(Path(config))
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise CheckpointTypeError(
            f"the config is a {type(config).__name__}; expected a mapping, a path or an object "
            "with to_dict(). Try json.load(open('config.json'))."
        )
    read = _Config(config)
    recurrent, attention = _layers_of(read)
    recurs, attends = read.count_layers()
    dtype, notes = _recurrent_dtype(read, serving)
    drafts = read.draft_layers() if serving.get("spec") else 0
    if drafts and attends is not None:
        attends += drafts
        notes.append(f"assumed: {drafts} draft layers attend, and cache as the others do")
    model = HybridModel(
        str(read.fields.get("_name_or_path") or read.kind),
        recurrent,
        attention,
        "config.json",
        dtype,
        recurrent_layers=recurs,
        attention_layers=attends,
        notes=tuple(notes),
    )
    try:
        return replace(model, **serving)
    except TypeError as error:
        raise CheckpointTypeError(
            f"{error}; expected fields of HybridModel. Try ranks, spec, kv_dtype, recurrent_dtype."
        ) from error


def _read(path: Path) -> object:
    """The config that lies at a path: a file, a folder, or a model's folder in a cache."""
    given = path
    if path.is_dir():
        revisions = sorted((path / "snapshots").glob("*/config.json"))
        main = path / "refs" / "main"
        if main.is_file():
            named = path / "snapshots" / main.read_text().strip() / "config.json"
            revisions = [named] if named.is_file() else revisions
        path = revisions[-1] if revisions else path / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:  # no file, no text, no JSON
        close = get_close_matches(str(given), PRESETS, 1, cutoff=0.6)
        hint = f"the preset {close[0]!r}" if close else f"a preset: {', '.join(PRESETS)}"
        raise CheckpointValueError(
            f"{given} cannot be read as a config ({error}); expected a model's config.json, a "
            f"folder with one, or a preset. Try {hint}."
        ) from error


def _layers_of(read: _Config) -> _Layers:
    """The layers of a family, or why there are none."""
    if read.kind in _FAMILIES:
        return _FAMILIES[read.kind](read)
    if read.kind in _PURE:
        raise CheckpointValueError(
            f"a {read.kind!r} model has no attention layer, so no attention page sets its block; "
            "expected a hybrid model. Try HybridModel with the layers of your own."
        )
    kinds = {*(read.fields.get("layer_types") or ())}
    recurs = any(str(name).startswith(_RECURRENT_FIELDS) for name in read.fields)
    if read.fields.get("num_attention_heads") and not recurs and not kinds & _RECURRENT_WORDS:
        raise CheckpointValueError(
            f"in a {read.kind!r} model every layer attends and nothing recurrent is there: its "
            "cache can be cut at any token and needs no checkpoint; expected a hybrid model. "
            f"Try one of {', '.join(_FAMILIES)}."
        )
    hint = "Try HybridModel(name, recurrent layer, attention) for another family."
    checked_choice("model_type", read.kind, _FAMILIES, hint=hint)
    raise AssertionError("unreachable")


def _recurrent_dtype(read: _Config, serving: Mapping[str, Any]) -> tuple[str, list[str]]:
    """The dtype of the recurrent state, and where it and the other dtypes come from."""
    notes = []
    named = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")
    field = next((name for name in named if read.fields.get(name)), None)
    # Engine defaults: Nemotron-H and KDA keep an fp32 state, the other families the model's dtype.
    dtype = "fp32" if read.kind in ("nemotron_h", "kimi_linear") else "bf16"
    if field:
        dtype = str(read.fields[field])
    if "recurrent_dtype" not in serving:
        why = f"as {field} says" if field else (
            "the config names no dtype, and this is the engine's default"
        )  # fmt: skip
        notes.append(f"recurrent state {dtype}: {why}")
    if "kv_dtype" not in serving:
        notes.append("attention cache bf16: assumed, an engine's own unless it is told another")
    return dtype, notes
