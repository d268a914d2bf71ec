"""Ask vllm's own checkpoint functions: planner, metadata builder, exporter's kernel, splitter.

A script for an environment that has vllm. One JSON line in, one out, in order. ``asks`` says what:

    {"asks": "planner", "settings": {"H": 16, "M": 64, "A": 16, "U": 16, "drop": false,
     "lookahead": 0}, "requests": [{"seq": 100, "query": 100, "at": 96}]}
    {"requests": [{"position": 96, "valid": true, "offset": 96, "column": 0, "state": 96}]}

``valid`` is the predicate's answer for the position ``at``, ``state`` the position of the state
that is saved, 0 for none. A case that fails is answered {"error": "..."}.
"""

import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported, by anything
os.environ["CUDA_VISIBLE_DEVICES"] = ""  # the engine then takes a triton without a driver
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
ANSWERS = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # the engine's own words

import json  # noqa: E402
import warnings  # noqa: E402
from inspect import signature  # noqa: E402
from types import SimpleNamespace  # noqa: E402

warnings.filterwarnings("ignore")

import torch  # noqa: E402
from export_tensors import Export  # noqa: E402
from vllm.model_executor.layers.mamba import checkpoint as engine  # noqa: E402
from vllm.utils import torch_utils  # noqa: E402

torch_utils.PIN_MEMORY = False  # there is no device to copy to
# Before 0.32 a hit landed on the hash grid, whatever the blocks were.
TAKES_ALIGNMENT = (
    "cache_hit_alignment_tokens" in signature(engine.compute_mamba_prefill_checkpoints).parameters
)


def plan(case: dict) -> dict:
    """Positions, the predicate's answers, and the rows of one batch."""
    sizes = case["settings"]
    H, M, A, U, drop = (sizes[name] for name in ("H", "M", "A", "U", "drop"))
    rows = case["requests"]
    seq, query = [row["seq"] for row in rows], [row["query"] for row in rows]
    offsets, columns = compute(seq, query, sizes, A)
    ahead = _lookahead(sizes)
    unit = U if TAKES_ALIGNMENT else H
    answers = []
    for row, offset, column in zip(rows, offsets, columns, strict=True):
        start = row["seq"] - row["query"]
        position = engine.get_mamba_prefill_checkpoint_position(row["seq"], unit, drop, **ahead)
        valid = engine.is_mamba_prefill_checkpoint_valid(start, row["seq"], row["at"], H, M, A)
        answers.append(
            {
                "position": position,
                "valid": bool(valid),
                "offset": offset,
                "column": column,
                "state": start + offset if offset else 0,
            }
        )
    return {"requests": answers}


def compute(seq: list, query: list, sizes: dict, alignment: int | None) -> tuple[list, list]:
    """The planner, with the arguments that this release has."""
    named = {"cache_hit_alignment_tokens": sizes["U"]} if TAKES_ALIGNMENT else {}
    return engine.compute_mamba_prefill_checkpoints(
        seq, query, sizes["H"], sizes["M"], alignment, sizes["drop"], **named, **_lookahead(sizes)
    )


def _lookahead(sizes: dict) -> dict:
    """Tokens that a hash looks ahead: a release before 0.33 refuses the argument."""
    return {"num_hash_lookahead_tokens": sizes["lookahead"]} if sizes["lookahead"] else {}


def build(case: dict) -> dict:
    """The metadata of one step, and of another group's table with the same rows."""
    sizes = case["settings"]
    config = SimpleNamespace(
        cache_config=SimpleNamespace(
            mamba_cache_mode=sizes["mode"],
            hash_block_size=sizes["H"],
            cache_hit_alignment_tokens=sizes["U"],
        ),
        speculative_config=None
        if sizes["drop"] is None
        else SimpleNamespace(use_eagle_block_drop=lambda: sizes["drop"]),
        num_hash_lookahead_tokens=sizes["lookahead"],
    )
    spec = SimpleNamespace(
        block_size=sizes["M"],
        num_prefill_checkpoint_blocks=sizes["reserved"],
        prefill_checkpoint_alignment=sizes["A"],
    )
    starts = torch.tensor(case["starts"], dtype=torch.int32)
    batch = SimpleNamespace(
        query_start_loc=starts,
        query_start_loc_cpu=starts.clone(),
        seq_lens_cpu_upper_bound=torch.tensor(case["seq"], dtype=torch.int32),
        block_table_tensor=torch.tensor(case["table"], dtype=torch.int32),
    )
    made = engine.MambaPrefillCheckpointBuilder(config, spec).build(batch, case["rows"])
    if made is None:
        return {"metadata": None}
    other = made.regather_state_indices(torch.tensor(case["other"], dtype=torch.int64))
    return {"metadata": _read(made), "regathered": _read(other)}


def _read(made: object) -> dict:
    """Every field of the metadata, tensors with their type."""
    fields = {}
    for name in ("checkpoint_offsets", "state_indices", "request_rows", "block_cols"):
        tensor = getattr(made, name)
        fields[name] = [str(tensor.dtype), str(tensor.device), tensor.tolist()]
    return {**fields, "offsets": made.offsets, "query_lens": made.query_lens}


def export(case: dict) -> dict:
    """Both pools after one export, block by block."""
    tensors = Export(case)
    made = engine.MambaPrefillCheckpointMetadata(
        checkpoint_offsets=torch.tensor(tensors.offsets, dtype=torch.int32),
        state_indices=tensors.state_indices,
        offsets=tensors.offsets,
        query_lens=tensors.query_lens,
    )
    exporter = engine.MambaPrefillCheckpointExporter(case["settings"]["state_len"])
    exporter.export(made, **tensors.arguments())
    return {"requests": tensors.digests()}


def split(case: dict) -> dict:
    """Where each step of a prefill ends, and the states that its steps save inside."""
    sizes = case["settings"]
    return {"requests": [_split(sizes, request) for request in case["requests"]]}


def _split(sizes: dict, request: dict) -> dict:
    from vllm.v1.core.sched.scheduler import Scheduler

    partial = sizes["U"] < sizes["M"]
    scheduler = SimpleNamespace(
        cache_config=SimpleNamespace(block_size=sizes["M"]),
        scheduler_config=SimpleNamespace(long_prefill_token_threshold=0),
        block_size=sizes["M"] if partial else sizes["U"],
        hash_block_size=sizes["H"],
        max_num_scheduled_tokens=sizes["limit"],
        use_eagle_block_drop=sizes["drop"],
        num_hash_lookahead_tokens=sizes["lookahead"],
        mamba_partial_cache_hit=partial,
        mamba_has_prefill_checkpoint_blocks=sizes["internal"],
        mamba_prefill_checkpoint_alignment=sizes["A"] if sizes["internal"] else None,
        mamba_shared_prefix_checkpoint=sizes["shared"],
    )
    state = SimpleNamespace(
        num_computed_tokens=request["start"],
        num_prompt_tokens=request["prompt"],
        num_tokens=request["total"],
        shared_prefix_boundary=request["junction"],
    )
    ends, saved = [], []
    while state.num_computed_tokens < request["total"]:
        start = state.num_computed_tokens
        offered = min(sizes["budget"], request["total"] - start)
        length = Scheduler._mamba_block_aligned_split(scheduler, state, offered)
        end = start + length
        ends.append(end)
        if not length:  # it waits for ever
            break
        alignment = scheduler.mamba_prefill_checkpoint_alignment
        [offset], _ = compute([end], [length], sizes, alignment)
        if offset:
            saved.append(start + offset)
        state.num_computed_tokens = end
    return {"ends": ends, "saved": saved}


ASKED = {"planner": plan, "builder": build, "exporter": export, "splitter": split}


def main() -> None:
    """Answer every case on standard input."""
    for line in sys.stdin:
        case = json.loads(line)
        try:
            answer = ASKED[case["asks"]](case)
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, separators=(",", ":")), file=ANSWERS, flush=True)


if __name__ == "__main__":
    main()
