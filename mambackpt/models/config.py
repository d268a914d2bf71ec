"""Models from a config.json: one function a family."""

import json
from collections.abc import Callable, Mapping, Sequence
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
        self.fields = dict(config)
        self.kind = str(config.get("model_type", "unknown"))
        # The language model of several: what it leaves out is read from the whole model's fields.
        self.fields |= {k: v for k, v in self.nested("text_config").items() if v not in (None, "")}
        self.kind = str(self.fields.get("model_type", "unknown"))

    def size(self, *names: str, default: int | None = None, least: int = 1) -> int:
        """Read the first of these fields that is there, as an integer."""
        for name in names:
            if self.fields.get(name) is not None:
                return checked_int(
                    f"{self.kind}: {name}", self.fields[name], least=least, unit="elements"
                )
        if default is not None:
            return default
        raise CheckpointValueError(
            f"the config of a {self.kind!r} model has no {' or '.join(names)}; expected a positive "
            "whole number. Try the config.json that lies beside the weights."
        )

    def nested(self, name: str) -> Mapping[str, Any]:
        """Read a part of the config; empty where there is none."""
        part = self.fields.get(name) or {}
        if hasattr(part, "to_dict"):
            part = part.to_dict()
        if not isinstance(part, Mapping):
            raise CheckpointTypeError(
                f"{name} is a {type(part).__name__}; expected a mapping. "
                "Try the config.json that lies beside the weights."
            )
        return part

    def listed(self, name: str, value: object) -> Sequence[Any]:
        """Check a field that has an entry for each layer: a list, or letters."""
        if isinstance(value, str | list | tuple):
            return value
        raise CheckpointTypeError(
            f"{self.kind}: {name} is {value!r}; expected a list. "
            "Try the config.json that lies beside the weights."
        )

    def layer_kinds(self) -> tuple[str, ...]:
        """The kind of every layer as the config names it: a word, or Nemotron-H's letter."""
        for name in ("layer_types", "layers_block_type", "hybrid_override_pattern"):
            if self.fields.get(name):
                return tuple(map(str, self.listed(name, self.fields[name])))
        return ()

    def count_layers(self) -> tuple[int | None, int | None]:
        """Count recurrent and attention layers; None where the config does not tell."""
        get = self.fields.get
        kinds = self.layer_kinds()
        if kinds and self.kind not in _BOTH_IN_ONE:
            if not set(kinds) <= _KNOWN_WORDS:
                return None, None
            recurs = sum(kind in _RECURRENT_WORDS for kind in kinds)
            return recurs, sum(kind in _ATTENTION_WORDS for kind in kinds)
        if get("num_hidden_layers") is None:
            return None, None
        layers = self.size("num_hidden_layers")
        if self.kind in _BOTH_IN_ONE:
            return layers, layers
        attends = self._attention_layers(layers)
        return (None, None) if attends is None else (layers - attends, attends)

    def _attention_layers(self, layers: int) -> int | None:
        """Count the attention layers that a list or a period tells of."""
        indices: dict[str, object] = {
            name: self.fields.get(name) for name in ("attn_layer_indices", "full_attn_idxs")
        }
        indices["full_attn_layers"] = self.nested("linear_attn_config").get("full_attn_layers")
        for name, value in indices.items():
            if value:
                return len(set(map(str, self.listed(name, value))))
        if self.fields.get("full_attention_interval"):
            return layers // self.size("full_attention_interval")
        if self.fields.get("attn_layer_period"):
            first = self.size("attn_layer_offset", default=0, least=0)
            return max(0, -((first - layers) // self.size("attn_layer_period")))
        return None

    def draft_layers(self) -> int:
        """Count the layers that draft tokens, 0 where the config names none."""
        names = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
        return next((self.size(n) for n in names if self.fields.get(n)), 0)

    def experts(self) -> int:
        """Count the experts of a layer, 0 in a dense model."""
        names = ("num_experts", "num_local_experts", "n_routed_experts")
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
_KNOWN_WORDS = _RECURRENT_WORDS | _ATTENTION_WORDS | _STATELESS_WORDS
_BOTH_IN_ONE = ("falcon_h1",)  # every layer has both, side by side
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
    nested = c.nested("linear_attn_config")
    if not nested:
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
    name = ""
    if isinstance(config, str | Path):
        path = _find(Path(config))
        name, config = _name_of(path), _read(path, str(config))
    elif hasattr(config, "to_dict"):
        config = config.to_dict()
    if not isinstance(config, Mapping):
        raise CheckpointTypeError(
            f"the config is of type {type(config).__name__}; expected a mapping, a path or an "
            "object with to_dict(). Try json.load(open('config.json'))."
        )
    read = _Config(config)
    recurrent, attention = _layers_of(read)
    recurs, attends = read.count_layers()
    dtype, notes = _recurrent_dtype(read, serving)
    notes += _notes_on_layers(read, serving)
    drafts = read.draft_layers() if serving.get("spec") else 0
    if drafts and attends is not None:
        attends += drafts
    model = HybridModel(
        str(config.get("_name_or_path") or name or read.kind),
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


def _find(path: Path) -> Path:
    """The config.json of a folder, or of a model's folder in the cache of Hugging Face."""
    if not path.is_dir():
        return path
    revisions = sorted((path / "snapshots").glob("*/config.json"))
    main = path / "refs" / "main"
    if main.is_file():
        named = path / "snapshots" / main.read_text().strip() / "config.json"
        revisions = [named] if named.is_file() else revisions
    if len(revisions) > 1:
        raise CheckpointValueError(
            f"{path} has {len(revisions)} snapshots, and refs/main names none of them; expected "
            f"one config.json. Try {revisions[0]}."
        )
    return revisions[0] if revisions else path / "config.json"


def _name_of(path: Path) -> str:
    """What to call the model of a file: after its folder, or as its hub does."""
    for part in path.parts:
        if part.startswith("models--"):
            return part.removeprefix("models--").replace("--", "/")
    return path.resolve().parent.name if path.name == "config.json" else path.stem


def _read(path: Path, given: str) -> object:
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:  # no file, no text, no JSON
        close = get_close_matches(given, PRESETS, 1, cutoff=0.6)
        hint = f"the preset {close[0]!r}" if close else f"a preset: {', '.join(PRESETS)}"
        why = error.strerror if isinstance(error, OSError) else error
        raise CheckpointValueError(
            f"{given} cannot be read as a config ({why}); expected a model's config.json, a "
            f"folder with one, or a preset. Try {hint}."
        ) from error


def _notes_on_layers(read: _Config, serving: Mapping[str, Any]) -> list[str]:
    """What the counts rest on, and what does not count."""
    notes = []
    recurs, attends = read.count_layers()
    if recurs == 0 and not serving.get("recurrent_layers"):
        notes.append(
            "by this config every layer attends and nothing recurrent is there: its cache can be "
            "cut at any token; states are those of a layer that it does not have"
        )
    if attends == 0 and not serving.get("attention_layers"):
        notes.append(
            "by this config no layer attends: the block is that of a layer that it does not have"
        )
    unknown = sorted(set(read.layer_kinds()) - _KNOWN_WORDS)
    if recurs is None and unknown:
        notes.append(f"layers are not counted: some are of the kind {', '.join(unknown)}")
    drafts = read.draft_layers()
    if drafts and serving.get("spec"):
        notes.append(f"assumed: draft layers ({drafts}) attend, and cache as the others do")
    elif drafts:
        notes.append(f"draft layers ({drafts}) are left out: no draft tokens were asked for")
    if read.experts() > 1:
        notes.append(
            f"the {read.experts()} experts change no size here: they keep no state and cache no "
            "token"
        )
    return notes


def _layers_of(read: _Config) -> _Layers:
    """The layers of a family, or why there are none."""
    if read.kind in _FAMILIES:
        return _FAMILIES[read.kind](read)
    if read.kind in _PURE:
        raise CheckpointValueError(
            f"a {read.kind!r} model has no attention layer, so no attention page sets its block; "
            "expected a hybrid model. Try HybridModel with the layers of your own."
        )
    kinds = set(read.layer_kinds())
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
    field = next((n for n in named if read.fields.get(n) not in (None, "", "auto")), None)
    # Engine defaults: Nemotron-H and KDA keep an fp32 state, the other families the model's dtype.
    dtype = "fp32" if read.kind in ("nemotron_h", "kimi_linear") else "bf16"
    if field:
        dtype = str(read.fields[field])
    if "recurrent_dtype" not in serving:
        why = f"as {field} says" if field else (
            "the config names no dtype, and this is the engine's default"
        )  # fmt: skip
        notes.append(f"recurrent state {dtype}: {why}")
    if "conv_dtype" not in serving:
        notes.append("window bf16: assumed, 16 bits as engines keep a model's own dtype")
    if "kv_dtype" not in serving:
        notes.append("attention cache bf16: assumed, an engine's own unless it is told another")
    return dtype, notes
