"""Boot logs: lines of several releases, the settings behind them, and what cannot be right."""

import io
import json
from pathlib import Path

import pytest

from mambackpt import CheckpointValueError
from mambackpt.__main__ import main
from mambackpt.models.boot_log import BootLog, read_boot_log
from mambackpt.models.presets import PRESETS

BLOCK = (
    "Setting attention block size to {} tokens to ensure that attention page size is >= mamba page "
    "size."
)
PADDING = (
    "Padding mamba page size by {}% to ensure that mamba page size and attention page size are "
    "exactly equal."
)
SIZE = "GPU KV cache size: 299,044 tokens"
MOST = "Maximum concurrency for 262,144 tokens per request: 1.14x"
MODEL_27B = PRESETS["qwen3.5-27b"]


def log_of(*lines: str, **options: object) -> BootLog:
    return read_boot_log("\n".join(lines), **options)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("block", "padding", "drafts", "cache", "token_bytes"),
    [
        (448, "3.23", 7, "bf16", 4_096),
        (480, "1.27", 15, "bf16", 4_096),
        (832, "0.48", 3, "fp8", 2_048),
        (864, "1.09", 7, "int8_per_token_head", 2_080),
        (784, "0.13", 0, "bf16", 4_096),
    ],
)
def test_block_and_padding_of_a_public_log_tell_dtypes_and_drafts(
    block: int, padding: str, drafts: int, cache: str, token_bytes: int
) -> None:
    """Public lines of one 27B model; the window in bf16, as engines have it."""
    log = log_of(BLOCK.format(block), PADDING.format(padding), models=[MODEL_27B])
    [first, *others] = log.settings
    assert (first.spec, first.kv_dtype, first.ranks) == (drafts, cache, 1)
    assert first.token_bytes == token_bytes
    for served in (first, *others):
        assert served.block_size() == block
        assert f"{served.padding_percent():.2f}" == padding


def test_every_preset_is_found_again_from_its_own_two_lines() -> None:
    for name, model in PRESETS.items():
        if model.recurrent_dtype == "fp16":
            continue  # the same bytes as bf16, which is what is named
        lines = BLOCK.format(model.block_size()), PADDING.format(f"{model.padding_percent():.2f}")
        sizes = {(m.state_bytes, m.token_bytes) for m in log_of(*lines, models=[model]).settings}
        assert (model.state_bytes, model.token_bytes) in sizes, name


def test_prefixes_colours_and_several_workers_do_not_matter() -> None:
    log = log_of(
        f"\x1b[0;36m(EngineCore pid=7)\x1b[0;0m INFO 11-30 [a.py:9] {BLOCK.format('1,056')}",
        f"2026-11-30T12:00:01Z stdout F {PADDING.format('0.76')}",
        "(Worker_TP0 pid=8) INFO Available KV cache memory: 20.50 GiB",
        "(Worker_TP1 pid=9) INFO Available KV cache memory: 20.25 GiB",
        "INFO kv cache group sizes (12, 12, 12, 12), kv lcm block sizes 1056",
    )
    assert (log.block, log.padding, log.pool_bytes) == (1056, 0.76, int(20.25 * 2**30))
    assert (log.groups, log.scheduler_block) == ((12, 12, 12, 12), 1056)


@pytest.mark.parametrize(
    "lines",
    [[f"{SIZE}, {MOST}"], [SIZE, MOST], [f"{SIZE}, {MOST.replace('4x', '4 x')}"]],
    ids=["one line", "two lines", "a space"],
)
def test_both_wordings_of_the_cache_s_size_are_read(lines: list[str]) -> None:
    log = log_of(*lines)
    assert (log.cache_tokens, log.max_len, log.concurrency) == (299_044, 262_144, 1.14)
    assert log.contradictions == []


def test_the_two_figures_of_an_older_release_do_not_multiply() -> None:
    """Public: 290,864 tokens beside 33.04x for 32,768, which are 1,082,655."""
    log = log_of(
        "GPU KV cache size: 290,864 tokens",
        "Maximum concurrency for 32,768 tokens per request: 33.04x",
    )
    [sentence] = log.contradictions
    assert "290,864 tokens and 33.04 x 32,768 = 1,082,655" in sentence
    assert "Believe the concurrency" in sentence


def test_the_logged_concurrency_tells_settings_apart_that_share_a_block() -> None:
    model = PRESETS["qwen3.5-27b"]
    holds = model.capacity(round(20.0 * 2**30), 32_768)
    log = log_of(
        BLOCK.format(model.block_size()),
        PADDING.format(f"{model.padding_percent():.2f}"),
        "Available KV cache memory: 20.00 GiB",
        f"Maximum concurrency for 32,768 tokens per request: {holds.concurrency:.2f}x",
    )
    assert log.settings[0].name == "qwen3.5-27b"
    assert log.capacity == holds


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (
            [BLOCK.format(8320), "Maximum concurrency for 4,096 tokens per request: 9.00x"],
            "A block has 8,320 tokens and the longest request 4,096: no prompt can ever hit",
        ),
        (
            [BLOCK.format(784), "hash_block_size=784"],
            "no prompt of up to 784 tokens can hit",
        ),
        (
            ["num_prefill_checkpoint_blocks=1", "prefill_checkpoint_alignment=None"],
            "reserved (1 for each request and group) and no layer can export",
        ),
        (
            [BLOCK.format(784), PADDING.format("0.13"), "Available KV cache memory: 18.63 GiB",
             "max_num_seqs=256, max_model_len=262144"],
            "requests will wait for ids, not for bytes",
        ),
        (
            [BLOCK.format(784), "kv lcm block sizes 528"],
            "no multiple of the block",
        ),
        (
            [BLOCK.format(784), BLOCK.format(528)],
            "blocks of 528 and 784 tokens: these are lines of several starts, and the last, of 528",
        ),
        (
            [BLOCK.format(784), "Available KV cache memory: -1.20 GiB"],
            "-1.20 GiB are left for the cache",
        ),
        (
            ["Maximum concurrency for 262,144 tokens per request: 0.80x",
             "GPU KV cache size: 209,715 tokens"],
            "Not one request of 262,144 tokens fits",
        ),
    ],
    ids=["block too long", "hash unit", "no export", "ids", "two engines", "two starts",
         "no memory", "nothing fits"],
)  # fmt: skip
def test_what_cannot_be_right_is_said_with_its_numbers(lines: list[str], sentence: str) -> None:
    assert any(sentence in said for said in log_of(*lines).contradictions)


def test_a_log_without_a_known_line_is_refused_with_one_to_look_for() -> None:
    with pytest.raises(CheckpointValueError, match="Setting attention block size to 784 tokens"):
        read_boot_log("hello\nworld")


@pytest.mark.parametrize(
    "line",
    [
        "GPU KV cache size: , tokens", "Padding mamba page size by ..%", "kv cache group sizes\n77",
        "max_num_seqs=256, model='org/name'", "",
    ],
)  # fmt: skip
def test_a_line_without_its_number_is_no_line(line: str) -> None:
    with pytest.raises(CheckpointValueError, match="no line of the log is known"):
        read_boot_log(line)


@pytest.mark.parametrize(
    ("name", "block", "padding"),
    [("qwen3.5-0.8b", 576, "8.68"), ("qwen3.5-4b", 576, "9.92"), ("qwen3.5-35b-a3b", 1088, "3.82")],
)
def test_a_block_that_the_layers_grid_made_longer_is_solved_for(
    name: str, block: int, padding: str
) -> None:
    """Published: 544 and 528 tokens become 576 where kernels ask for multiples of 64."""
    log = log_of(BLOCK.format(block), PADDING.format(padding), models=[PRESETS[name]])
    first = log.settings[0]
    assert (first.checkpoint_alignment, first.spec, first.ranks) == (64, 0, 1)


def test_what_other_lines_name_comes_first() -> None:
    lines = [BLOCK.format(528), PADDING.format("0.76")]
    assert log_of(*lines).settings[0].name == "qwen3.5-4b"
    log = log_of(*lines, "model='Qwen/Qwen3-Next-80B-A3B-Instruct', tensor_parallel_size=4")
    assert (log.settings[0].name, log.settings[0].ranks) == ("qwen3-next", 4)
    drafting = log_of(BLOCK.format(832), PADDING.format("0.48"), "'num_speculative_tokens': 9",
                      models=[MODEL_27B])  # fmt: skip
    assert [setting.spec for setting in drafting.settings][:2] == [9, 9]


def test_every_preset_may_be_the_model_that_its_own_name_names() -> None:
    for name, model in PRESETS.items():
        assert read_boot_log(f"{BLOCK.format(16)}\nmodel='org/{name.upper()}'").names(model)


def test_the_logged_tokens_tell_the_ids_that_rounded_memory_does_not() -> None:
    """Also where the memory is not logged at all."""
    lines = [BLOCK.format(784), PADDING.format("0.13"), SIZE, MOST]
    exact = MODEL_27B.capacity(20 * 10**9, 262_144)
    for memory in ([], ["Available KV cache memory: 18.61 GiB"]):  # 18.61 alone would give 388
        assert log_of(*lines, *memory, models=[MODEL_27B]).capacity == exact
    far = log_of(*lines, "Available KV cache memory: 37.25 GiB", models=[MODEL_27B])
    assert far.capacity == MODEL_27B.capacity(far.pool_bytes or 0, 262_144)


def test_a_log_of_two_byte_letters_is_read() -> None:
    text = BLOCK.format(784).encode("utf-16").decode("utf-8", errors="replace")
    assert read_boot_log(text).block == 784


# ---- the command -------------------------------------------------------------------------------


def test_the_log_command_says_what_follows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [
        BLOCK.format(784), PADDING.format("0.13"), "Available KV cache memory: 18.63 GiB",
        f"{SIZE}, {MOST}",
    ]  # fmt: skip
    path = tmp_path / "boot.log"
    path.write_text("\n".join(lines))
    assert main(["log", str(path)]) == 0
    said = capsys.readouterr().out
    assert "qwen3.5-27b" in said
    assert "785 tokens are the shortest prompt that can hit" in said
    assert "389 block ids of 51,380,224 bytes" in said
    assert "python -m mambackpt size qwen3.5-27b --pool 18.63GiB --max-len 262144" in said
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["log", "-", "--json", "--chats", "100"]) == 1
    printed = json.loads(capsys.readouterr().out)
    assert printed["settings"][0]["name"] == "qwen3.5-27b"
    assert "Of 100 conversations of 8,000 tokens 29 stay cached" in printed["contradictions"][-1]
    assert printed["capacity"]["ids"] == 389


@pytest.mark.parametrize("name", ["no-such.log", "."])
def test_a_log_that_cannot_be_read_is_refused(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["log", name]) == 2
    assert "expected a boot log" in capsys.readouterr().err


def test_a_block_that_nothing_gives_is_said_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "boot.log"
    path.write_text(BLOCK.format(7))
    assert main(["log", str(path)]) == 0
    assert "No known model, dtype, draft tokens and ranks give 7 tokens" in capsys.readouterr().out


def test_where_log_and_layers_disagree_the_command_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "boot.log"
    path.write_text(
        f"{BLOCK.format(784)}\n{PADDING.format('0.13')}\nAvailable KV cache memory: 40.00 GiB\n"
        f"{MOST}\nmodel='org/other'"
    )
    assert main(["log", str(path), "--model", "qwen3.5-27b"]) == 0
    said = capsys.readouterr().out
    assert "But the log says 1.14 and these layers make 2.45" in said
    assert "None of them is org/other. Try --model with its config.json." in said


def test_chats_are_counted_in_tokens_where_the_model_is_not_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "boot.log"
    path.write_text("Maximum concurrency for 32,768 tokens per request: 33.04x")
    assert main(["log", str(path), "--chats", "100"]) == 0
    assert main(["log", str(path), "--chats", "500"]) == 1
    assert "are 4,000,000 tokens, and 33.04 x 32,768 = 1,082,655 fit" in capsys.readouterr().out
