"""Which packages an engine's release is made of: one line a release."""

from collections.abc import Mapping
from dataclasses import dataclass

from mambackpt.errors import checked_choice

_GGUF = ("gguf==0.19.0", "numpy==2.4.6")
_SGLANG = (
    "torch==2.13.0",
    "dill==0.4.1",
    "msgspec==0.23.0",
    "numpy==2.4.6",
    "packaging==26.4",
    "regex==2026.11.19",
)
# What vllm's scheduler and checkpoint functions import. Triton 3.9's interpreter refuses a mask of
# the exporter's kernel; 3.7.1 is what this torch is made for.
_VLLM = (
    "torch==2.13.0",
    "triton==3.7.1",
    "numpy==2.4.6",
    "transformers==5.20.2",
    "aiohttp==3.14.5",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "cloudpickle==3.1.3",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "llguidance==1.9.1",
    "loguru==0.7.3",
    "msgspec==0.23.0",
    "openai==3.57.0",
    "openai-harmony==0.0.8",
    "partial-json-parser==0.2.1.1.post7",
    "pillow==13.0.0",
    "prometheus-client==0.26.0",
    "psutil==7.2.2",
    "py-cpuinfo==9.0.0",
    "pybase64==1.5.1",
    "pyzmq==27.3.0",
    "requests==2.34.2",
    "sentencepiece==0.2.3",
    "uvloop==0.23.0",
    "xgrammar==0.2.9",
)


@dataclass(frozen=True, slots=True)
class Release:
    """What to install for one release of an engine.

    ``packages`` are installed with what they require; ``bare`` are unpacked alone, because what
    they require is large and stays unused. ``modules`` says what to import to see whether the
    engine is there already. ``megabytes`` is the disk that it takes, ``cpu`` the flags that the
    processor must have.
    """

    engine: str
    name: str
    packages: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()
    megabytes: int = 200
    cpu: tuple[str, ...] = ()


def _llama_cpp(name: str, wheel: str) -> Release:
    return Release("llama.cpp", name, (f"xllamacpp=={wheel}", *_GGUF), (), 200, ("avx2",))


def _sglang(name: str) -> Release:
    return Release("sglang", name, _SGLANG, (f"sglang=={name}",), 1500)


def _vllm(name: str) -> Release:
    return Release("vllm", name, _VLLM, (f"vllm=={name}", "compressed-tensors==0.17.0"), 3500)


# The newest release of an engine stands first: it is the one that the kit is held to.
RELEASES: Mapping[str, tuple[Release, ...]] = {
    "llama.cpp": (
        _llama_cpp("b11549", "2026.10.11549"),
        _llama_cpp("b10229", "2026.8.10229"),
        _llama_cpp("b9873", "2026.7.9873"),
        _llama_cpp("b9294", "2026.5.9294"),
    ),
    "sglang": (_sglang("0.5.23"),),
    "vllm": (_vllm("0.33.0"), _vllm("0.32.0"), _vllm("0.31.0")),
}

# engine: the module that is there where the engine is installed
MODULES = {"llama.cpp": "xllamacpp", "sglang": "sglang", "vllm": "vllm"}


def known_releases(engine: str) -> list[str]:
    """Return the names of an engine's releases, the newest first.

    >>> known_releases("vllm")
    ['0.33.0', '0.32.0', '0.31.0']
    """
    return [release.name for release in RELEASES[engine]]


def find_release(engine: str, name: str | None = None) -> Release:
    """Return a release of an engine by its name, the newest by default.

    >>> find_release("llama.cpp").packages[0]
    'xllamacpp==2026.10.11549'

    Raises CheckpointValueError for an engine or a release that the table does not hold.
    """
    checked_choice("engine", engine, RELEASES)
    known = known_releases(engine)
    hint = f"Try {known[0]!r}, or add a line to the table of versions."
    chosen = checked_choice("release", name or known[0], known, hint=hint)
    return RELEASES[engine][known.index(chosen)]
