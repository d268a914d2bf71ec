"""The engines that can be asked, and the file that says how; it loads when its engine is asked."""

from importlib import import_module

from mambackpt.conformance.pieces import Piece

# engine: the modules whose PIECES are put to it
ENGINES: dict[str, tuple[str, ...]] = {
    "llama.cpp": ("mambackpt.conformance.llama_cpp",),
    "sglang": ("mambackpt.conformance.sglang",),
    "vllm": ("mambackpt.conformance.vllm", "mambackpt.conformance.vllm_scheduler"),
}


def pieces_of(engine: str) -> list[Piece]:
    """Return the pieces that an engine is asked for."""
    return [piece for module in ENGINES[engine] for piece in import_module(module).PIECES]
