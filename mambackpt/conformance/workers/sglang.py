"""SGLang's own scheduler pieces serve token lists on a CPU: the worker of the conformance run.

A script by itself, for an environment with sglang 0.5.23 (its wheel alone), torch for CPUs and a
few small packages; it imports nothing of this project. Cases come in as JSON lines, one answer goes
out for each, in order:

    {"settings": {"chunk": 64, ...}, "requests": [{"tokens": [...], "outputs": [...]}]}
    {"rows": [{"attention": 0, "reused": 0, "branch": null, "created": [448], "kept": [448]}]}

Real here: the request with its lookup, the cut into extends, allocation with eviction, the choice
of the position to track, the radix cache with its attention and Mamba components, what a request
hands over while it runs and when it is done. Not driven: the model itself (states stay zero), pages
of more than one token, overlapped steps, several requests at once, speculation, the host tier.
"""

import importlib.machinery
import importlib.util
import json
import logging
import os
import sys
import types
import warnings
from array import array
from importlib.abc import Loader, MetaPathFinder
from types import SimpleNamespace
from typing import Any

RELEASE = "0.5.23"
# Imported by the engine on the way to its cache, and not used there. Each is stood in for where it
# is not installed.
STOOD_IN = """
    IPython PIL aiohttp anthropic blobfile compressed_tensors cuda datasets decord einops fastapi
    filelock flashinfer gguf httpx huggingface_hub interegular llguidance mistral_common modelscope
    openai orjson outlines partial_json_parser prometheus_client psutil pybase64 pydantic
    pydantic_core pynvml requests safetensors scipy sentencepiece setproctitle sgl_kernel soundfile
    starlette tiktoken tokenizers torchvision tqdm transformers triton tvm_ffi uvicorn uvloop
    websockets xgrammar xxhash zmq
"""


class _Anything(type):
    """A class that stands for whatever is imported: every attribute of it is another one."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return _anything(name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if "stands_in" not in cls.__dict__:  # a class of the engine that inherits from a stand-in
            return super().__call__(*args, **kwargs)
        if len(args) == 1 and not kwargs and callable(args[0]):
            return args[0]  # a decorator
        return _anything(cls.__name__)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __setitem__(cls, item: Any, value: Any) -> None: ...

    def __iter__(cls) -> Any:
        return iter(())

    def __or__(cls, other: Any) -> Any:
        return cls

    __ror__ = __or__

    def __instancecheck__(cls, other: Any) -> bool:
        return False


def _anything(name: str) -> Any:
    return _Anything(
        name,
        (),
        {
            "stands_in": True,
            "__init__": lambda self, *args, **kwargs: None,
            "__init_subclass__": classmethod(lambda cls, **kwargs: None),
            "__class_getitem__": classmethod(lambda cls, item: cls),
        },
    )


class _Module(types.ModuleType):
    """An empty module of which everything can be imported."""

    __version__ = "99.0.0"

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        setattr(self, name, _anything(name))
        return getattr(self, name)


class _Finder(MetaPathFinder, Loader):
    """Finds a stand-in for each package that is missing."""

    def __init__(self, names: list[str]) -> None:
        self.names = {name for name in names if importlib.util.find_spec(name) is None}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if name.split(".")[0] in self.names:
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> Any:
        return _Module(spec.name)

    def exec_module(self, module: Any) -> None: ...


def stand_in() -> None:
    """Make the engine importable without the packages that this path does not use."""
    warnings.filterwarnings("ignore")
    os.environ.setdefault("SGLANG_UNIFIED_RADIX_TREE_CORE_BACKEND", "python")
    # torch looks for triton when this loads, and must see that there is none
    import torch._inductor.runtime.triton_heuristics  # noqa: F401

    finder = _Finder(STOOD_IN.split())
    sys.meta_path.append(finder)
    if "transformers" in finder.names:  # whose patches then have nothing to patch
        patches = _Module("sglang.srt.utils.hf_transformers_patches")
        for name in ("apply_all", "normalize_rope_scaling_compat"):
            setattr(patches, name, lambda *args, **kwargs: None)
        sys.modules[patches.__name__] = patches
    logging.disable(logging.WARNING)


class Engine:
    """One server's cache, as its scheduler drives it, for requests that come one at a time."""

    def __init__(
        self,
        *,
        tokens: int,
        chunk: int = 64,
        budget: int = 8192,
        interval: int = 256,
        strategy: str = "extra_buffer",
        per_path: int | None = None,
        slots: int | None = None,
    ) -> None:
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType
        from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache
        from sglang.srt.runtime_context import get_context
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        self.budget, self.buffered, self.count = budget, strategy == "extra_buffer", 0
        self.override = get_context().override_server_args(
            device="cpu",
            page_size=1,
            mamba_radix_cache_strategy=strategy,
            mamba_track_interval=interval,
            mamba_max_states_per_path=-1 if per_path is None else per_path,
            chunked_prefill_size=budget,
            _mamba_cache_chunk_size=chunk,
        )
        self.override.install()
        self.rows, self.allocator = self._pools(tokens, slots or 4096)
        self.tree = UnifiedRadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=self.rows,
                token_to_kv_pool_allocator=self.allocator,
                page_size=1,
                enable_mamba_extra_buffer=self.buffered,
                enable_mamba_extra_buffer_lazy=False,
                chunked_prefill_size=budget,
                tree_components=(ComponentType.FULL, ComponentType.MAMBA),
                tree_core_backend=None,
            )
        )
        # What the scheduler's methods below read of the batch and the result processor.
        self.batch = SimpleNamespace(
            model_config=SimpleNamespace(hf_text_config=SimpleNamespace(mamba_chunk_size=chunk)),
            tree_cache=self.tree,
            req_to_token_pool=self.rows,
            spec_algorithm=SpeculativeAlgorithm.NONE,
        )
        # Every state that a request hands over goes through this method.
        self.created: list[int] = []
        insert = self.tree.insert

        def insert_and_note(parameters: Any) -> Any:
            self.created.append(len(parameters.key))
            return insert(parameters)

        self.tree.insert = insert_and_note

    def _pools(self, tokens: int, slots: int) -> tuple[Any, Any]:
        """Pools of a model with one attention and one Mamba layer, each as small as can be."""
        import torch
        from sglang.srt.configs.mamba_utils import Mamba2CacheParams, Mamba2StateShape
        from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
        from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool, HybridReqToTokenPool

        mamba, attention = [0], [1]
        shape = Mamba2StateShape.create(
            tp_world_size=1,
            intermediate_size=2,
            n_groups=1,
            num_heads=1,
            head_dim=2,
            state_size=1,
            conv_kernel=2,
        )
        rows = HybridReqToTokenPool(
            size=4,
            mamba_size=slots,
            mamba_spec_state_size=4,
            max_context_len=tokens,
            device="cpu",
            enable_memory_saver=False,
            cache_params=Mamba2CacheParams(shape=shape, layers=mamba),
            mamba_layer_ids=mamba,
            enable_mamba_extra_buffer=self.buffered,
            enable_mamba_extra_buffer_lazy=False,
        )
        cache = HybridLinearKVPool(
            size=tokens,
            dtype=torch.bfloat16,
            page_size=1,
            head_num=1,
            head_dim=1,
            full_attention_layer_ids=attention,
            device="cpu",
            enable_memory_saver=False,
            mamba_pool=rows.mamba_pool,
        )
        allocator = TokenToKVPoolAllocator(
            size=tokens, dtype=torch.bfloat16, device="cpu", kvcache=cache, need_sort=False
        )
        return rows, allocator

    def serve(self, prompt: list[int], outputs: list[int]) -> dict[str, Any]:
        """Prefill ``prompt`` and decode ``outputs``; at least one token is always sampled."""
        from sglang.srt.managers.schedule_batch import FINISH_LENGTH, Req
        from sglang.srt.managers.schedule_policy import PrefillAdder
        from sglang.srt.mem_cache.common import checkpoint_kv_cache, release_kv_cache
        from sglang.srt.sampling.sampling_params import SamplingParams

        outputs = outputs or [-1]
        self.created.clear()
        self.count += 1
        request = Req(
            rid=str(self.count),
            origin_input_text="",
            origin_input_ids=array("q", prompt),
            sampling_params=SamplingParams(temperature=0, max_new_tokens=len(outputs)),
        )
        request.init_next_round_input(self.tree)
        row = {
            "attention": self._attention_hit(prompt),
            "reused": request.prefix_len,
            "branch": request.mamba_branching_seqlen,
        }
        more = started = False
        while more or not started:
            adder = PrefillAdder(1, self.tree, self.allocator, None, 1.0, 1 << 20, self.budget)
            if started:
                checkpoint_kv_cache(request, self.tree)
                request.init_next_round_input()
                more = adder.add_chunked_req(request) is not None
            else:
                adder.add_one_req(request, has_chunked_req=False, truncation_align_size=None)
                if not adder.can_run_list:
                    raise RuntimeError("the engine does not admit the request")
                more = adder.new_chunked_req is not None
            started = True
            self._extend(request)
        request.output_ids.append(outputs[0])
        if len(outputs) > 1:
            checkpoint_kv_cache(request, self.tree)
            for token in outputs[1:]:
                self._decode(request)
                request.output_ids.append(token)
        request.finished_reason = FINISH_LENGTH(length=len(outputs))
        release_kv_cache(request, self.tree, checkpoint=True)
        return row | {
            "created": sorted({*self.created} - {0}),
            "kept": self._positions([*prompt, *outputs]),
        }

    def _attention_hit(self, prompt: list[int]) -> int:
        from sglang.srt.mem_cache.base_prefix_cache import MatchPrefixParams
        from sglang.srt.mem_cache.radix_cache import RadixKey

        key = RadixKey(array("q", prompt[:-1]))
        match = self.tree.tree_core.match_prefix(MatchPrefixParams(key=key))
        return int(match.full_kv_hit_length)

    def _extend(self, request: Any) -> None:
        """Allocate for one extend, and let the engine choose what to track in it."""
        from sglang.srt.managers.schedule_batch import ScheduleBatch
        from sglang.srt.mem_cache.allocation import (
            _prefix_kv_indices,
            alloc_req_slots,
            alloc_token_slots,
        )

        start, end = request.prefix_len, request.extend_end
        prefix = _prefix_kv_indices(self.batch, request)
        fresh = not request.kv.holds_kv
        alloc_req_slots(self.rows, [request], self.tree)
        new = alloc_token_slots(self.tree, end - start)
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        if fresh:
            row[:start] = prefix.to(row.dtype)
        row[start:end] = new.to(row.dtype)
        request.kv.kv_allocated_len = request.kv.kv_committed_len = end
        if self.buffered:
            ScheduleBatch._mamba_radix_cache_v2_req_prepare_for_extend(self.batch, request)

    def _decode(self, request: Any) -> None:
        """Allocate for one decoded token, and let the engine see whether it ends an interval."""
        from sglang.srt.managers.scheduler_components.batch_result_processor import (
            SchedulerBatchResultProcessor as Processor,
        )
        from sglang.srt.mem_cache.allocation import alloc_token_slots

        new = alloc_token_slots(self.tree, 1)
        at = request.kv.kv_committed_len
        row = self.rows.req_to_token[request.kv.req_pool_idx]
        row[at] = new.to(row.dtype)[0]
        request.kv.kv_committed_len = request.kv.kv_allocated_len = at + 1
        request.decode_batch_idx += 1
        if self.buffered:
            processor = SimpleNamespace(tree_cache=self.tree)
            processor._mamba_check_track_boundary = types.MethodType(
                Processor._mamba_check_track_boundary, processor
            )
            self.batch.mamba_decode_batch_idx_cpu = [request.decode_batch_idx]
            self.batch.mamba_track_buffer_indices = [request.kv.mamba_next_track_idx]
            Processor._mamba_prefix_cache_update(processor, request, self.batch, None, 0)

    def _positions(self, tokens: list[int]) -> list[int]:
        """Positions of the states that the tree holds along ``tokens``."""
        from sglang.srt.mem_cache.unified_cache.component_type import ComponentType

        kept: list[int] = []
        depth, node = 0, self.tree.tree_core.root_node
        while True:
            for child in node.children.values():
                key = list(child.key.token_ids)
                if key == tokens[depth : depth + len(key)]:
                    break
            else:
                return kept
            node, depth = child, depth + len(key)
            if node.component_data[ComponentType.MAMBA].value is not None:
                kept.append(depth)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    """Serve one case; where the engine stops at a request, say so in place of its row."""
    requests = case["requests"]
    tokens = 16 + 2 * sum(len(r["tokens"]) + len(r["outputs"]) for r in requests)
    engine = Engine(tokens=tokens, **case["settings"])
    rows: list[dict[str, Any]] = []
    try:
        for request in requests:
            rows.append(engine.serve(request["tokens"], request["outputs"]))
    except Exception as error:
        rows.append({"error": f"{type(error).__name__}: {error}"})
    finally:
        engine.override.restore()
    return {"rows": rows}


def main() -> None:
    """Answer cases until the input ends."""
    sys.path.pop(0)  # this folder, where `import sglang` would find this file
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what the engine says does not get between them
    stand_in()
    import sglang

    if sglang.__version__ != RELEASE:
        print(f"sglang is {sglang.__version__}; this worker is for {RELEASE}", file=sys.stderr)
    for line in sys.stdin:
        said = json.dumps(answer(json.loads(line)), separators=(",", ":"))
        print(said, file=answers, flush=True)


if __name__ == "__main__":
    main()
