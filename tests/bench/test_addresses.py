"""Watching a program touches exactly what running it touches."""

import math

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from mambackpt.bench.addresses import first_touch, plan_on_paper, watch_program, window_readers
from mambackpt.bench.compiled import LAYERS, Compilation, LayerShape
from mambackpt.bench.export import BUFFERS, make_export_set
from mambackpt.errors import CheckpointTypeError, CheckpointValueError
from mambackpt.kernels.flat_store import plan_flat_store
from mambackpt.kernels.store_checkpoints import Launch, plan_store

PLANS = pytest.mark.parametrize("plan", [plan_store, plan_flat_store], ids=["tiled", "plain"])
LAYOUTS = pytest.mark.parametrize("layout", ["token-first", "dim-first"])


def written(pool: torch.Tensor) -> set[int]:
    """Elements of the pool's memory that are no longer NaN, counted from its start."""
    memory = torch.empty(0, dtype=pool.dtype).set_(pool.untyped_storage())
    return set(torch.nonzero(~memory.isnan())[:, 0].tolist())


@PLANS
@LAYOUTS
def test_each_program_stores_what_its_watched_run_says(plan, layout):
    """The truth is the interpreter: a grid with one more tile stores that tile's elements more."""
    layer = LayerShape("small", 300, (3, 700))
    inputs = make_export_set(layer, BUFFERS[layout], 2, device="cpu").inputs
    whole = plan(**inputs)
    pools = {name: inputs[name] for name in ("conv_state", "recurrent_state")}
    seen = {name: set() for name in pools}
    for tile in range(whole.grid[0]):
        Launch(whole.kernel, (tile + 1, 2), whole.arguments).run()
        now = {name: written(pool) for name, pool in pools.items()}
        said = {name: set() for name in pools}
        for row in range(2):
            for touch in watch_program(whole.kernel, whole.arguments, program=(tile, row)):
                if touch.operation == "store":
                    said[touch.buffer] |= set(touch.elements.tolist())
        assert said == {name: now[name] - seen[name] for name in pools}
        seen = now
    assert len(seen["recurrent_state"]) == 2 * layer.row_elements
    assert len(seen["conv_state"]) == 2 * layer.window_elements


@PLANS
def test_each_place_reads_the_element_whose_value_it_stores(plan):
    """Places of a load and of the store after it are the same: indices in one tile."""
    layer = LayerShape("small", 300, (3, 700))
    inputs = make_export_set(layer, BUFFERS["token-first"], 1, device="cpu").inputs
    whole = plan(**inputs)
    whole.run()
    pairs = {"conv_state": "raw_qkv", "recurrent_state": "recurrent_checkpoint"}
    for tile in range(whole.grid[0]):
        touches = watch_program(whole.kernel, whole.arguments, program=(tile, 0))
        loads = {touch.buffer: touch for touch in touches}
        for touch in touches:
            if touch.operation == "store":
                source = loads[pairs[touch.buffer]]
                assert source.places.tolist() == touch.places.tolist()
                held, given = (
                    torch.empty(0, dtype=inputs[name].dtype).set_(inputs[name].untyped_storage())
                    for name in (touch.buffer, source.buffer)
                )
                assert torch.equal(held[touch.elements], given[source.elements])


@triton.jit
def probe_kernel(blocks, starts, stride, STRIDE: tl.constexpr):
    row = tl.program_id(0)
    block = tl.load(blocks + row)
    tl.store(starts + row * 4, block * stride)
    tl.store(starts + row * 4 + 1, block * STRIDE)
    tl.store(starts + row * 4 + 2, (block * stride).to(tl.int64))
    tl.store(starts + row * 4 + 3, block.to(tl.int64) * stride)


@triton.jit
def addressed_kernel(blocks, pool, stride, STRIDE: tl.constexpr):
    row = tl.program_id(0)
    block = tl.load(blocks + row)
    tl.store(pool + block * stride, 0.0)
    tl.store(pool + block * STRIDE, 0.0)
    tl.store(pool + (block * stride).to(tl.int64), 0.0)
    tl.store(pool + block.to(tl.int64) * stride, 0.0)


@pytest.mark.parametrize("block", [4854, 4855, 10_923])
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_products_are_as_wide_as_triton_makes_them(block, dtype):
    """K01, vllm PR #55924: 4855 x 442,368 passes 2^31; K08: only offsets are stored, no pool."""
    stride = 442_368
    blocks = torch.tensor([block], dtype=dtype)
    starts = torch.zeros(4, dtype=torch.int64)
    probe_kernel[(1,)](blocks, starts, stride, stride)
    paper = torch.empty(0, device="meta")
    given = {"blocks": blocks, "pool": paper, "stride": stride, "STRIDE": stride}
    touches = watch_program(addressed_kernel, given)
    stored = [int(touch.elements[0]) for touch in touches if touch.operation == "store"]
    assert stored == starts.tolist()
    wrapped = (block * stride + 2**31) % 2**32 - 2**31
    right = block * stride
    assert stored == ([wrapped] * 3 + [right] if dtype is torch.int32 else [right] * 4)


def test_run_time_numbers_beyond_32_bits_are_64_bits_wide():
    """Triton passes a number that fits as i32, any other as i64, and as it is annotated."""
    paper = torch.empty(0, device="meta")
    index = torch.tensor([2], dtype=torch.int32)
    given = {"blocks": index, "pool": paper, "stride": 2**31, "STRIDE": 1}
    assert watch_program(addressed_kernel, given)[1].elements.tolist() == [2**32]


@triton.jit
def three_apart_kernel(source, target, size, TILE: tl.constexpr):
    place = tl.arange(0, TILE)
    value = tl.load(source + place * 3, mask=place < size)
    tl.store(target + place, value, mask=place < size)


def test_masked_places_are_left_out_and_runs_end_where_neighbours_part():
    paper = torch.empty(0, device="meta")
    given = {"source": paper, "target": paper, "size": 5, "TILE": 8}
    load, store = watch_program(three_apart_kernel, given)
    assert (load.places.tolist(), load.elements.tolist()) == ([0, 1, 2, 3, 4], [0, 3, 6, 9, 12])
    assert (load.run_bytes, store.run_bytes, store.bytes) == (4.0, 20.0, 20)
    assert watch_program(three_apart_kernel, given | {"size": 0}) == []


@triton.jit
def updating_kernel(pool, TILE: tl.constexpr):
    start = tl.program_id(0)
    same = start
    start += tl.arange(0, TILE)
    start *= 2
    start -= 1
    tl.store(pool + start + same, 0.0)


def test_an_update_makes_a_new_value_as_in_triton():
    paper = torch.empty(0, device="meta")
    [store] = watch_program(updating_kernel, {"pool": paper, "TILE": 2}, program=(3, 0))
    pool = torch.full((16,), math.nan)
    updating_kernel[(4,)](pool, 2)
    assert store.elements.tolist() == [8, 10]
    assert set(store.elements.tolist()) <= written(pool)


def test_a_row_without_a_checkpoint_touches_no_data():
    launch = plan_on_paper(Compilation(LAYERS["kimi-k3"]), rows=2)
    launch.arguments["offsets"][1] = 0
    data = ("raw_qkv", "conv_state", "recurrent_checkpoint", "recurrent_state")
    touched = {
        row: {
            touch.buffer
            for tile in (0, launch.grid[0] - 1)
            for touch in watch_program(launch.kernel, launch.arguments, program=(tile, row))
            if touch.buffer in data
        }
        for row in (0, 1)
    }
    assert touched == {0: set(data), 1: set()}


@PLANS
def test_all_programs_together_touch_every_byte_of_a_checkpoint_once(plan):
    kernel = "tiled" if plan is plan_store else "plain"
    launch = plan_on_paper(Compilation(LAYERS["kimi-k3-tp8"], kernel))
    layer, bytes_of = LAYERS["kimi-k3-tp8"], {}
    for tile in range(launch.grid[0]):
        for touch in watch_program(launch.kernel, launch.arguments, program=(tile, 0)):
            bytes_of[touch.buffer] = bytes_of.get(touch.buffer, 0) + touch.bytes
    assert bytes_of["recurrent_checkpoint"] == bytes_of["recurrent_state"] == layer.row_elements * 4
    assert bytes_of["raw_qkv"] == bytes_of["conv_state"] == layer.window_elements * 2


def test_every_input_of_a_window_has_one_reader():
    for kernel in ("plain", "tiled"):
        layer = LayerShape("toy", 512, (16, 64))
        programs, places = window_readers(Compilation(layer, kernel))
        assert programs.shape == places.shape == (3, 512)
        readers = set(zip(programs.flat, places.flat, strict=True))
        assert len(readers) == layer.window_elements
        assert programs.min() >= 0


def test_refusals_say_what_was_given():
    with pytest.raises(CheckpointTypeError, match=r"kernel is a function.*@triton\.jit"):
        watch_program(test_refusals_say_what_was_given, {})
    given = {"blocks": torch.tensor([1]), "pool": torch.zeros(1), "stride": 1, "STRIDE": 1}
    with pytest.raises(CheckpointValueError, match="element 1 of blocks, which has 1"):
        watch_program(addressed_kernel, given, program=(1, 0))
    with pytest.raises(CheckpointValueError, match="no program touches 'pool'"):
        first_touch(Compilation(LayerShape("toy", 8, (4,))), "pool")


def test_watching_says_nothing_about_overflow(recwarn):
    """Compiled code wraps without a word, and a warning would tell an exercise's answer."""
    paper, index = torch.empty(0, device="meta"), torch.tensor([4855], dtype=torch.int32)
    given = {"blocks": index, "pool": paper, "stride": 442_368, "STRIDE": 442_368}
    touches = watch_program(addressed_kernel, given)
    assert touches[1].elements[0] < 0
    assert not recwarn.list
    assert np.geterr()["over"] == "warn"
