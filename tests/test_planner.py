"""Where a checkpoint lands: the released engine's answers, reported faults, and the three forms."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mambackpt import (
    CacheGeometry,
    CheckpointError,
    CheckpointTypeError,
    CheckpointValueError,
    Reason,
    compute_mamba_prefill_checkpoints,
    explain,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)
from mambackpt.planner import get_mamba_prefill_checkpoint_reason

VECTORS = json.loads((Path(__file__).parent / "data/planner_vectors.json").read_text())
KINDS = {
    "list": list,
    "tuple": tuple,
    "numpy": np.array,
    "unsigned": lambda rows: np.array(rows, np.uint32),
    "torch": torch.tensor,
}


def plan(seq_len: int, query_len: int | None = None, **sizes: object) -> tuple[int, int]:
    """One row's (offset, column); M, H, U and A by their letters, the whole prompt by default."""
    query_len = seq_len if query_len is None else query_len
    offsets, columns = compute_mamba_prefill_checkpoints(
        [seq_len], [query_len], **engine_names(**sizes)
    )
    return offsets[0], columns[0]


def engine_names(
    *, M: int, H: int, A: int | None, U: int | None = None, drop: bool = False, lookahead: int = 0
) -> dict[str, object]:
    return {
        "hash_block_size": H,
        "mamba_block_size": M,
        "checkpoint_alignment": A,
        "drop_eagle_block": drop,
        "cache_hit_alignment_tokens": H if U is None else U,
        "num_hash_lookahead_tokens": lookahead,
    }


def position(seq_len: int, U: int, *, drop: bool, formula: str = "current") -> int:
    [decision] = explain([seq_len], [seq_len], CacheGeometry(U, U, 1, U, drop), formula=formula)
    return decision.position


# ---- the released engine -----------------------------------------------------------------------


def test_the_released_engine_gives_the_same_answer_on_every_recorded_batch() -> None:
    names = VECTORS["columns"]
    assert len(VECTORS["cases"]) == 400
    for case in VECTORS["cases"]:
        given_ = dict(zip(names, case, strict=True))
        want = (given_.pop("offsets"), given_.pop("cols"))
        rows = given_["seq_lens"], given_["query_lens"]
        assert compute_mamba_prefill_checkpoints(**given_) == want
        decisions = explain(*rows, CacheGeometry(**{n: given_[n] for n in names[:6]}))
        assert ([d.offset for d in decisions], [d.column for d in decisions]) == want


@pytest.mark.shared
def test_the_copied_vectors_are_the_shared_ones(shared: Path) -> None:
    theirs = json.loads((shared / "spec/planner_vectors.json").read_text())["cases"]
    for case, ours in zip(theirs, VECTORS["cases"], strict=True):
        flat = case["in"] | {"offsets": case["offsets"], "cols": case["cols"]}
        flat.setdefault("num_hash_lookahead_tokens", 0)
        assert flat == dict(zip(VECTORS["columns"], ours, strict=True))


# ---- loop == vectorised == explain -------------------------------------------------------------

units = st.sampled_from([1, 2, 3, 4, 8, 16, 24, 64])
multiples = st.integers(1, 8)


@st.composite
def batches(draw: st.DrawFn) -> tuple[list[int], list[int], CacheGeometry]:
    H = draw(units)
    M, U = H * draw(multiples), H * draw(multiples)
    geometry = CacheGeometry(
        H, M, draw(st.none() | st.integers(1, 32)), U, draw(st.booleans()), draw(st.integers(0, 3))
    )
    near = st.integers(0, 12).flatmap(lambda n: st.integers(max(0, n * M - 2), n * M + 2))
    length = st.integers(0, 12 * M) | near | st.integers(0, 2**62)
    rows = draw(st.lists(st.tuples(length, length, st.booleans()), max_size=6))
    seq_lens = [max(a, b) for a, b, _ in rows]
    starts = [min(a, b) // H * H if on_grid else min(a, b) for a, b, on_grid in rows]
    return seq_lens, [s - start for s, start in zip(seq_lens, starts, strict=True)], geometry


@settings(max_examples=2000)
@given(batches())
def test_loop_vectorised_and_explained_answers_are_one(
    batch: tuple[list[int], list[int], CacheGeometry],
) -> None:
    seq_lens, query_lens, g = batch
    sizes = engine_names(M=g.M, H=g.H, A=g.A, U=g.U, drop=g.drop_eagle_block)
    sizes["num_hash_lookahead_tokens"] = g.num_hash_lookahead_tokens
    looped = compute_mamba_prefill_checkpoints(seq_lens, query_lens, **sizes)
    copies = 128  # enough rows for the vectorised form
    many = [np.array(rows * copies, np.int64) for rows in (seq_lens, query_lens)]
    offsets, columns = compute_mamba_prefill_checkpoints(*many, **sizes)
    assert (offsets.tolist(), columns.tolist()) == (looped[0] * copies, looped[1] * copies)
    decisions = explain(seq_lens, query_lens, g)
    assert ([d.offset for d in decisions], [d.column for d in decisions]) == looped


@given(batches())
def test_an_accepted_position_is_reusable_and_reachable(
    batch: tuple[list[int], list[int], CacheGeometry],
) -> None:
    seq_lens, query_lens, g = batch
    for seq_len, query_len, decision in zip(
        seq_lens, query_lens, explain(seq_lens, query_lens, g), strict=True
    ):
        assert decision.position % g.U == 0
        assert decision.position < seq_len or decision.position == 0
        assert decision.reason is not Reason.NOT_INSIDE_QUERY  # implied by the rule's position
        if decision.reason is Reason.ACCEPTED:
            start = seq_len - query_len
            assert start < decision.position < seq_len
            assert decision.offset == decision.position - start
            assert decision.column == decision.candidate_column >= 0


@pytest.mark.parametrize("copies", [1, 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_rows_gives_the_same_answer(kind: str, copies: int) -> None:
    seq_lens, query_lens = [8000, 1500, 9000] * copies, [8000, 1500, 1] * copies
    sizes = engine_names(M=1536, H=1536, A=16)
    answer = compute_mamba_prefill_checkpoints(
        KINDS[kind](seq_lens), KINDS[kind](query_lens), **sizes
    )
    if kind in ("list", "tuple"):
        assert answer == ([7680, 0, 0] * copies, [4, -1, -1] * copies)
        assert {type(n) for n in answer[0] + answer[1]} == {int}
    else:
        assert [a.dtype for a in answer] == [np.int64, np.int64]
        assert [a.tolist() for a in answer] == [[7680, 0, 0] * copies, [4, -1, -1] * copies]


def test_large_lists_of_mostly_decode_rows_are_planned_like_small_ones() -> None:
    seq_lens, query_lens = [8000] + [9000] * 200, [8000] + [1] * 200
    answer = compute_mamba_prefill_checkpoints(
        seq_lens, query_lens, **engine_names(M=1536, H=1536, A=16)
    )
    assert answer == ([7680] + [0] * 200, [4] + [-1] * 200)


def test_no_rows_have_no_checkpoints() -> None:
    sizes = engine_names(M=64, H=16, A=16)
    assert compute_mamba_prefill_checkpoints([], [], **sizes) == ([], [])
    assert explain([], [], CacheGeometry(16, 64, 16, 16)) == []
    assert [
        len(a) for a in compute_mamba_prefill_checkpoints(*[np.zeros(0, int)] * 2, **sizes)
    ] == [
        0,
        0,
    ]


# ---- reported faults ---------------------------------------------------------------------------


def test_a_checkpoint_the_kernel_cannot_write_is_declined() -> None:
    """P01, vllm PR #53614 and #53212: scheduler and backend derived the answer differently."""
    small = {"M": 64, "H": 8, "U": 8, "A": 16}
    assert plan(100, **small, drop=True) == (0, -1)
    assert plan(100, **small, drop=False) == (96, 0)
    assert plan(100, **small | {"A": None}) == (0, -1)
    large = {"M": 4096, "H": 1024, "U": 1024, "drop": True}
    assert plan(8192, **large, A=64) == (7168, 0)
    assert plan(8192, **large, A=2048) == (0, -1)
    assert plan(8192, **large, A=None) == (0, -1)
    assert position(8192, 1024, drop=True, formula="before-0.32") == 6144


@pytest.mark.parametrize(
    ("block", "seq_len", "want"),
    [
        (1536, 3071, (1536, 0)),
        (1536, 3072, (1536, 0)),
        (1536, 3073, (3072, 1)),
        (16, 16, (0, -1)),
        (16, 17, (16, 0)),
        (16, 31, (16, 0)),
        (16, 32, (16, 0)),
        (16, 33, (32, 1)),
        (16, 48, (32, 1)),
    ],
)
def test_a_prompt_that_ends_on_a_boundary_keeps_the_one_before(
    block: int, seq_len: int, want: tuple[int, int]
) -> None:
    """P02, vllm issue #50235: a repeat may reuse at most seq_len - 1 tokens."""
    assert plan(seq_len, M=block, H=block, A=16) == want


@pytest.mark.parametrize(
    ("seq_len", "U", "now", "before"),
    [
        (160, 16, 144, 128),
        (128, 32, 96, 64),
        (48, 4, 44, 40),
        (49, 4, 44, 44),
        (1600, 64, 1536, 1472),
        (1601, 64, 1536, 1536),
        (16000, 16, 15984, 15968),
        (12, 4, 8, 4),
        (14, 4, 8, 8),
        (100, 32, 64, 64),
        (8901, 2304, 4608, 4608),
    ],
)
def test_the_drop_costs_one_unit_on_the_hit_grid(
    seq_len: int, U: int, now: int, before: int
) -> None:
    """P03, vllm PR #57444 and #54713; S09, vllm PR #57128: two units at a boundary before."""
    assert get_mamba_prefill_checkpoint_position(seq_len, U, True) == now
    assert position(seq_len, U, drop=True) == now
    assert position(seq_len, U, drop=True, formula="before-0.32") == before


def test_an_identical_resend_resumes_a_unit_before_a_longer_sibling_at_an_exact_boundary() -> None:
    """P03, vllm PR #55036: a sibling resumes at 96, a resend is capped at 127 and gets 64."""
    sibling = get_mamba_prefill_checkpoint_position(128, 32, True)
    resend = get_mamba_prefill_checkpoint_position(127, 32, True)
    assert (sibling, resend) == (96, 64)


def test_the_drop_works_on_the_hit_grid_and_not_on_the_block_grid() -> None:
    """P03, vllm PR #57180."""
    assert plan(95, M=64, H=16, U=16, A=16, drop=True) == (64, 0)
    assert plan(95, M=64, H=16, U=64, A=16, drop=True) == (0, -1)
    for seq_len in (48, 49):  # 44 is off the kernel's grid of 16
        assert plan(seq_len, M=16, H=4, A=16, drop=True) == (0, -1)


def test_a_state_is_never_filed_under_a_coarser_key_than_its_own() -> None:
    """P04, sglang PR #34780: the kernel's grid is 64 and the hit grid 512."""
    assert plan(161152, M=64, H=64, A=64, U=512) == (160768, 2516)
    for U, kept in ((1536, 43008), (12288, 36864)):
        assert plan(44449, M=1536, H=1536, A=16, U=U)[0] == kept


def test_the_column_is_the_one_before_the_running_state() -> None:
    """P05, vllm PR #53614: a column is not position / block - 1."""
    assert plan(3602, M=1600, H=1600, A=16, drop=True) == (1600, 1)
    assert plan(12288, M=4096, H=1024, A=16) == (11264, 1)


@pytest.mark.parametrize("start", [331, 1599, 1601, 1984, 2531, 3011])
def test_a_resumed_query_that_starts_inside_a_block_is_declined(start: int) -> None:
    """P06, vllm PR #51113: 1984 fails by its column, the others start off the hash grid."""
    [decision] = explain([3602], [3602 - start], CacheGeometry(16, 1600, 16, 16))
    assert (decision.offset, decision.column) == (0, -1)
    taken = start == 1984
    assert decision.reason is (Reason.COLUMN_TAKEN if taken else Reason.START_OFF_HASH_GRID)


@pytest.mark.parametrize("start", [1, 1599, 1617])
@pytest.mark.parametrize("seq_len", [2002, 3602])
def test_external_tokens_off_the_hash_grid_are_declined(start: int, seq_len: int) -> None:
    """P06, vllm PR #51763."""
    assert plan(seq_len, seq_len - start, M=1600, H=16, A=16) == (0, -1)


def test_external_tokens_on_the_hash_grid_need_a_free_column() -> None:
    """P06, vllm PR #51763: from 368, 2002 tokens have no free column and 3602 have."""
    assert plan(2002, 2002 - 368, M=1600, H=16, A=16) == (0, -1)
    assert plan(3602, 3602 - 368, M=1600, H=16, A=16) == (3232, 1)


def test_a_query_keeps_one_checkpoint_only() -> None:
    """P10, b12x issue #340: 256 ... 3584 have no state."""
    assert plan(4096, M=256, H=256, A=16) == (3840, 14)


@pytest.mark.parametrize(
    ("seq_len", "block", "A", "want"),
    [
        (1159, 1152, 16, (1152, 0)),
        (8000, 1536, 16, (7680, 4)),
        (8000, 2096, 1, (6288, 2)),
        (8000, 2096, 16, (6288, 2)),
        (8000, 2096, 64, (0, -1)),
    ],
)
def test_a_short_tail_needs_no_second_forward(
    seq_len: int, block: int, A: int, want: tuple[int, int]
) -> None:
    """P12, vllm PR #56960 and #52789."""
    assert plan(seq_len, M=block, H=block, A=A) == want


def test_an_offset_shorter_than_the_convolution_is_valid_by_the_rule() -> None:
    """X02, vllm PR #56196: the exporter, not the planner, must complete or refuse it."""
    assert plan(3, M=2, H=2, A=1) == (2, 0)
    assert plan(7, 3, M=2, H=2, A=1) == (2, 2)


def test_a_lookup_may_reuse_all_but_the_last_token() -> None:
    """S07, LMCache PR #5249: 32 tokens reuse 16, 33 reuse 32."""
    assert [get_mamba_prefill_checkpoint_position(n, 16, False) for n in (32, 33)] == [16, 32]


def test_tokens_a_hash_looks_ahead_at_must_be_there() -> None:
    assert [get_mamba_prefill_checkpoint_position(n, 16, False, 2) for n in (33, 34)] == [16, 32]
    assert plan(33, M=16, H=16, A=1, lookahead=2) == (16, 1)


# ---- reasons -----------------------------------------------------------------------------------


def reason_of(seq_len: int, query_len: int, **changes: object) -> Reason:
    sizes: dict[str, object] = {"M": 64, "H": 16, "A": 16} | changes
    names = engine_names(**sizes)  # type: ignore[arg-type]
    [decision] = explain([seq_len], [query_len], CacheGeometry(**names))  # type: ignore[arg-type]
    return decision.reason


def test_the_first_failed_condition_is_the_reason() -> None:
    assert reason_of(200, 200) is Reason.ACCEPTED
    assert reason_of(200, 195, A=None) is Reason.CANNOT_EXPORT
    assert reason_of(200, 195) is Reason.START_OFF_HASH_GRID
    assert reason_of(200, 56) is Reason.COLUMN_TAKEN  # starts at 144, inside column 2
    assert reason_of(60, 60) is Reason.COLUMN_TAKEN  # ends in the first block
    assert reason_of(130, 130, U=192) is Reason.NO_BLOCK_GAINED
    assert reason_of(200, 200, A=128) is Reason.OFF_KERNEL_GRID


def test_the_order_of_the_reasons_is_the_engine_s() -> None:
    assert [r.name for r in sorted(Reason, key=lambda r: r.value)] == [
        "ACCEPTED",
        "CANNOT_EXPORT",
        "START_OFF_HASH_GRID",
        "COLUMN_TAKEN",
        "NO_BLOCK_GAINED",
        "NOT_INSIDE_QUERY",
        "OFF_KERNEL_GRID",
    ]


def test_a_position_at_the_query_s_end_is_outside_and_only_a_direct_call_can_ask() -> None:
    assert get_mamba_prefill_checkpoint_reason(0, 3, 3, 1, 2, 1) is Reason.NOT_INSIDE_QUERY
    assert not is_mamba_prefill_checkpoint_valid(0, 3, 3, 1, 2, 1)


def test_a_declined_row_still_says_where_the_rule_would_put_it() -> None:
    [decision] = explain([3602], [1618], CacheGeometry(16, 1600, 16, 16))
    assert (decision.position, decision.candidate_column) == (3600, 1)
    assert (decision.offset, decision.column) == (0, -1)
    assert decision.sentence == (
        "The query starts at 1,984, which is inside column 1, the column the checkpoint would "
        "overwrite."
    )


@given(batches())
def test_every_sentence_names_the_numbers_it_speaks_of(
    batch: tuple[list[int], list[int], CacheGeometry],
) -> None:
    seq_lens, query_lens, g = batch
    for seq_len, query_len, decision in zip(
        seq_lens, query_lens, explain(seq_lens, query_lens, g), strict=True
    ):
        start, said = seq_len - query_len, decision.sentence
        named = {
            Reason.ACCEPTED: [decision.position, decision.column],
            Reason.CANNOT_EXPORT: [],
            Reason.START_OFF_HASH_GRID: [start, g.H],
            Reason.COLUMN_TAKEN: [start if decision.candidate_column >= 0 else seq_len],
            Reason.NO_BLOCK_GAINED: [decision.position, start, g.H],
            Reason.OFF_KERNEL_GRID: [decision.position, decision.position - start, g.A],
        }[decision.reason]
        assert all(f"{number:,}" in said for number in named)
        assert said.endswith(".")
        if "inside column" in said and "overwrite" in said:
            assert start // g.M == decision.candidate_column


# ---- bad input ---------------------------------------------------------------------------------


@pytest.mark.parametrize("copies", [1, 5000])
@pytest.mark.parametrize("kind", ["list", "numpy", "torch"])
@pytest.mark.parametrize(("seq_len", "query_len"), [(10, -1), (10, 11), (-5, -5), (-5, 0)])
def test_a_query_outside_its_sequence_is_refused_with_its_row(
    kind: str, copies: int, seq_len: int, query_len: int
) -> None:
    rows = [[100] * copies + [seq_len], [100] * copies + [query_len]]
    with pytest.raises(
        CheckpointValueError,
        match=f"row {copies} has query_len {query_len} and seq_len {seq_len}",
    ):
        compute_mamba_prefill_checkpoints(*map(KINDS[kind], rows), **engine_names(M=64, H=16, A=16))
    with pytest.raises(CheckpointValueError, match=f"row {copies}"):
        explain(*rows, CacheGeometry(16, 64, 16, 16))


@pytest.mark.parametrize("copies", [1, 5000])
@pytest.mark.parametrize("kind", ["list", "numpy"])
def test_row_counts_that_disagree_are_refused(kind: str, copies: int) -> None:
    with pytest.raises(
        CheckpointValueError, match=f"{copies} rows and query_lens has {copies + 1}"
    ):
        compute_mamba_prefill_checkpoints(
            KINDS[kind]([100] * copies),
            KINDS[kind]([100] * (copies + 1)),
            **engine_names(M=64, H=16, A=16),
        )


@pytest.mark.parametrize(
    "rows",
    [
        np.array([1.0]),
        np.array([[1]]),
        np.array([True]),
        torch.tensor([1.0]),
        "8",
        {8: 1},
        8,
        [1.5] * 5000,
    ],
    ids=["float", "2-d", "bool", "float tensor", "text", "dict", "scalar", "list of floats"],
)
def test_rows_of_another_kind_are_refused(rows: object) -> None:
    with pytest.raises(CheckpointTypeError, match="seq_lens"):
        compute_mamba_prefill_checkpoints(rows, rows, **engine_names(M=64, H=16, A=16))  # type: ignore[call-overload]


def test_a_float_length_never_becomes_an_offset() -> None:
    with pytest.raises(CheckpointTypeError, match="seq_lens holds a value that is no row length"):
        compute_mamba_prefill_checkpoints([200.0], [200], **engine_names(M=64, H=16, A=16))


@pytest.mark.parametrize("value", [0, -1, 16.0])
@pytest.mark.parametrize(
    "name",
    [
        "hash_block_size",
        "mamba_block_size",
        "checkpoint_alignment",
        "cache_hit_alignment_tokens",
    ],
)
def test_the_engine_s_function_refuses_the_sizes_that_the_geometry_refuses(
    name: str, value: object
) -> None:
    with pytest.raises(CheckpointError, match=name):
        compute_mamba_prefill_checkpoints(
            [9], [9], **engine_names(M=64, H=16, A=16) | {name: value}
        )


def test_an_alignment_of_zero_is_an_error_and_not_off() -> None:
    for alignment in (0, -16):
        with pytest.raises(CheckpointValueError, match="checkpoint_alignment"):
            is_mamba_prefill_checkpoint_valid(0, 200, 192, 16, 64, alignment)


def test_lists_of_numpy_integers_give_plain_ints() -> None:
    rows = [np.int64(8000)]
    answer = compute_mamba_prefill_checkpoints(rows, rows, **engine_names(M=1536, H=1536, A=16))
    assert answer == ([7680], [4])
    assert {type(n) for n in answer[0] + answer[1]} == {int}


def test_an_unknown_formula_is_refused_with_the_known_ones() -> None:
    with pytest.raises(CheckpointValueError, match=r"expected one of current, before-0\.32"):
        explain([9], [9], CacheGeometry(16, 64, 16, 16), formula="0.31")


NAMES = ("hash_block", "mamba_block", "checkpoint_alignment", "cache_hit_alignment", "lookahead")


@pytest.mark.parametrize("boolean", [True, False, np.True_, np.False_])
@pytest.mark.parametrize("at", range(5), ids=NAMES)
@pytest.mark.parametrize("sizes", [(16, 64, 16, 16, 0), (1, 1, 1, 1, 1), (1, 1, 1, 1, 0)])
def test_a_boolean_is_no_size(at: int, boolean: object, sizes: tuple[object, ...]) -> None:
    """Also where it equals a size that was accepted before: True is no hash unit of 1."""

    def plan(H: object, M: object, A: object, U: object, lookahead: object) -> object:
        return compute_mamba_prefill_checkpoints([9], [9], H, M, A, False, U, lookahead)  # type: ignore[call-overload]

    plan(*sizes)
    with pytest.raises(CheckpointError, match=NAMES[at]):
        plan(*sizes[:at], boolean, *sizes[at + 1 :])
