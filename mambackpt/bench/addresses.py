"""Watch one program of a Triton kernel: which elements it touches, place by place.

The kernel's own Python source runs with numpy arrays in place of Triton's tensors; every load and
store notes its addresses and moves no data. So it takes no GPU, and no memory for the pools: an
address beyond 2^31 can be watched in a pool that nobody has.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import FunctionType, SimpleNamespace
from typing import Any, TypeAlias

import numpy as np

from mambackpt.bench.compiled import Compilation, plan_of
from mambackpt.errors import CheckpointTypeError, CheckpointValueError

_Integers: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Touch:
    """One load or store of one program: the elements it touches, counted from the buffer.

    ``places`` are indices in the program's tile, in order, those that a mask leaves out missing;
    ``elements[i]`` is the element that belongs to ``places[i]``, of ``itemsize`` bytes.
    """

    buffer: str
    operation: str
    itemsize: int
    places: _Integers
    elements: _Integers

    @property
    def bytes(self) -> int:
        """Bytes of all places together."""
        return len(self.elements) * self.itemsize

    @property
    def run_bytes(self) -> float:
        """Mean bytes of a run, in which each place has the element after its neighbour's."""
        breaks = int((np.diff(self.elements) != 1).sum())
        return self.bytes / (1 + breaks)


def watch_program(
    kernel: Any, arguments: Mapping[str, Any], *, program: tuple[int, int] = (0, 0)
) -> list[Touch]:
    """Return what one program of a kernel touches, in the order in which it does.

    >>> from mambackpt.bench import LAYERS
    >>> launch = plan_on_paper(Compilation(LAYERS["kimi-k3"]))
    >>> [load, store] = watch_program(launch.kernel, launch.arguments)[-2:]
    >>> store.buffer, store.elements[:3].tolist(), store.run_bytes
    ('recurrent_state', [1572864, 1572865, 1572866], 16384.0)

    ``kernel`` is a `triton.jit` function, interpreted or not, of loads, stores and arithmetic;
    ``arguments`` are its keywords, tensors and numbers, where buffers of integers are read and all
    others may be meta tensors; ``program`` is its index in the grid. Numbers are as wide as Triton
    makes them: what overflows there overflows here. Raises CheckpointTypeError for a function that
    is no kernel, CheckpointValueError for a read outside a buffer of integers.
    """
    if not callable(getattr(kernel, "fn", None)):
        raise CheckpointTypeError(
            f"kernel is a {type(kernel).__name__}; expected a Triton kernel. Try @triton.jit."
        )
    touches: list[Touch] = []
    language = _Language(program, touches)
    kinds = kernel.fn.__annotations__
    seen = {
        name: _argument(name, value, str(kinds.get(name, ""))) for name, value in arguments.items()
    }
    # What wraps around on a GPU wraps around here, without a word.
    with np.errstate(over="ignore"):
        _plain(kernel.fn, language)(**seen)
    return touches


def plan_on_paper(
    request: Compilation, *, rows: int = 1, query_len: int = 16, cut: int = 12, blocks: int = 5000
) -> Any:
    """Return the launch of these rows' checkpoints, to be watched: its buffers have no memory.

    >>> from mambackpt.bench import LAYERS
    >>> plan_on_paper(Compilation(LAYERS["kimi-k3"])).grid
    (411, 1)

    Row i is a query of ``query_len`` tokens, cut after ``cut``, and goes to block i + 1 of
    ``blocks``. The launch is the one that the request's launcher makes.
    """
    import torch

    launch = plan_of(request, rows=rows, tokens=rows * query_len, blocks=blocks)
    launch.arguments.update(
        offsets=torch.full((rows,), cut),
        state_indices=torch.arange(1, rows + 1),
        cu_seqlens=torch.arange(rows + 1) * query_len,
    )
    return launch


def first_touch(request: Compilation, buffer: str) -> Touch:
    """Return what the first program that touches this buffer, of one checkpoint, touches there.

    >>> from mambackpt.bench import LAYERS
    >>> [first_touch(Compilation(LAYERS["kimi-k3"], kernel), "raw_qkv").run_bytes
    ...  for kernel in ("plain", "tiled")]
    [2.0, 8192.0]

    Raises CheckpointValueError where no program touches it.
    """
    launch = plan_on_paper(request)
    for n in range(launch.grid[0]):
        for touch in watch_program(launch.kernel, launch.arguments, program=(n, 0)):
            if touch.buffer == buffer:
                return touch
    raise CheckpointValueError(
        f"no program touches {buffer!r}; expected a buffer of the launch. Try 'conv_state'."
    )


def window_readers(request: Compilation) -> tuple[_Integers, _Integers]:
    """Return which program, and which place of its tile, reads each input of one window.

    >>> from mambackpt.bench import LayerShape
    >>> programs, places = window_readers(Compilation(LayerShape("toy", 512, (16, 64)), "plain"))
    >>> places[:, :4].tolist()
    [[0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]]

    Both are [state_len, width], the oldest token first.
    """
    launch = plan_on_paper(request)
    layer, cut = request.layer, int(launch.arguments["offsets"][0])
    programs, places = np.full((2, *launch.arguments["raw_qkv"].shape), -1)
    for n in range(launch.grid[0]):
        for touch in watch_program(launch.kernel, launch.arguments, program=(n, 0)):
            if touch.buffer == "raw_qkv":
                programs.flat[touch.elements], places.flat[touch.elements] = n, touch.places
    window = slice(cut - layer.state_len, cut)
    return programs[window], places[window]


class _Numbers(np.ndarray[Any, Any]):
    """An array that takes Triton's ``to``, and stays an array without axes."""

    def to(self, kind: Any) -> "_Numbers":
        """Convert to a numpy dtype; other dtypes are those of data, which no address depends on."""
        return _numbers(self, kind) if isinstance(kind, type) else self

    # Triton's values never change: what looks like an update makes a new one, of any shape.
    def __iadd__(self, other: Any) -> "_Numbers":  # type: ignore[misc]
        return _numbers(self + other)

    def __isub__(self, other: Any) -> "_Numbers":  # type: ignore[override, misc]
        return _numbers(self - other)

    def __imul__(self, other: Any) -> "_Numbers":  # type: ignore[misc]
        return _numbers(self * other)


def _numbers(values: Any, kind: Any = None) -> _Numbers:
    return np.asarray(values, kind).view(_Numbers)


class _Pointer:
    """A buffer, and how many elements into it each place of a tile points."""

    __array_ufunc__ = None  # so that array + pointer asks the pointer

    def __init__(self, name: str, tensor: Any, offset: Any = 0) -> None:
        self.name, self.tensor, self.offset = name, tensor, offset
        self.dtype = SimpleNamespace(element_ty=str(tensor.dtype))

    def __add__(self, elements: Any) -> "_Pointer":
        return _Pointer(self.name, self.tensor, self.offset + elements)

    __radd__ = __add__


class _Language:
    """The part of ``triton.language`` that copies use, on numpy arrays."""

    int32, int64, float32 = np.int32, np.int64, np.float32

    def __init__(self, program: tuple[int, int], touches: list[Touch]) -> None:
        self._program, self._touches = program, touches

    def program_id(self, axis: int) -> _Numbers:
        return _numbers(self._program[axis], np.int32)

    def arange(self, start: int, end: int) -> _Numbers:
        return _numbers(np.arange(start, end, dtype=np.int32))

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def minimum(self, left: Any, right: Any) -> _Numbers:
        return _numbers(np.minimum(left, right))

    def where(self, condition: Any, left: Any, right: Any) -> _Numbers:
        return _numbers(np.where(condition, left, right))

    def load(self, pointer: _Pointer, mask: Any = None, other: Any = 0) -> _Numbers:
        elements, active = self._note("load", pointer, mask)
        tensor = pointer.tensor
        if tensor.dtype.is_floating_point or tensor.device.type == "meta":
            return _numbers(np.zeros(elements.shape, np.float32))
        held = tensor.reshape(-1).numpy()
        asked = elements[active]
        if ((asked < 0) | (asked >= len(held))).any():
            raise CheckpointValueError(
                f"the kernel reads element {int(asked[(asked < 0) | (asked >= len(held))][0])} of "
                f"{pointer.name}, which has {len(held)}; expected one of them. Try a mask."
            )
        values = np.full(elements.shape, other, held.dtype)
        values[active] = held[asked]
        return _numbers(values)

    def store(self, pointer: _Pointer, value: Any, mask: Any = None) -> None:
        self._note("store", pointer, mask)

    def _note(self, operation: str, pointer: _Pointer, mask: Any) -> tuple[Any, Any]:
        elements = np.asarray(pointer.offset)
        active = np.broadcast_to(True if mask is None else np.asarray(mask), elements.shape)
        [places] = np.nonzero(active.reshape(-1))
        if len(places):
            size = pointer.tensor.element_size()
            touched = elements.reshape(-1)[places].astype(np.int64)
            self._touches.append(Touch(pointer.name, operation, size, places, touched))
        return elements, active


def _argument(name: str, value: Any, kind: str) -> Any:
    """A kernel's argument as its source sees it: a pointer, a compile-time value, or a number."""
    if hasattr(value, "element_size"):
        return _Pointer(name, value)
    if "constexpr" in kind or value is None or not isinstance(value, int):
        return value
    wide = "int64" in kind or not -(2**31) <= value < 2**31
    return _numbers(value, np.int64 if wide else np.int32)


def _plain(function: Any, language: _Language) -> FunctionType:
    """The function as plain Python, with this language for Triton's, as are those it calls."""
    names: dict[str, Any] = {}
    for name, value in function.__globals__.items():
        if getattr(value, "__name__", "") == "triton.language":
            names[name] = language
        elif name in function.__code__.co_names and hasattr(value, "fn"):
            names[name] = _plain(value.fn, language)
        else:
            names[name] = value
    code, defaults = function.__code__, function.__defaults__
    return FunctionType(code, names, function.__name__, defaults, function.__closure__)
