"""Sizes of real models: each preset gives the number that was published for it."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mambackpt import CheckpointError, CheckpointTypeError, CheckpointValueError
from mambackpt.__main__ import main
from mambackpt.models.config import from_config
from mambackpt.models.hybrid import HybridModel
from mambackpt.models.layers import (
    GDN,
    KDA,
    GroupedAttention,
    LatentAttention,
    LinearAttention,
    Mamba1,
    Mamba2,
    ShortConv,
    mamba_block_size,
)
from mambackpt.models.presets import PRESETS

# State bytes, attention bytes per token and layer, block size. The block sizes of PUBLISHED were
# printed by an engine at start-up, or are held by its own tests.
PUBLISHED = {
    "qwen3.5-0.8b": (1_085_440, 2_048, 544),
    "qwen3.5-4b": (2_146_304, 4_096, 528),
    "qwen3.5-9b": (2_146_304, 4_096, 528),
    "qwen3.5-35b-a3b": (2_146_304, 2_048, 1_056),
    "qwen3.5-27b": (3_207_168, 4_096, 784),
    "qwen3.5-27b-fp8": (3_207_168, 2_048, 1_568),
    "qwen3.5-27b-fp8-mtp2": (3_248_128, 2_048, 1_600),
    "qwen3.5-27b-fp8-mtp3": (3_268_608, 2_048, 1_600),
    "qwen3.5-397b-a17b-tp2": (2_134_016, 1_024, 2_096),
    "nemotron-3-nano": (2_134_016, 1_024, 2_096),
    "nemotron-3-nano-fp16": (1_085_440, 1_024, 1_072),
    "nemotron-3-nano-fp16-fp8": (1_085_440, 512, 2_128),
    "nemotron-3-super": (4_255_744, 512, 8_320),
    "nemotron-nano-9b-v2-bf16": (2_695_168, 4_096, 672),
    "kimi-k3": (6_512_640, 576, 11_392),
    "kimi-k3-tp8": (814_080, 576, 1_536),
    "kimi-k3-tp8-bf16": (814_080, 1_152, 768),
    "kimi-k3-tp16-bf16": (407_040, 1_152, 384),
}
# These shapes are published, the block sizes were worked out by hand from them.
COMPUTED = {
    "qwen3-next": (2_146_304, 2_048, 1_056),
    "qwen3-next-bf16": (1_097_728, 2_048, 544),
    "nemotron-nano-9b-v2": (5_316_608, 4_096, 1_312),
    "falcon-h1-0.5b": (403_968, 512, 800),
    "falcon-h1-7b": (1_594_368, 1_024, 1_568),
    "falcon-h1-34b": (2_127_872, 2_048, 1_040),
    "granite-4-h-small": (2_147_840, 4_096, 528),
    "granite-4-h-tiny": (806_400, 2_048, 400),
    "kimi-linear-48b": (2_170_880, 1_152, 1_920),
    "kimi-linear-48b-tp4": (542_720, 1_152, 512),
}


def test_a_preset_says_whether_its_block_size_was_published() -> None:
    assert {**PUBLISHED, **COMPUTED}.keys() == PRESETS.keys()
    for name, model in PRESETS.items():
        assert model.source.startswith("block size published") == (name in PUBLISHED)


@pytest.mark.parametrize(("name", "sizes"), [*PUBLISHED.items(), *COMPUTED.items()])
def test_a_preset_gives_its_sizes(name: str, sizes: tuple[int, int, int]) -> None:
    model = PRESETS[name]
    assert (model.state_bytes, model.token_bytes, model.block_size()) == sizes


@pytest.mark.parametrize(
    ("name", "alignment", "block", "padding"),
    [
        ("qwen3-next-bf16", 64, 576, 7.46),
        ("qwen3.5-0.8b", 64, 576, 8.68),
        ("qwen3.5-4b", 64, 576, 9.92),
        ("qwen3.5-35b-a3b", 64, 1_088, 3.82),
        ("qwen3.5-0.8b", None, 544, 2.64),
        ("qwen3.5-4b", None, 528, 0.76),
        ("nemotron-3-nano", None, 2_096, 0.58),
        ("qwen3.5-27b-fp8-mtp2", None, 1_600, 0.88),
    ],
)
def test_an_alignment_of_the_layers_makes_blocks_whole_multiples_of_it(
    name: str, alignment: int | None, block: int, padding: float
) -> None:
    model = replace(PRESETS[name], checkpoint_alignment=alignment)
    assert model.block_size() == block
    assert round(model.padding_percent(), 2) == padding


def test_the_user_s_block_and_the_layers_alignment_together_make_the_unit() -> None:
    model = PRESETS["qwen3.5-4b"]
    assert replace(model, user_block_size=8).block_size() == 528  # the kernel's 16 are the least
    assert replace(model, user_block_size=64).block_size() == 576
    assert replace(model, user_block_size=1_000).block_size() == 1_000
    assert replace(model, user_block_size=48, checkpoint_alignment=64).block_size() == 576
    assert replace(PRESETS["kimi-k3-tp8"], user_block_size=64).block_size() == 1_536  # MLA: 128


@pytest.mark.parametrize("name", PRESETS)
def test_a_page_holds_a_state_and_one_unit_less_would_not(name: str) -> None:
    model = PRESETS[name]
    unit = model.attention.kernel_block
    assert model.page_bytes() >= model.state_bytes
    assert (model.block_size() - unit) * model.token_bytes < model.state_bytes


def test_a_request_holds_two_states_its_drafts_and_its_checkpoints() -> None:
    """Published for a page of 2,162,688 bytes: 4,325,376, 6,488,064 and 12,976,128."""
    model = PRESETS["qwen3.5-4b"]
    assert model.page_bytes() == 2_162_688
    assert model.request_bytes() == 4_325_376
    assert model.request_bytes(checkpoint_blocks=1) == 6_488_064
    # The published figure with three drafts keeps that page; they also make the page larger.
    assert model.page_bytes() * (2 + 3 + 1) == 12_976_128
    drafting = PRESETS["qwen3.5-27b-fp8-mtp3"]
    assert drafting.request_bytes(checkpoint_blocks=1) == 1_600 * 2_048 * (2 + 3 + 1)


def test_a_checkpoint_of_kimi_k3_costs_32507_tokens_of_attention_cache() -> None:
    model = PRESETS["kimi-k3"]
    assert (model.model_state_bytes, model.model_token_bytes) == (449_372_160, 13_824)
    assert round(model.exchange_rate) == 32_507
    assert round(PRESETS["qwen3-next"].exchange_rate) == 3_144


# ---- one kind of layer each --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "ranks", "spec", "conv", "recurrent"),
    [
        (Mamba1(8192, 16), 1, 0, (3, 8192), (8192, 16)),
        (Mamba1(8192, 16), 2, 2, (3, 4096), (4096, 16)),  # drafts do not lengthen its window
        (Mamba2(64, 64, 128, 8), 1, 0, (3, 6144), (64, 64, 128)),
        (Mamba2(64, 64, 128, 8), 2, 1, (4, 3072), (32, 64, 128)),
        (Mamba2(64, 64, 128, 1), 2, 0, (3, 2304), (32, 64, 128)),  # one group on each rank
        (GDN(16, 48, 128), 1, 3, (6, 10240), (48, 128, 128)),
        (GDN(30, 30, 96, 192), 1, 0, (3, 11520), (30, 192, 96)),
        (KDA(96, 128), 8, 0, (3, 4608), (12, 128, 128)),
        (ShortConv(2048, 3), 1, 0, (2, 2048), ()),
        (Mamba2(48, 64, 128, 3), 2, 0, (3, 1792), (24, 64, 128)),  # 3 groups become one on each
        (LinearAttention(64, 128), 2, 3, (0, 0), (32, 128, 128)),
    ],
)
def test_shapes_follow_from_heads_ranks_and_drafts(
    layer: object, ranks: int, spec: int, conv: tuple[int, int], recurrent: tuple[int, ...]
) -> None:
    assert layer.conv_shape(ranks, spec) == conv  # type: ignore[attr-defined]
    assert layer.conv_shape(ranks, spec, dim_first=True) == conv[::-1]  # type: ignore[attr-defined]
    assert layer.recurrent_shape(ranks) == recurrent  # type: ignore[attr-defined]


def test_the_worked_size_of_gated_delta_net() -> None:
    layer = GDN(16, 32, 128)
    assert layer.recurrent_bytes() == 32 * 128 * 128 * 4 == 2_097_152
    assert layer.conv_bytes() == (2 * 16 * 128 + 32 * 128) * 3 * 2 == 49_152
    assert mamba_block_size(layer.state_bytes(), 4_096) == 528


def test_latent_attention_is_whole_on_every_rank_and_grouped_attention_is_split() -> None:
    assert LatentAttention().token_bytes(8, "fp8") == 576
    assert GroupedAttention(8, 128).token_bytes(2, "bf16") == 2_048
    assert GroupedAttention(2, 128).token_bytes(8, "bf16") == 512  # a rank keeps one head
    with pytest.raises(CheckpointValueError, match="kv_heads is 6, which 4 tensor-parallel ranks"):
        GroupedAttention(6, 128).token_bytes(4)


# ---- config.json -------------------------------------------------------------------------------

QWEN = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEMOTRON = {
    "model_type": "nemotron_h",
    "hidden_size": 2688,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "mamba_num_heads": 64,
    "mamba_head_dim": 64,
    "ssm_state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "hybrid_override_pattern": "MEMEM*EMEMEM*",
}
KIMI_LINEAR: dict[str, Any] = {
    "model_type": "kimi_linear",
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "linear_attn_config": {"num_heads": 32, "head_dim": 128, "short_conv_kernel_size": 4},
}


@pytest.mark.parametrize(
    ("config", "preset"),
    [(QWEN, "qwen3-next-bf16"), (NEMOTRON, "nemotron-3-nano"), (KIMI_LINEAR, "kimi-linear-48b")],
)
def test_a_config_gives_the_sizes_of_its_preset(config: dict[str, object], preset: str) -> None:
    assert from_config(config).state_bytes == PRESETS[preset].state_bytes
    assert from_config(config).block_size() == PRESETS[preset].block_size()


def test_a_nested_config_is_read_where_its_text_model_is() -> None:
    nested = {"model_type": "qwen3_5", "text_config": QWEN | {"model_type": "qwen3_5_text"}}
    assert from_config(nested).state_bytes == from_config(QWEN).state_bytes


def test_layers_are_counted_where_the_config_lists_them() -> None:
    model = from_config(NEMOTRON)
    assert (model.recurrent_layers, model.attention_layers) == (6, 2)
    assert from_config(QWEN).recurrent_layers is None
    strange = QWEN | {"layer_types": ["linear_attention", "sliding_attention"]}
    assert from_config(strange).recurrent_layers is None  # its window costs another number of bytes


@pytest.mark.parametrize(
    ("config", "counts"),
    [
        (QWEN | {"num_hidden_layers": 48, "full_attention_interval": 4}, (36, 12)),
        (
            KIMI_LINEAR
            | {"num_hidden_layers": 27}
            | {
                "linear_attn_config": {
                    **KIMI_LINEAR["linear_attn_config"],
                    "full_attn_layers": [4, 8, 12, 16, 20, 24, 27],
                }
            },
            (20, 7),
        ),
    ],
    ids=["one in four", "listed"],
)
def test_layers_are_counted_from_the_interval_or_the_list_of_attention_layers(
    config: dict[str, object], counts: tuple[int, int]
) -> None:
    """Qwen3-Next's own config says 48 layers, attention in one of four: the preset's 36 and 12."""
    model = from_config(config)
    assert (model.recurrent_layers, model.attention_layers) == counts


def test_a_config_file_is_read_and_served_as_asked(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    assert from_config(path, recurrent_dtype="fp32").block_size() == 1_056
    assert from_config(str(path), ranks=2).token_bytes == 1_024


@pytest.mark.parametrize(
    ("name", "block"),
    [("Qwen3NextConfig", 544), ("Qwen3_5TextConfig", 272), ("KimiLinearConfig", 1_920)],
)
def test_the_model_library_s_config_objects_are_read(name: str, block: int) -> None:
    """544 and 1,920 are published; Qwen3.5 with a bf16 state is 1,097,728 / 4,096 tokens."""
    transformers = pytest.importorskip("transformers")
    model = from_config(getattr(transformers, name)())
    assert model.block_size() == block
    assert model.recurrent_layers
    assert model.attention_layers


@pytest.mark.parametrize(
    ("name", "layer", "counts"),
    [
        ("NemotronHConfig", Mamba2(128, 64, 128, 8), (1, 1)),
        ("FalconH1Config", Mamba2(128, 8, 256, 1), (32, 32)),
        ("GraniteMoeHybridConfig", Mamba2(128, 64, 256, 1), (32, 0)),
        ("BambaConfig", Mamba2(128, 64, 256, 1), (None, None)),
        ("JambaConfig", Mamba1(8192, 16), (28, 4)),
        ("Lfm2Config", ShortConv(2560, 3), (0, 32)),
        ("Lfm2MoeConfig", ShortConv(2048, 3), (None, None)),
        ("OlmoHybridConfig", GDN(30, 30, 96, 192), (24, 8)),
        ("Qwen3_5Config", GDN(16, 32, 128, 128), (24, 8)),
        ("Qwen3_5MoeConfig", GDN(16, 32, 128, 128), (30, 10)),
        ("MiniMaxConfig", LinearAttention(32, 128), (16, 16)),
    ],
)
def test_every_family_of_the_model_library_can_be_read(
    name: str, layer: object, counts: tuple[int | None, int | None]
) -> None:
    """The right side is what each class's documented defaults say."""
    transformers = pytest.importorskip("transformers")
    model = from_config(getattr(transformers, name)())
    assert model.recurrent == layer
    assert (model.recurrent_layers, model.attention_layers) == counts
    assert model.page_bytes() >= model.state_bytes > 0


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *(("Qwen3NextConfig", 4), ("Qwen3_5TextConfig", 4), ("OlmoHybridConfig", 4)),
        *(("NemotronHConfig", None), ("FalconH1Config", 1), ("GraniteMoeHybridConfig", 1)),
        *(("BambaConfig", 1), ("JambaConfig", 5), ("Lfm2Config", 1), ("KimiLinearConfig", 4)),
    ],
)
def test_the_window_has_the_channels_and_taps_of_the_real_model(
    name: str, layers: int | None
) -> None:
    """The model is built without memory; its convolution's weight is what the window feeds."""
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    few = {} if layers is None else {"num_hidden_layers": layers}
    kinds = {"layer_types": ["conv"]} if name == "Lfm2Config" else {}
    config = getattr(transformers, name)(**few, **kinds)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    found = {
        (module.out_channels, *module.kernel_size)
        for module in model.modules()
        if isinstance(module, torch.nn.Conv1d)
    }
    layer = from_config(config).recurrent
    assert found == {(layer.conv_channels(), layer.conv_width)}  # type: ignore[attr-defined]


def test_linear_attention_without_a_convolution_keeps_what_the_real_model_keeps() -> None:
    transformers = pytest.importorskip("transformers")
    torch = pytest.importorskip("torch")
    config = transformers.MiniMaxConfig(
        **{"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 64, "vocab_size": 64},
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
        num_local_experts=2,
    )
    cache = transformers.AutoModel.from_config(config)(torch.arange(8)[None]).past_key_values
    [state] = [kept for kept in cache.linear_cache if len(kept)]
    assert state.shape[1:] == from_config(config).recurrent.recurrent_shape()


def test_a_head_size_left_to_the_model_is_worked_out() -> None:
    """Bamba and Granite configs may say "auto": the inner width over the heads."""
    config = {
        **{"model_type": "bamba", "hidden_size": 4096, "num_attention_heads": 32},
        **{"mamba_n_heads": 128, "mamba_d_head": "auto", "mamba_expand": 2, "mamba_d_conv": 4},
        **{"mamba_d_state": 256, "mamba_n_groups": 1},
    }
    assert from_config(config).recurrent == Mamba2(128, 64, 256, 1)
    assert from_config(config).attention == GroupedAttention(32, 128)


def test_the_linear_layers_head_size_is_never_the_model_s() -> None:
    """Kimi-Linear's config has a head_dim of its own beside that of the linear layers."""
    config = KIMI_LINEAR | {"head_dim": 72}
    assert from_config(config).recurrent == KDA(32, 128)
    config |= {"linear_attn_config": {"num_heads": 32, "short_conv_kernel_size": 4}}
    with pytest.raises(
        CheckpointValueError, match=r"\(linear_attn_config\)' model has no head_dim"
    ):
        from_config(config)


@pytest.mark.parametrize("missing", [n for n in QWEN if n.startswith("linear_num")])
def test_a_missing_field_is_named(missing: str) -> None:
    with pytest.raises(CheckpointValueError, match=f"'qwen3_next' model has no {missing}"):
        from_config({name: value for name, value in QWEN.items() if name != missing})


def test_what_is_no_config_is_refused_with_what_would_be_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointValueError, match="model_type is 'gpt2'; expected one of"):
        from_config({"model_type": "gpt2"})
    with pytest.raises(CheckpointValueError, match="cannot be read as a config"):
        from_config(tmp_path / "absent.json")
    (tmp_path / "weights").write_bytes(b"\xff\xfe\x00\x80")
    with pytest.raises(CheckpointValueError, match="cannot be read as a config"):
        from_config(tmp_path / "weights")
    with pytest.raises(CheckpointTypeError, match="text_config is a int; expected a mapping"):
        from_config({"model_type": "qwen3_5", "text_config": 5})
    with pytest.raises(CheckpointTypeError, match="a mapping, a path or an object"):
        from_config(5)
    with pytest.raises(CheckpointTypeError, match="rank"):
        from_config(QWEN, rank=2)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda: replace(PRESETS["qwen3.5-4b"], ranks=3).state_bytes,
        lambda: replace(PRESETS["qwen3.5-4b"], kv_dtype="fp5"),
        lambda: replace(PRESETS["qwen3.5-4b"], checkpoint_alignment=0),
        lambda: replace(PRESETS["qwen3.5-4b"], ranks=0),
        lambda: replace(PRESETS["qwen3.5-4b"], spec=-1),
        lambda: GDN(16, 32, 128).state_bytes(ranks=0),
        lambda: GDN(16, 32, 128).conv_shape(spec=-1),
        lambda: Mamba2(64, -64, 128, 8),
        lambda: GroupedAttention(True, 128),
        lambda: PRESETS["falcon-h1-7b"].exchange_rate,
        lambda: mamba_block_size(0, 4096),
        lambda: mamba_block_size(2_146_304, 4096.0),  # type: ignore[arg-type]
        lambda: HybridModel("x", KDA(4, 8), LatentAttention()).request_bytes(checkpoint_blocks=-1),
    ],
    ids=[
        *("ranks", "dtype", "alignment", "no ranks", "drafts", "ranks of a layer"),
        *("drafts of a layer", "head", "boolean", "layers", "no state", "float", "negative"),
    ],
)
def test_impossible_sizes_are_refused(wrong: object) -> None:
    with pytest.raises(CheckpointError, match="expected"):
        wrong()  # type: ignore[operator]


# ---- the command -------------------------------------------------------------------------------


def test_the_size_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "kimi-k3", "--tp", "8"]) == 0
    said = capsys.readouterr().out
    assert "1,536  tokens of a block" in said
    assert "computed from its preset; on one of 8 ranks" in said  # no longer what was published
    assert main(["size", "qwen3.5-4b"]) == 0
    said = capsys.readouterr().out
    assert "524  tokens of one attention layer that cost as much as a state" in said
    assert "1,572  tokens of attention cache that cost as much as a checkpoint" in said
    assert "51,511,296  bytes of a checkpoint of all recurrent layers, 51.51 MB" in said
    assert "recurrent state: fp32 (the preset's)" in said


def test_the_size_command_prints_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "qwen3.5-4b", "--alignment", "64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["layer"], said["block_size"], said["padding_percent"]) == ("GDN", 576, 9.92)
    assert said["exchange_rate"] == 1572
    assert main(["size", "kimi-k3", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["exchange_rate"] == 32_507


def test_the_size_command_reads_a_config_with_every_option(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN))
    options = {"tp": 2, "spec": 1, "kv-dtype": "fp8", "recurrent-dtype": "fp32", "block": 64}
    words = [str(word) for name, value in options.items() for word in (f"--{name}", value)]
    assert main(["size", str(path), *words, "--conv-dtype", "fp32", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    # 4,096 channels x 4 tokens x 4 bytes, 16 heads x 128 x 128 x 4 bytes, 1 head x 2 x 256 x 1 byte
    assert (said["conv_bytes"], said["recurrent_bytes"]) == (65_536, 1_048_576)
    assert (said["token_bytes"], said["block_size"]) == (512, 2_176)


def test_the_size_command_lists_the_presets(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert [line.split("  ")[-1].split(":")[0] for line in lines] == list(PRESETS)
    assert main(["size", "--json"]) == 0
    said = {model["name"]: model["block_size"] for model in json.loads(capsys.readouterr().out)}
    assert said == {name: sizes[2] for name, sizes in (PUBLISHED | COMPUTED).items()}


def test_the_size_command_refuses_an_unknown_model(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "kimi-k4"]) == 2
    assert "kimi-k3" in capsys.readouterr().err


# ---- where a config may lie, and what it may be ------------------------------------------------


def write_config(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_a_folder_with_a_config_is_read(tmp_path: Path) -> None:
    folder = write_config(tmp_path / "model", QWEN)
    assert from_config(folder) == replace(from_config(QWEN), name="model")
    assert from_config(folder / "config.json") == from_config(folder)


def test_a_folder_of_the_hugging_face_cache_is_read_at_its_main_revision(tmp_path: Path) -> None:
    cache = tmp_path / "models--org--name"
    write_config(cache / "snapshots" / "ffff", QWEN | {"linear_num_value_heads": 64})
    write_config(cache / "snapshots" / "aaaa", QWEN)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("aaaa\n")
    assert from_config(cache) == replace(from_config(QWEN), name="org/name")
    (cache / "refs" / "main").unlink()
    with pytest.raises(CheckpointValueError, match="2 snapshots, and refs/main names none"):
        from_config(cache)
    assert from_config(cache / "snapshots" / "aaaa").name == "org/name"


def test_a_config_object_of_a_folder_gives_what_its_file_gives(tmp_path: Path) -> None:
    """What the class does not know, such as mamba_ssm_dtype, it keeps."""
    transformers = pytest.importorskip("transformers")
    told = {"model_type": "qwen3_5_text", "mamba_ssm_dtype": "float32", "num_hidden_layers": 8}
    folder = write_config(tmp_path / "model", QWEN | told | {"layer_types": None})
    model = from_config(transformers.AutoConfig.from_pretrained(folder))
    assert model.recurrent_dtype == "float32"
    assert (model.recurrent_layers, model.attention_layers) == (6, 2)
    file = from_config(folder, recurrent_layers=6, attention_layers=2)
    assert replace(model, name="model") == file


@pytest.mark.parametrize("kind", ["llama", "qwen3", "mixtral", "gpt_oss"])
def test_a_model_of_attention_alone_needs_no_checkpoint(kind: str) -> None:
    config = {"model_type": kind, "num_attention_heads": 8, "hidden_size": 512}
    with pytest.raises(CheckpointValueError, match="every layer attends and nothing recurrent"):
        from_config(config)


def test_a_model_without_attention_has_no_page_to_share() -> None:
    with pytest.raises(CheckpointValueError, match="no attention layer"):
        from_config({"model_type": "mamba2", "num_heads": 8})


def test_another_hybrid_family_is_named_as_unknown() -> None:
    config = {"model_type": "zamba9", "num_attention_heads": 8, "mamba_d_state": 64}
    with pytest.raises(CheckpointValueError, match="model_type is 'zamba9'"):
        from_config(config)


def test_draft_layers_attend_where_drafts_are_on() -> None:
    config = QWEN | {"num_hidden_layers": 8, "full_attention_interval": 4, "layer_types": None}
    config["num_nextn_predict_layers"] = 1
    assert from_config(config).attention_layers == 2
    drafting = from_config(config, spec=2)
    assert drafting.attention_layers == 3
    assert "assumed: draft layers (1) attend, and cache as the others do" in drafting.notes
    assert any("draft layers (1) are left out" in note for note in from_config(config).notes)


def test_what_was_assumed_is_said() -> None:
    assert "the engine's default" in from_config(QWEN).notes[0]
    named = from_config(QWEN | {"mamba_ssm_dtype": "float32"})
    assert named.notes[0] == "recurrent state float32: as mamba_ssm_dtype says"
    assert from_config(QWEN | {"mamba_ssm_dtype": "auto"}).notes == from_config(QWEN).notes
    assert [note.split(":")[0] for note in from_config(QWEN).notes] == [
        "recurrent state bf16", "window bf16", "attention cache bf16"
    ]  # fmt: skip
    told = from_config(QWEN, recurrent_dtype="fp32", kv_dtype="fp8", conv_dtype="bf16")
    assert told.notes == ()


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"num_experts": 512}, "the 512 experts change no size here"),
        ({"layer_types": ["linear_attention", "sliding"]}, "some are of the kind sliding"),
        ({"layer_types": ["full_attention"]}, "every layer attends and nothing recurrent"),
        ({"layer_types": ["linear_attention"]}, "no layer attends"),
    ],
)
def test_what_the_layers_counts_rest_on_is_said(fields: dict[str, object], sentence: str) -> None:
    assert any(sentence in note for note in from_config(QWEN | fields).notes)


@pytest.mark.parametrize(
    "fields",
    [
        {"layer_types": 5},
        {"layers_block_type": True},
        {"layer_types": None, "num_hidden_layers": 8, "attn_layer_indices": 3},
        {"layer_types": None, "num_hidden_layers": 8, "linear_attn_config": "x"},
        {"layer_types": None, "num_hidden_layers": 8, "attn_layer_period": 2,
         "attn_layer_offset": "x"},
        {"text_config": [1]},
    ],
)  # fmt: skip
def test_a_field_of_the_wrong_shape_is_refused_by_name(fields: dict[str, object]) -> None:
    wrong = list(fields)[-1]
    with pytest.raises(CheckpointTypeError, match=wrong):
        from_config(QWEN | fields)


def test_layers_are_counted_however_many_a_config_claims() -> None:
    config = QWEN | {"layer_types": None, "num_hidden_layers": 10**30, "attn_layer_period": 8}
    assert from_config(config | {"attn_layer_offset": 4}).attention_layers == 10**30 // 8


@pytest.mark.parametrize(
    ("kind", "block"),
    [("qwen3_next", 544), ("falcon_h1", 144), ("jamba", 80), ("kimi_linear", 1_920)],
)
def test_a_config_object_of_transformers_is_read(kind: str, block: int) -> None:
    """Built from the defaults of its class, without a network."""
    transformers = pytest.importorskip("transformers")
    mapping = transformers.models.auto.configuration_auto.CONFIG_MAPPING
    assert from_config(mapping[kind]()).block_size() == block


def test_scales_per_token_and_head_are_counted() -> None:
    """Public: 2,080 bytes a token of a 27B model, 2,048 and 8 scales of 4 bytes."""
    for dtype in ("int8_per_token_head", "fp8_per_token_head"):
        assert replace(PRESETS["qwen3.5-27b"], kv_dtype=dtype).token_bytes == 2_080
