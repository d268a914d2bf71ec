"""Scans that leave a state inside: held to a token-by-token twin, to the models, to an engine."""

import pytest
import torch

from mambackpt import CheckpointValueError
from mambackpt.resume import (
    ARCHITECTURES,
    DeltaInputs,
    SsdInputs,
    delta_by_token,
    delta_scan,
    even_ends,
    load_model,
    random_prompt,
    ssd_by_token,
    ssd_chunks,
    ssd_scan,
    state_rows,
    take_states,
)
from mambackpt.resume.emit import emitted

WITH_MEMORY = [name for name, one in ARCHITECTURES.items() if one.scan]
DELTA = [name for name in WITH_MEMORY if "Mamba" not in ARCHITECTURES[name].layer]


def random_delta(tokens: int, channels: int, dtype: torch.dtype = torch.float64) -> DeltaInputs:
    """Two heads of three value and four key channels; one gate a head, or one a channel."""
    rand = torch.Generator().manual_seed(tokens)
    q, k, v = (torch.randn(tokens, 2, n, generator=rand, dtype=dtype) for n in (4, 4, 3))
    gate = -torch.rand(tokens, 2, channels, generator=rand, dtype=dtype)
    beta = torch.rand(tokens, 2, generator=rand, dtype=dtype)
    return DeltaInputs(q, k / k.norm(dim=-1, keepdim=True), v, gate, beta)


def random_ssd(tokens: int, dtype: torch.dtype = torch.float64) -> SsdInputs:
    rand = torch.Generator().manual_seed(tokens)
    x, B, C = (torch.randn(tokens, 2, n, generator=rand, dtype=dtype) for n in (3, 4, 4))
    dt, D = (torch.rand(*size, generator=rand, dtype=dtype) for size in ((tokens, 2), (2,)))
    return SsdInputs(x, dt, -torch.ones(2, dtype=dtype), B, C, D)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65])
@pytest.mark.parametrize("channels", [1, 4], ids=["one gate a head", "one gate a channel"])
def test_a_chunked_delta_rule_is_the_one_that_takes_a_token_at_a_time(
    tokens: int, channels: int
) -> None:
    inputs = random_delta(tokens, channels)
    initial = torch.randn(2, 3, 4, dtype=torch.float64)
    ends = even_ends(tokens, 16)
    chunked, plain = delta_scan(inputs, ends, initial), delta_by_token(inputs, initial)
    torch.testing.assert_close(chunked.outputs, plain.outputs, rtol=1e-9, atol=1e-9)
    for end in ends:
        torch.testing.assert_close(chunked.at(end), plain.at(end), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tokens", [1, 2, 15, 16, 17, 63, 64, 65])
def test_a_chunked_mamba_2_is_the_one_that_takes_a_token_at_a_time(tokens: int) -> None:
    inputs, initial = random_ssd(tokens), torch.randn(2, 3, 4, dtype=torch.float64)
    ends = even_ends(tokens, 16)
    chunked, plain = ssd_scan(inputs, ends, initial), ssd_by_token(inputs, initial)
    torch.testing.assert_close(chunked.outputs, plain.outputs, rtol=1e-9, atol=1e-9)
    for end in ends:
        torch.testing.assert_close(chunked.at(end), plain.at(end), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_the_state_inside_one_forward_is_the_one_that_the_model_ends_with(name: str) -> None:
    """At an aligned offset, from what the model's own scan was given, in float32 and float64."""
    model, prompt, cut = load_model(name), random_prompt(100), 64
    run, short = model.run(prompt), model.run(prompt[:cut])
    inputs_of, scan = (DeltaInputs, delta_scan) if name in DELTA else (SsdInputs, ssd_scan)
    for call, state in zip(run.scans, take_states(model.architecture, short.cache), strict=True):
        for dtype in (torch.float32, torch.float64):
            inputs = inputs_of.from_call(call, dtype)
            inside = scan(inputs, [32, cut, 100]).at(cut)  # type: ignore[operator]
            assert inside.dtype is dtype
            torch.testing.assert_close(inside.float(), state.memory, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_the_outputs_of_a_scan_are_the_model_s(name: str) -> None:
    """The same function, not only the same state: held to what the model's own scan returns."""
    from importlib import import_module

    model = load_model(name)
    run = model.run(random_prompt(100))
    own = getattr(import_module(type(model.module).__module__), str(model.architecture.scan))
    inputs_of, scan = (DeltaInputs, delta_scan) if name in DELTA else (SsdInputs, ssd_scan)
    for call in run.scans:
        flat = {**call, **call.get("kwargs", {})}
        flat.pop("kwargs", None)
        outputs, _ = own(**flat)
        ours = scan(inputs_of.from_call(call), even_ends(100, 64)).outputs  # type: ignore[operator]
        torch.testing.assert_close(ours, outputs[0], rtol=1e-3, atol=1e-5)


def test_a_state_is_refused_where_no_chunk_ends() -> None:
    with pytest.raises(CheckpointValueError, match="position is 15; expected the end of a chunk"):
        delta_scan(random_delta(32, 1), [16, 32]).at(15)


# ---- where an engine's kernels leave their states -----------------------------------------------

CHUNKS = [  # chunk, computed, query starts, offsets: ends, each row's last chunk, its checkpoint's
    (256, [0, 300], [0, 700, 1000], None, [256, 512, 700, 912, 1000], [2, 4], [-1, -1]),
    (256, [0], [0, 700], [100], [100, 256, 512, 700], [3], [0]),
    (256, [300], [0, 500], [212], [212, 468, 500], [2], [0]),
    (256, [0, 0], [0, 900, 1000], [768, 0], [256, 512, 768, 900, 1000], [3, 4], [2, -1]),
    (32, [0], [0, 128], [48], [32, 48, 64, 96, 128], [4], [1]),
    (
        *(256, [6288], [0, 2000], [1056]),
        *([112, 368, 624, 880, 1056, 1136, 1392, 1648, 1904, 2000], [9], [4]),
    ),
    (256, [100], [0, 300], [28], [28, 156, 300], [2], [0]),
]


@pytest.mark.parametrize(("chunk", "done", "starts", "offsets", "ends", "last", "kept"), CHUNKS)
def test_mamba_2_chunks_split_exactly_on_a_checkpoint(
    chunk: int,
    done: list[int],
    starts: list[int],
    offsets: list[int] | None,
    ends: list[int],
    last: list[int],
    kept: list[int],
) -> None:
    """Checked numbers of vllm 0.33.0: chunks lie on the sequence's own grid."""
    chunks = ssd_chunks(chunk, done, starts, offsets)
    assert chunks.cu_chunk == [0, *ends]
    assert (chunks.last_chunk, chunks.checkpoint_chunk) == (last, kept)


@pytest.mark.parametrize(("chunk", "count", "kept"), [(128, 64, 49), (256, 33, 24)])
def test_8000_tokens_are_cut_at_6288(chunk: int, count: int, kept: int) -> None:
    chunks = ssd_chunks(chunk, [0], [0, 8000], [6288])
    assert (len(chunks.seq_idx), chunks.checkpoint_chunk) == (count, [kept])
    assert chunks.cu_chunk[kept + 1] == 6288


ROWS = [  # offsets of all rows, lengths of the prefill rows: stride, starts, rows
    ([0, 128, 0, 192], [200, 50, 300], 64, [0, 3, 3, 7], [0, 1, 0, 5]),
    ([7488], [8000], 7488, [0, 1], [0]),
    ([7488, 1152], [8000, 1300], 576, [0, 13, 15], [12, 14]),
    ([64, 0, 576], [100, 30, 700], 64, [0, 1, 1, 11], [0, 0, 9]),
]


@pytest.mark.parametrize(("offsets", "lengths", "every", "starts", "rows"), ROWS)
def test_one_stride_serves_a_whole_batch(
    offsets: list[int], lengths: list[int], every: int, starts: list[int], rows: list[int]
) -> None:
    """Checked numbers of vllm 0.33.0; in the first, a decode row leads."""
    plan = state_rows(offsets, lengths)
    assert (plan.every, plan.starts, plan.rows) == (every, starts, rows)


@pytest.mark.parametrize("offsets", [[0, 0], [64]])
def test_a_batch_without_a_checkpoint_or_with_a_row_too_many_is_refused(offsets: list[int]) -> None:
    with pytest.raises(CheckpointValueError, match="2 prefill rows; expected an offset per row"):
        state_rows(offsets, [100, 100])


@pytest.mark.parametrize("name", WITH_MEMORY)
def test_an_emitted_row_is_the_state_after_its_checkpoint(name: str) -> None:
    """One row per checkpoint, per stride or per chunk: the row that is named holds that state."""
    model, lengths, offsets = load_model(name), (100, 200), [64, 128]
    prompts = [random_prompt(length, length) for length in lengths]
    layer, grid = model.architecture.layer, 64
    scans = [model.run(prompt).scans for prompt in prompts]
    found = emitted(layer, scans, offsets=offsets, grid=grid)
    counts = {"KDA": 2, "gated delta rule": 1 + 3}.get(layer, 2 + 4)
    assert {len(states) for states, _ in found} == {counts}
    for request, (prompt, offset) in enumerate(zip(prompts, offsets, strict=True)):
        cache = model.run(prompt[:offset]).cache
        for (states, rows), truth in zip(
            found, take_states(model.architecture, cache), strict=True
        ):
            row = request if rows is None else int(rows[request])
            torch.testing.assert_close(states[row], truth.memory, rtol=1e-3, atol=1e-6)
