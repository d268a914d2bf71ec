"""What compilers make of the export kernels: access widths, registers, spills, without a GPU.

Triton compiles ahead of time for any target. It does so in a child process, because a process that
runs kernels in the interpreter holds no compilable ones. Numbers here are read from the compiled
text; none is a timing.
"""

import ast
import json
import os
import re
import struct
import subprocess
import sys
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from itertools import accumulate, product
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mambackpt.errors import CheckpointValueError, checked_choice
from mambackpt.models import PRESETS

if TYPE_CHECKING:
    from mambackpt.kernels.torch_copies import CopyInputs

TARGETS = ("sm_80", "sm_90", "sm_100", "gfx942")
_DISASSEMBLED_AS = {"sm_80": "SM80", "sm_90": "SM90a", "sm_100": "SM100a"}
DTYPES = (("float32", "float32"), ("bfloat16", "bfloat16"), ("float32", "bfloat16"))
KERNELS = ("tiled", "plain")
_SIZES = {"float32": 4, "bfloat16": 2, "float16": 2}  # bytes of one element
WARPS = 4  # Triton's default, and what both kernels launch with
MIB = 2**20


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One layer's state: channels of its convolution, shape of its recurrent row.

    >>> LAYERS["kimi-k3"].window_elements, LAYERS["kimi-k3"].row_elements
    (110592, 1572864)

    ``state_len`` counts the inputs in a window; ``columns`` the slots of its pool, more with
    speculative decoding. An empty ``row`` is a layer with only a convolution.
    """

    name: str
    width: int
    row: tuple[int, ...]
    state_len: int = 3
    columns: int = 3

    @property
    def window_elements(self) -> int:
        """Elements of one convolution window."""
        return self.width * self.state_len

    @property
    def row_elements(self) -> int:
        """Elements of one recurrent row."""
        elements = 1 if self.row else 0
        for size in self.row:
            elements *= size
        return elements


def _layer_of(preset: str) -> LayerShape:
    """One rank's recurrent layer of a published model."""
    model = PRESETS[preset]
    columns, width = model.recurrent.conv_shape(model.ranks)
    return LayerShape(preset, width, model.recurrent.recurrent_shape(model.ranks), columns, columns)


_TIMED = ("kimi-k3", "kimi-k3-tp8", "qwen3-next", "nemotron-3-super")
LAYERS = {preset: _layer_of(preset) for preset in _TIMED}


@dataclass(frozen=True, slots=True)
class Compilation:
    """One kernel to compile: for which layer, target, dtypes and layout of the window's pool.

    ``kernel`` is "tiled" (ours) or "plain"; ``target`` one of `TARGETS`; dtypes are torch's names:
    of the emitted rows, of the pool of rows. Windows are bfloat16, as engines keep them.
    ``every_option`` adds recurrent rows, token indices and initial windows.
    """

    layer: LayerShape
    kernel: str = "tiled"
    target: str = "sm_90"
    source_dtype: str = "float32"
    state_dtype: str = "float32"
    token_first: bool = True
    every_option: bool = False


@dataclass(frozen=True, slots=True)
class Access:
    """One kind of access in the compiled text: ``count`` instructions of ``width`` bytes."""

    buffer: str
    operation: str
    width: int
    count: int


@dataclass(frozen=True, slots=True)
class CompiledKernel:
    """What one compilation came to.

    ``programs`` and ``bytes_read`` are those of one layer's checkpoint. ``spills`` is bytes of
    stack and local memory on NVIDIA targets, spilled registers on AMD's. ``instructions`` counts
    the text of one program, which no program exceeds: neither kernel loops. ``narrow_products`` are
    products of an index that is only known at run time, taken in 32 bits; ``narrow_offsets`` counts
    address offsets of 32 bits. ``conversions`` names the instructions that round to bfloat16.
    """

    request: Compilation
    programs: int
    bytes_read: int
    registers: int
    spills: int
    instructions: int
    accesses: tuple[Access, ...]
    narrow_offsets: int
    narrow_products: tuple[str, ...]
    conversions: tuple[str, ...]

    @property
    def programs_per_mib(self) -> float:
        """Programs launched for each MiB read."""
        return self.programs * MIB / self.bytes_read

    @property
    def instructions_per_mib(self) -> float:
        """Warp instructions for each MiB read, at most: the text times warps times programs."""
        return self.instructions * WARPS * self.programs_per_mib

    def widths(self, *buffers: str) -> tuple[int, ...]:
        """Return the bytes an access, as they occur on these buffers, narrowest first.

        Without names: on all four buffers of checkpoint data.
        """
        named = buffers or DATA_BUFFERS
        return tuple(sorted({a.width for a in self.accesses if a.buffer in named}))

    @property
    def accesses_per_mib(self) -> float:
        """Accesses of threads to checkpoint data, loads and stores, for each MiB read."""
        layer, total = self.request.layer, 0.0
        moved = {
            "recurrent_checkpoint": layer.row_elements * _SIZES[self.request.source_dtype],
            "recurrent_state": layer.row_elements * _SIZES[self.request.state_dtype],
            "raw_qkv": layer.window_elements * _SIZES["bfloat16"],
            "conv_state": layer.window_elements * _SIZES["bfloat16"],
        }
        for buffer, size in moved.items():
            touching = [a for a in self.accesses if a.buffer == buffer]
            covered = sum(a.width * a.count for a in touching)
            total += size * sum(a.count for a in touching) / covered if covered else 0.0
        return total * MIB / self.bytes_read


DATA_BUFFERS = ("recurrent_checkpoint", "recurrent_state", "raw_qkv", "conv_state")


def static_requests(
    *,
    layers: Sequence[LayerShape] = (LAYERS["kimi-k3"],),
    targets: Sequence[str] = TARGETS,
    kernels: Sequence[str] = KERNELS,
    dtypes: Sequence[tuple[str, str]] = DTYPES,
) -> list[Compilation]:
    """Return every combination of these, each with token-first and dim-first windows.

    >>> len(static_requests(targets=["sm_90"]))
    12
    """
    return [
        Compilation(layer, kernel, target, source, state, token_first)
        for layer, target, (source, state), token_first, kernel in product(
            layers, targets, dtypes, (True, False), kernels
        )
    ]


def compile_ahead(requests: Iterable[Compilation]) -> list[CompiledKernel]:
    """Compile these kernels in one child process and return what was read from them, in order.

    Takes about a tenth of a second each, less when Triton's cache holds them; works with or
    without a GPU and the interpreter. An unknown target, kernel or dtype is a
    `CheckpointValueError`, as is a compilation that fails.
    """
    listed = list(requests)
    for request in listed:
        checked_choice("target", request.target, TARGETS)
        checked_choice("kernel", request.kernel, KERNELS)
        checked_choice("source_dtype", request.source_dtype, _SIZES)
        checked_choice("state_dtype", request.state_dtype, _SIZES)
    requested = json.dumps([asdict(request) for request in listed])
    answers = run_without_interpreter("-m", "mambackpt.bench.compiled", stdin=requested)
    return [
        CompiledKernel(
            **{
                **answer,
                "request": request,
                "accesses": tuple(Access(**access) for access in answer["accesses"]),
                "narrow_products": tuple(answer["narrow_products"]),
                "conversions": tuple(answer["conversions"]),
            }
        )
        for request, answer in zip(listed, json.loads(answers), strict=True)
    ]


def run_without_interpreter(*arguments: str, stdin: str = "") -> str:
    """Run Python with these arguments and compilable kernels; return what it prints."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    package_parent = str(Path(__file__).absolute().parents[2])
    paths = [package_parent, *filter(None, [environment.get("PYTHONPATH")])]
    child = subprocess.run(
        [sys.executable, *arguments],
        input=stdin,
        capture_output=True,
        text=True,
        check=False,
        env=environment | {"PYTHONPATH": os.pathsep.join(paths)},
    )
    if child.returncode:
        raise CheckpointValueError(
            f"ahead-of-time compilation ended with status {child.returncode}; expected 0. Try "
            f"the last lines of its output:\n{child.stderr[-2000:]}"
        )
    return child.stdout


class OfflineDriver:
    """What Triton asks of a GPU driver while it compiles: a device number and a target."""

    def __init__(self, target: str) -> None:
        from triton.backends.compiler import GPUTarget

        if target.startswith("sm_"):
            self._target = GPUTarget("cuda", int(target.removeprefix("sm_")), 32)
        else:
            self._target = GPUTarget("hip", target, 64)

    def get_current_device(self) -> int:
        """Return the only device there is."""
        return 0

    def get_current_stream(self, device: int) -> int:
        """Return the default stream."""
        return 0

    def get_current_target(self) -> Any:
        """Return the target that was asked for."""
        return self._target


def inputs_of(
    request: Compilation,
    *,
    rows: int = 8,
    tokens: int = 8_000,
    blocks: int = 5_000,
    device: str = "meta",
) -> "CopyInputs":
    """Return launcher keywords with these shapes, nothing in them: on "meta" no memory either.

    >>> inputs_of(Compilation(LAYERS["kimi-k3"]), blocks=2)["conv_state"].shape
    torch.Size([2, 36864, 3])
    """
    import torch

    def buffer(*shape: int, dtype: str) -> torch.Tensor:
        return torch.empty(shape, dtype=getattr(torch, dtype), device=device)

    layer = request.layer
    if request.token_first:
        conv_state = buffer(blocks, layer.columns, layer.width, dtype="bfloat16").transpose(1, 2)
    else:
        conv_state = buffer(blocks, layer.width, layer.columns, dtype="bfloat16")
    inputs: CopyInputs = {
        "offsets": buffer(rows, dtype="int32"),
        "state_indices": buffer(rows, dtype="int32"),
        "raw_qkv": buffer(tokens, layer.width, dtype="bfloat16"),
        "conv_state": conv_state,
        "cu_seqlens": buffer(rows + 1, dtype="int32"),
        "state_len": layer.state_len,
    }
    if layer.row:
        inputs["recurrent_checkpoint"] = buffer(rows, *layer.row, dtype=request.source_dtype)
        inputs["recurrent_state"] = buffer(blocks, *layer.row, dtype=request.state_dtype)
    if request.every_option:
        if layer.row:
            inputs["recurrent_rows"] = buffer(rows, dtype="int64")
        inputs["token_indices"] = buffer(tokens, dtype="int64")
        shape = (rows, layer.width, layer.state_len)
        inputs["initial_windows"] = buffer(*shape, dtype="bfloat16")
    return inputs


def plan_of(request: Compilation, **sizes: Any) -> Any:
    """Return the launch that this request's launcher would make, for `inputs_of` its shapes."""
    from mambackpt.kernels.flat_store import plan_flat_store
    from mambackpt.kernels.store_checkpoints import plan_store

    plan = plan_store if request.kernel == "tiled" else plan_flat_store
    return plan(**inputs_of(request, **sizes))


def _read(
    request: Compilation, programs: int, text: Mapping[str, Any], instructions: int
) -> CompiledKernel:
    """What the texts of one compilation say; ``text`` holds them by their kind."""
    layer = request.layer
    if "ptx" in text:
        assembly = text["ptx"]
        registers, spills = _nvidia_usage(text["cubin"])
    else:
        assembly = text["amdgcn"]
        registers = _amd_number(assembly, "vgpr_count")
        spills = _amd_number(assembly, "vgpr_spill_count") + _amd_number(
            assembly, "sgpr_spill_count"
        )
    source_bytes = layer.row_elements * _SIZES[request.source_dtype]
    return CompiledKernel(
        request=request,
        programs=programs,
        bytes_read=source_bytes + layer.window_elements * _SIZES["bfloat16"],
        registers=registers,
        spills=spills,
        instructions=instructions,
        accesses=_accesses(assembly),
        narrow_offsets=len(re.findall(r"tt\.addptr .*[ <x]i32>?(?: loc|$)", text["ttir"], re.M)),
        narrow_products=tuple(_narrow_products(text["ttir"])),
        conversions=_conversions(assembly),
    )


def _nvidia_tool(name: str, *arguments: str, content: bytes) -> str:
    """What one of the tools in Triton's package says of this content."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(content)
        file.flush()
        command = [str(tool), *arguments, file.name]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return str(done.stdout)


def _nvidia_usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of stack and local memory, of a compiled NVIDIA kernel."""
    text = _nvidia_tool("cuobjdump", "-res-usage", content=cubin)
    usage = {name: int(value) for name, value in re.findall(r"\b(REG|STACK|LOCAL):(\d+)", text)}
    return usage["REG"], usage["STACK"] + usage["LOCAL"]


def _count_instructions(target: str, texts: Sequence[Mapping[str, Any]]) -> list[int]:
    """Instructions of each of these programs.

    Disassembled all at once: NVIDIA's tool takes a quarter of a second to start.
    """
    if target not in _DISASSEMBLED_AS:
        pattern = re.compile(r"^\t(?:[vs]|ds|global|buffer|flat)_\w+", re.M)
        return [len(pattern.findall(text["amdgcn"])) for text in texts]
    codes = [_machine_code(text["cubin"]) for text in texts]
    listing = _nvidia_tool(
        "nvdisasm", "--binary", _DISASSEMBLED_AS[target], content=b"".join(codes)
    )
    ends = list(accumulate(map(len, codes)))
    counts = [0] * len(codes)
    for number, operation, operands in re.findall(
        r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?\w+\s+)?([\w.]+)([^;]*);", listing, re.M
    ):
        address, jump = int(number, 16), re.search(r"0x([0-9a-f]+)", operands)
        if operation.startswith("BRA") and jump and int(jump[1], 16) <= address:
            if int(jump[1], 16) != address:
                raise RuntimeError(f"a loop at {address}: the text does not bound what runs")
            continue  # the endless jump to itself that closes a kernel
        counts[bisect_right(ends, address)] += operation != "NOP"
    return counts


def _machine_code(cubin: bytes) -> bytes:
    """The instructions in a cubin, which is an ELF file: its section ``.text.KERNEL``."""
    [table] = struct.unpack_from("<Q", cubin, 40)
    size, sections, names = struct.unpack_from("<HHH", cubin, 58)
    headers = [struct.unpack_from("<IIQQQQ", cubin, table + size * n) for n in range(sections)]
    [code] = [
        cubin[offset : offset + length]
        for name, _, _, _, offset, length in headers
        if cubin.startswith(b".text.", headers[names][4] + name)
    ]
    return code


def _amd_number(assembly: str, name: str) -> int:
    number = re.search(rf"\.{name}:\s*(\d+)", assembly)
    if number is None:
        raise RuntimeError(f"the compiled text does not say {name}")
    return int(number[1])


_NVIDIA_ACCESS = re.compile(r"\b(ld|st)\.global(?:\.[a-z_:0-9]+)*?(?:\.v(\d))?\.[bus](\d+)\b")
_AMD_ACCESS = re.compile(r"^\t(?:global|buffer|flat)_(load|store)_(\w+)")
_AMD_WIDTHS = {"ubyte": 1, "byte": 1, "ushort": 2, "short": 2, "dword": 4} | {
    f"dwordx{n}": 4 * n for n in (2, 3, 4)
}


def _accesses(assembly: str) -> tuple[Access, ...]:
    """Accesses of the compiled text, attributed to buffers by the source line they came from."""
    files = {
        number: Path(name).name
        for number, name in re.findall(
            r'^\s*\.file\s+(\d+)\s+(?:"[^"]*"\s+)?"([^"]+)"', assembly, re.M
        )
    }
    buffer, inline, counts = "", False, Counter[tuple[str, str, int]]()
    for line in assembly.splitlines():
        # Lines of inline assembly count on from the source line that they stand for.
        inline = "begin inline asm" in line or (inline and "end inline asm" not in line)
        location = re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line)
        if location and not inline:
            buffer = _buffer_of_line(files[location[1]]).get(int(location[2]), "")
        nvidia, amd = _NVIDIA_ACCESS.search(line), _AMD_ACCESS.match(line)
        if nvidia:
            operation = {"ld": "load", "st": "store"}[nvidia[1]]
            counts[buffer, operation, int(nvidia[2] or 1) * int(nvidia[3]) // 8] += 1
        elif amd:
            width = next(
                w for n, w in sorted(_AMD_WIDTHS.items(), reverse=True) if amd[2].startswith(n)
            )
            counts[buffer, amd[1], width] += 1
    return tuple(Access(*key, count) for key, count in sorted(counts.items()))


@cache
def _buffer_of_line(file_name: str) -> dict[int, str]:
    """The buffer that each line of a kernel file loads or stores: the first name in its address."""
    path = Path(__file__).parents[1] / "kernels" / file_name
    lines: dict[int, str] = {}
    for node in ast.walk(ast.parse(path.read_text())):
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr in ("load", "store")
            and node.end_lineno is not None
        ):
            address: ast.expr = node.args[0]
            while isinstance(address, ast.BinOp):
                address = address.left
            if isinstance(address, ast.Name):
                lines |= dict.fromkeys(range(node.lineno, node.end_lineno + 1), address.id)
    return lines


def _narrow_products(ttir: str) -> Iterator[str]:
    """Products taken in 32 bits of what run time brings: arguments, loads, program numbers."""
    depends: dict[str, bool] = defaultdict(lambda: True)  # arguments are known at run time only
    for line in ttir.splitlines():
        match = re.match(r"\s*(%[\w#]+)(?::\d+)? = (?:\"?)([\w.]+)(.*)", line)
        if match is None:
            continue
        name, operation, rest = match.groups()
        if operation in ("arith.constant", "tt.make_range"):
            depends[name] = False
            continue
        operands = re.findall(r"%[\w]+", rest.split(" loc(")[0])
        depends[name] = not operands or any(depends[operand] for operand in operands)
        if operation == "arith.muli" and depends[name] and re.search(r"[ x]i32>?(?: loc|$)", rest):
            yield f"{name}{rest.split(' loc(')[0]}"


def _conversions(assembly: str) -> tuple[str, ...]:
    """Instructions that make bfloat16 of float32; an AMD target without one adds half a step."""
    names = set(re.findall(r"\b(cvt\.\S*bf16\S*\.f32)\b", assembly))
    if re.search(r"v_bfe_u32 \w+, \w+, 16, 1", assembly) and "0x7fff" in assembly:
        names.add("v_bfe_u32 + v_add3_u32")
    return tuple(sorted(names))


def static_table(compiled: Sequence[CompiledKernel]) -> list[dict[str, Any]]:
    """Return one plain row per compiled kernel: accesses, programs, registers, spills.

    ``recurrent_bytes`` and ``window_bytes`` are the bytes an access to the states' and the windows'
    buffers; per-MiB numbers count MiB of the layer's checkpoint read.
    """
    return [
        {
            "kernel": one.request.kernel,
            "target": one.request.target,
            "layer": one.request.layer.name,
            "dtypes": f"{one.request.source_dtype} to {one.request.state_dtype}",
            "windows": "token-first" if one.request.token_first else "dim-first",
            "recurrent_bytes": list(one.widths("recurrent_checkpoint", "recurrent_state")),
            "window_bytes": list(one.widths("raw_qkv", "conv_state")),
            "programs_per_mib": one.programs_per_mib,
            "accesses_per_mib": one.accesses_per_mib,
            "instructions_per_mib": one.instructions_per_mib,
            "registers": one.registers,
            "spills": one.spills,
        }
        for one in compiled
    ]


def _main() -> None:
    """Compile the requests on standard input, write what was read to standard output."""
    import triton

    requests = []
    for fields in json.load(sys.stdin):
        layer = fields.pop("layer")
        layer["row"] = tuple(layer["row"])
        requests.append(Compilation(LayerShape(**layer), **fields))
    answers: dict[int, dict[str, Any]] = {}
    for target in dict.fromkeys(request.target for request in requests):
        triton.runtime.driver.set_active(OfflineDriver(target))
        numbers = [n for n, request in enumerate(requests) if request.target == target]
        launches = [plan_of(requests[n]) for n in numbers]
        texts = []
        for launch in launches:
            launch.kernel.device_caches.clear()
            texts.append(launch.kernel.warmup(**launch.arguments, grid=launch.grid).asm)
        counts = _count_instructions(target, texts)
        for n, launch, text, count in zip(numbers, launches, texts, counts, strict=True):
            answers[n] = asdict(_read(requests[n], launch.grid[0], text, count))
    json.dump([answers[number] for number in range(len(requests))], sys.stdout)


if __name__ == "__main__":
    _main()
