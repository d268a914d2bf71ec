"""Published models. To add one, add one line; or read its config.json with `from_config`."""

from dataclasses import replace

from mambackpt.models.hybrid import HybridModel
from mambackpt.models.layers import GDN, KDA, GroupedAttention, LatentAttention, Mamba2

_LOG = "block size published in a log or an engine's test"
_FORMULA = "shapes published, block size computed"
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
    _next := HybridModel(
        "qwen3-next",
        _GDN_32,
        _GQA(2, 256),
        _FORMULA,
        notes=(
            "state in fp32 (--mamba-ssm-cache-dtype float32); its config.json names no dtype, and "
            "the engine's default is bf16: qwen3-next-bf16",
        ),
    ),
    replace(_next, name="qwen3-next-bf16", recurrent_dtype="bf16", notes=()),
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
    _kimi := HybridModel("kimi-k3", _K3, _MLA, _LOG, kv_dtype="fp8"),
    replace(_kimi, name="kimi-k3-tp8", ranks=8),
    replace(_kimi, name="kimi-k3-tp8-bf16", ranks=8, kv_dtype="bf16"),
    replace(_kimi, name="kimi-k3-tp16-bf16", ranks=16, kv_dtype="bf16"),
]
# Recurrent and attention layers of published configurations, by the beginning of the name.
_LAYERS = {
    "qwen3.5-0.8b": (18, 6),
    **dict.fromkeys(("qwen3.5-4b", "qwen3.5-9b"), (24, 8)),
    "qwen3.5-27b": (48, 16),
    "qwen3.5-35b-a3b": (30, 10),
    "qwen3.5-397b-a17b": (45, 15),
    "qwen3-next": (36, 12),
    "nemotron-3-nano": (23, 6),
    "nemotron-3-super": (40, 8),
    "granite-4-h-small": (36, 4),
    "kimi-linear-48b": (20, 7),
    "kimi-k3": (69, 24),
}


def _counted(model: HybridModel) -> HybridModel:
    for name, (recurrent, attention) in _LAYERS.items():
        if model.name.startswith(name):
            source = f"{model.source}; layer counts published"
            return replace(
                model, recurrent_layers=recurrent, attention_layers=attention, source=source
            )
    return model


PRESETS: dict[str, HybridModel] = {model.name: _counted(model) for model in _MODELS}
