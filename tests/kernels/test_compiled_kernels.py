"""The export kernels as compilers see them: nothing here needs a GPU, nothing is a timing.

Two child processes without the interpreter do all the compiling, once a session.
"""

import json
from itertools import product
from pathlib import Path

import pytest

from mambackpt.bench import Benchmark, command
from mambackpt.bench import compiled as ahead
from mambackpt.bench.compiled import DTYPES, LAYERS, TARGETS, Compilation, LayerShape, compile_ahead
from mambackpt.errors import CheckpointValueError

KIMI = LAYERS["kimi-k3"]
LARGE_LAYERS = [LAYERS[name] for name in ("kimi-k3", "nemotron-3-super")]
STATE = ("recurrent_checkpoint", "recurrent_state")
BY_TARGET = pytest.mark.parametrize("target", TARGETS)


@pytest.fixture(scope="session")
def compiled():
    """Every kernel that these tests look at, by its request."""
    requests = [
        *ahead.static_requests(kernels=["tiled"]),
        *ahead.static_requests(targets=["sm_90"], kernels=["plain"], dtypes=DTYPES[:2]),
        *(Compilation(KIMI, "plain", target) for target in TARGETS if target != "sm_90"),
        *ahead.static_requests(
            layers=[layer for name, layer in LAYERS.items() if name != "kimi-k3"],
            targets=["sm_90", "gfx942"],
            kernels=["tiled"],
        ),
        *(
            Compilation(KIMI, target=t, token_first=f, every_option=True)
            for t in TARGETS
            for f in (True, False)
        ),
        *(Compilation(LayerShape("long row", 64, (2**31,)), target=t) for t in TARGETS),
    ]
    return dict(zip(requests, compile_ahead(requests), strict=True))


@pytest.fixture(scope="session")
def child(root: Path):
    """What a process without the interpreter answers."""
    script = root / "tests" / "kernels" / "compiled_child.py"
    return json.loads(ahead.run_without_interpreter(str(script)))


def tiled(compiled, **fields):
    """The compiled tiled kernels whose request has these fields, without the options."""
    wanted = {"kernel": "tiled", "every_option": False} | fields
    found = [
        result
        for request, result in compiled.items()
        if all(getattr(request, name) == value for name, value in wanted.items())
    ]
    assert found
    return found


@BY_TARGET
def test_states_move_in_16_byte_accesses(compiled, target):
    for kernel in tiled(compiled, target=target):
        assert kernel.widths(*STATE) == (16,), kernel.request


@BY_TARGET
def test_windows_move_in_16_byte_accesses_as_far_as_their_layout_allows(compiled, target):
    for kernel in tiled(compiled, target=target):
        if kernel.request.layer.width < 256:
            continue
        assert kernel.widths("raw_qkv") == (16,), kernel.request
        # One column of a dim-first window has its neighbours three elements apart.
        assert kernel.widths("conv_state") == ((16,) if kernel.request.token_first else (2,))


@BY_TARGET
def test_a_checkpoint_takes_few_programs_and_registers_and_nothing_spills(compiled, target):
    for kernel in tiled(compiled, target=target):
        assert kernel.spills == 0, kernel.request
        assert kernel.registers <= 64, kernel.request
        if kernel.request.layer in LARGE_LAYERS:
            assert kernel.programs_per_mib <= 70, kernel.request


@pytest.mark.parametrize(("token_first", "times"), [(True, 10), (False, 5)])
@pytest.mark.parametrize("dtypes", DTYPES[:2])
def test_far_fewer_instructions_than_the_plain_shape(compiled, token_first, times, dtypes):
    ours, plain = (
        compiled[Compilation(KIMI, kernel, "sm_90", *dtypes, token_first)]
        for kernel in ("tiled", "plain")
    )
    assert plain.instructions_per_mib >= times * ours.instructions_per_mib


def test_the_plain_shape_is_what_it_is_said_to_be(compiled):
    """256 elements a program: 989 programs a MiB of Kimi-K3, 8-byte states, 2-byte windows."""
    plain = compiled[Compilation(KIMI, "plain", "sm_90")]
    assert plain.programs == KIMI.row_elements // 256
    assert round(plain.programs_per_mib) == 989
    assert plain.widths(*STATE) == (8,)
    assert plain.widths("raw_qkv", "conv_state") == (2,)
    ours = compiled[Compilation(KIMI, "tiled", "sm_90")]
    assert plain.accesses_per_mib > 2 * ours.accesses_per_mib


def test_the_readme_says_what_the_compiler_says(compiled, root):
    rows = []
    for token_first, kernel in product((True, False), ("tiled", "plain")):
        made = compiled[Compilation(KIMI, kernel, "sm_90", token_first=token_first)]
        (state,), (load,), (store,) = (
            made.widths(*b) for b in (STATE, ["raw_qkv"], ["conv_state"])
        )
        rows.append(
            f"| {kernel} | {'token-first' if token_first else 'dim-first'} "
            f"| {made.programs:,} | {made.programs_per_mib:.0f} | {state} | {load} / {store} "
            f"| {made.registers} | {made.spills} | {made.instructions_per_mib:,.0f} |"
        )
    assert "\n".join(rows) in (root / "kernels" / "README.md").read_text()


def test_the_static_table_compares_both_kernels(compiled, capsys, tmp_path, monkeypatch):
    """One target and one pair of dtypes of those that the command compiles, compiled above."""
    whole = command.static_requests
    monkeypatch.setattr(
        command,
        "static_requests",
        lambda *, layers: whole(layers=layers, targets=["sm_90"], dtypes=[("float32", "float32")]),
    )
    monkeypatch.setattr(command, "compile_ahead", lambda asked: [compiled[one] for one in asked])
    out = tmp_path / "static.json"
    assert command.main(["export", "--static", "--layer", "kimi-k3", "--out", str(out)]) == 0
    run = Benchmark.from_json(out.read_text())
    assert run.kind == "static"
    rows = {(row["kernel"], row["windows"]): row for row in run.static}
    assert len(rows) == 4
    ours, plain = rows["tiled", "token-first"], rows["plain", "token-first"]
    assert ours["recurrent_bytes"] == [16]
    assert ours["programs_per_mib"] <= 70 < plain["programs_per_mib"]
    assert plain["instructions_per_mib"] >= 10 * ours["instructions_per_mib"]
    assert capsys.readouterr().out.count("sm_90") == 4


@BY_TARGET
def test_float32_is_rounded_to_the_nearest_bfloat16(compiled, target):
    """Interpreters truncate here, so compiled code is what says how a state is rounded."""
    expected = {"v_bfe_u32 + v_add3_u32"} if target == "gfx942" else {"cvt.rn.bf16x2.f32"}
    converting = tiled(
        compiled, target=target, source_dtype="float32", state_dtype="bfloat16", layer=KIMI
    )
    for kernel in converting:
        assert set(kernel.conversions) == expected
    for kernel in tiled(compiled, target=target, source_dtype="float32", state_dtype="float32"):
        assert kernel.conversions == ()


def test_no_address_is_computed_in_32_bits(compiled):
    """K01, K08: vllm PR #55924, dion PR #102: block, token and row are widened before a product.

    Compiled with the 32-bit indices and strides that a real launch passes.
    """
    ours = [kernel for request, kernel in compiled.items() if request.kernel == "tiled"]
    assert any(kernel.request.every_option for kernel in ours)
    for kernel in ours:
        assert kernel.narrow_offsets == 0, kernel.request
        assert kernel.narrow_products == (), kernel.request


def test_the_check_for_32_bit_products_sees_one(compiled):
    """The plain kernel counts its flat index in 32 bits, and its launcher limits the row."""
    plain = compiled[Compilation(KIMI, "plain", "sm_90")]
    assert len(plain.narrow_products) == 1
    assert "flat" in plain.narrow_products[0]
    assert plain.narrow_offsets > 0


@BY_TARGET
def test_a_row_of_2_to_31_elements_compiles_as_wide_as_any(compiled, target):
    (kernel,) = [k for k in tiled(compiled, target=target) if k.request.layer.name == "long row"]
    assert kernel.programs == 2**31 // 4_096 + 3
    assert kernel.widths(*STATE) == (16,)
    assert kernel.spills == 0


@BY_TARGET
def test_every_option_together_spills_nothing(compiled, target):
    for token_first in (True, False):
        kernel = compiled[
            Compilation(KIMI, target=target, token_first=token_first, every_option=True)
        ]
        assert kernel.spills == 0
        assert kernel.registers <= 64
        assert kernel.widths(*STATE) == (16,)


def test_small_rows_get_enough_programs_to_fill_a_device(compiled):
    """One row of an eighth of Kimi-K3: at 4,096 elements a program most of a GPU would idle."""
    (kernel,) = [
        k
        for k in tiled(compiled, target="sm_90", layer=LAYERS["kimi-k3-tp8"])
        if k.request.token_first and k.request.state_dtype == "float32"
    ]
    assert kernel.programs > 132  # multiprocessors of an H100 or H200


def test_the_flag_set_after_the_import_is_refused_with_the_reason(child):
    """E01: triton-lang/triton #5142: "0 active drivers" becomes a sentence; nothing is written."""
    late = child["late"]
    assert late["interpreted"] is False
    assert set(late["messages"]) == {"store_cache_checkpoints", "flat_store_checkpoints"}
    for message in late["messages"].values():
        assert "TRITON_INTERPRET=1 before triton is first imported" in message
    assert late["untouched"]


def test_compilations_do_not_grow_with_lengths(child):
    """K05: triton-lang/triton issue #10872, sglang PR #36888.

    One compilation for rows of channels, sliced or not; one more for a buffer laid out channel by
    channel, whatever its length; one more for a pointer off the 16-byte grid.
    """
    counts = child["compilations"]
    assert counts["tiled"] == [1] * 24 + [2] * 48
    assert counts["misaligned"] == [3] * 12


def test_counting_compilations_sees_them_grow(child):
    """The plain kernel lets strides specialise, so a length divisible by 16 compiles anew."""
    assert child["compilations"]["plain"][-1] > child["compilations"]["tiled"][-1]


def test_a_kernel_compiled_alone_reads_as_it_does_among_many(compiled):
    """The programs of a target are disassembled in one go, and counted apart."""
    request = Compilation(KIMI, token_first=False)
    assert compile_ahead([request]) == [compiled[request]]


@pytest.mark.parametrize(
    ("field", "value"),
    [("target", "sm_75"), ("kernel", "fast"), ("source_dtype", "int8"), ("state_dtype", "fp8")],
)
def test_an_unknown_request_is_refused_by_name(field, value):
    with pytest.raises(CheckpointValueError, match=f"{field} is '{value}'; expected one of"):
        compile_ahead([Compilation(KIMI, **{field: value})])


def test_a_child_that_fails_shows_why(tmp_path):
    script = tmp_path / "failing.py"
    script.write_text("raise SystemExit('no compiler here')")
    with pytest.raises(CheckpointValueError, match="no compiler here"):
        ahead.run_without_interpreter(str(script))
