"""What a pool holds: the released engine's own counts, and the public cases."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mambackpt import CheckpointError
from mambackpt.__main__ import main
from mambackpt.models.capacity import Capacity, pool_capacity
from mambackpt.models.hosts import host_checkpoint_bytes, smallest_chunk
from mambackpt.models.presets import PRESETS
from mambackpt.models.slots import balanced_split, host_tier_bytes, slots_per_request

CASES: list[dict[str, dict[str, Any]]] = json.loads(
    (Path(__file__).parent.parent / "data/capacity_vectors.json").read_text()
)["cases"]


def capacity_of(case: dict[str, dict[str, Any]]) -> Capacity:
    names = ("attention_layers", "recurrent_layers", "block", "pool_bytes", "max_len")
    return pool_capacity(
        **{name: case["in"][name] for name in names},
        page_bytes=case["out"]["page_bytes"],
        drafts=case["in"]["spec"],
        checkpoint_blocks=case["in"]["checkpoint_blocks"],
    )


@pytest.mark.parametrize("case", CASES, ids=range(len(CASES)))
def test_groups_ids_and_logged_figures_are_those_of_the_engine(
    case: dict[str, dict[str, Any]],
) -> None:
    """vllm 0.33.0: get_kv_cache_groups, _pool_bytes_per_block, get_kv_cache_capacity."""
    holds, out = capacity_of(case), case["out"]
    assert (holds.attention_groups, holds.recurrent_groups) == (
        out["attention_groups"],
        out["recurrent_groups"],
    )
    assert (holds.bytes_per_id, holds.ids) == (out["bytes_per_block_id"], out["block_ids"])
    assert holds.logged_tokens == out["logged_tokens"]
    assert round(holds.concurrency, 6) == out["concurrency"]


@given(
    st.integers(1, 100), st.integers(1, 100), st.integers(1, 10**7), st.integers(1, 4096),
    st.integers(0, 3), st.integers(0, 1),
)  # fmt: skip
def test_a_pool_never_gives_out_more_bytes_than_it_has(
    a: int, r: int, page: int, block: int, drafts: int, kept: int
) -> None:
    holds = pool_capacity(
        attention_layers=a, recurrent_layers=r, page_bytes=page, block=block,
        pool_bytes=10**12, max_len=10 * block, drafts=drafts, checkpoint_blocks=kept,
    )  # fmt: skip
    assert holds.ids * holds.bytes_per_id <= 10**12 < (holds.ids + 1) * holds.bytes_per_id
    per_group = holds.bytes_per_id // page  # layers of the widest group
    assert per_group * holds.attention_groups >= a
    assert per_group * holds.recurrent_groups >= r
    # One token more than a block takes another id of every attention group, and no state.
    grown = holds.live_ids(block + 1) - holds.live_ids(block)
    assert grown == holds.attention_groups
    assert holds.live_ids(1) == holds.attention_groups + holds.live_recurrent_ids
    # A finished request keeps full blocks only, and a state costs an id of each recurrent group.
    assert holds.cached_ids(block - 1, 0) == 0
    assert holds.cached_ids(block, 2) - holds.cached_ids(block, 1) == holds.recurrent_groups


def test_a_state_costs_three_ids_where_784_tokens_cost_one() -> None:
    """48 + 16 layers of a 27B model: the exchange rate that an operator sees."""
    holds = PRESETS["qwen3.5-27b"].capacity(20 * 10**9, 262_144)
    assert (holds.cached_ids(784, 0), holds.cached_ids(784, 1)) == (1, 4)
    assert holds.state_in_tokens == 3 * 784


def test_the_null_block_counts_for_the_log_and_not_for_admission() -> None:
    holds = PRESETS["qwen3.5-27b"].capacity(20 * 10**9, 262_144)
    assert holds.admitted_ids == holds.ids - 1
    assert holds.live_requests(262_144) == 388 // 341


def test_context_parallel_ranks_widen_the_scheduler_s_block_and_stages_share_the_layers() -> None:
    """Public: a page of 1,536 tokens over 8 ranks is one of 12,288."""
    from dataclasses import replace

    model = replace(PRESETS["kimi-k3-tp8"], context_ranks=8)
    assert (model.block_size(), model.scheduler_block) == (1536, 12_288)
    halved = replace(PRESETS["qwen3-next"], stages=2)
    assert 2 * halved.model_state_bytes == PRESETS["qwen3-next"].model_state_bytes


@pytest.mark.parametrize(
    ("strategy", "options", "slots"),
    [
        ("none", {}, 1),
        ("no_buffer", {}, 3),
        ("extra_buffer", {}, 5),
        ("extra_buffer", {"lock": False}, 4),
        ("extra_buffer", {"overlap": False}, 4),
        ("extra_buffer", {"overlap": False, "lock": False}, 3),
    ],
)
def test_a_running_request_takes_the_slots_of_its_strategy(
    strategy: str, options: dict[str, bool], slots: int
) -> None:
    assert slots_per_request(strategy, **options) == slots


def test_a_balanced_split_serves_as_many_states_as_lengths() -> None:
    sizes = {"slots": 5, "drafts": 2, "state_bytes": 1000, "tokens": 7000, "token_bytes": 3}
    states, attention = balanced_split(10**9, **sizes)
    assert states + attention == 10**9
    assert states / (7 * 1000) == pytest.approx(attention / (7000 * 3), rel=1e-6)


def test_host_checkpoints_of_a_public_case_take_18_7_gib() -> None:
    """llama.cpp: 149.6 MiB x 32 checkpoints x 4 slots."""
    state = 48 * (3 * 2**20 + 120 * 2**10)
    assert round(state / 2**20, 1) == 149.6
    assert round(host_checkpoint_bytes(state, checkpoints=32, slots=4) / 2**30, 1) == 18.7
    # The same from the model's shape: window and state in fp32, on one device.
    assert 48 * PRESETS["qwen3.5-27b"].recurrent.state_bytes(1, 0, "fp32", "fp32") == state


def test_a_host_tier_takes_its_size_twice() -> None:
    assert sum(host_tier_bytes(10**9)) == 2 * 10**9


def test_a_connector_s_chunk_is_a_multiple_of_every_block() -> None:
    """Public: at 544, chunks of 256, 512 and 1,024 are refused and 544 and 1,088 taken."""
    assert smallest_chunk([544]) == 544
    assert smallest_chunk([544], least=545) == 1088
    assert smallest_chunk([16, 48]) == 288
    assert smallest_chunk([256]) == 256


def test_no_preset_of_the_public_table_is_of_unknown_size() -> None:
    layers = {
        "qwen3.5-0.8b": (18, 6), "qwen3.5-4b": (24, 8), "qwen3.5-9b": (24, 8),
        "qwen3.5-27b": (48, 16), "qwen3.5-35b-a3b": (30, 10), "qwen3.5-397b-a17b-tp2": (45, 15),
        "qwen3-next": (36, 12), "nemotron-3-nano": (23, 6), "nemotron-3-super": (40, 8),
        "granite-4-h-small": (36, 4), "kimi-linear-48b": (20, 7), "kimi-k3": (69, 24),
    }  # fmt: skip
    for name, counts in layers.items():
        model = PRESETS[name]
        assert (model.recurrent_layers, model.attention_layers) == counts, name
        assert "layer counts published" in model.source


# ---- the command -------------------------------------------------------------------------------


def test_size_prints_what_a_pool_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "qwen3.5-27b", "--pool", "20GB", "--seqs", "256"]) == 0
    said = capsys.readouterr().out
    for line in (
        "51,380,224  bytes of a block id",
        "389  block ids, one of them the null block",
        "341  ids of a live request of 262,144 tokens",
        "299,044  GPU KV cache size in tokens",
        "Requests will wait for ids, not for bytes: 256 of the shortest take 1,792 ids",
    ):
        assert line in said
    assert main(["size", "qwen3.5-27b", "--pool", "20GB", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["capacity"]["logged_tokens"] == 299_044


def test_size_puts_several_models_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "qwen3-next", "kimi-k3"]) == 0
    said = capsys.readouterr().out
    assert "77,266,944       449,372,160  bytes of a checkpoint of all recurrent layers" in said


def test_size_takes_layer_counts_where_a_model_has_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["size", "falcon-h1-7b"]) == 0
    assert "Try --layers RECURRENT,ATTENTION." in capsys.readouterr().out
    assert main(["size", "falcon-h1-7b", "--pool", "20GB"]) == 2
    assert "Try --layers R,A" in capsys.readouterr().err
    assert main(["size", "falcon-h1-7b", "--layers", "44,44", "--pool", "20GB"]) == 0
    assert "block ids" in capsys.readouterr().out
    assert main(["size", "falcon-h1-7b", "--layers", "44"]) == 2
    assert "Try --layers 36,12" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["qwen3-next", "--pool", "20"], "Try --pool 20GB"),
        (["qwen3-next", "--pool", "1KB"], "one block id takes 25,952,256 bytes"),
        (["qwen3-next", "--pool", "20GB", "--max-len", "none"], "--max-len is 'none'"),
        (["qwen3-next", "--kv-dtype", "fp5"], "kv_dtype is 'fp5'"),
        (["kimi-k3", "--kv-dtype", "int8_per_token_head"], "latent attention caches no heads"),
        (["qwen3-nxt"], "Try the preset 'qwen3-next'"),
    ],
)
def test_size_says_what_is_wrong(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_an_impossible_pool_is_refused() -> None:
    with pytest.raises(CheckpointError, match="expected room for at least one"):
        PRESETS["qwen3-next"].capacity(1000, 262_144)
    with pytest.raises(CheckpointError, match="leaves no block"):
        PRESETS["qwen3-next"].capacity(10**10, 262_144).cached_requests(100, 0)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--pool", "20GB"], "--pool is given and no model"),
        (["qwen3-next", "--seqs", "4"], "--seqs is given without --pool"),
        (["qwen3-next", "--lengths", "4"], "--lengths is given without --pool"),
        (["qwen3.5-27b", "--pp", "100"], "stages is 100 and recurrent_layers of qwen3.5-27b is 48"),
        (["qwen3-next", "--layers", "36"], "Try --layers 36,12"),
        (["qwen3-next", "--layers", "a,b"], "Try --layers 36,12"),
    ],
)
def test_options_that_would_not_be_heeded_are_refused(
    words: list[str], sentence: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["size", *words]) == 2
    assert sentence in capsys.readouterr().err


def test_a_conversation_above_the_longest_request_is_not_counted(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--pool", "20GB", "--max-len", "16000", "--lengths", "8000,32000"]
    assert main(["size", "qwen3.5-27b", *options]) == 0
    assert "above --max-len" in capsys.readouterr().out


def test_a_preset_says_why_its_config_gives_another_block(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """1,056 with an fp32 state; 544 with the engine's default for its config.json."""
    assert main(["size", "qwen3-next"]) == 0
    assert "the engine's default is bf16" in capsys.readouterr().out
