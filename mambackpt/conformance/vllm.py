"""vllm: random sizes, rows, batches, pools and prompts, and what this kit says of them.

The pieces are functions and classes that a patched build may change: the planner with its
predicate, the metadata builder, the exporter (its kernel interpreted) and the splitter. H hash
unit, M Mamba block, U hit alignment, A checkpoint alignment: all in tokens.
"""

from collections.abc import Iterator
from itertools import accumulate
from random import Random
from typing import TYPE_CHECKING, Any

from mambackpt.conformance.pieces import Answer, Case, Difference, Piece, by_request, seeded
from mambackpt.engine import Splitter
from mambackpt.geometry import CacheGeometry
from mambackpt.planner import (
    compute_mamba_prefill_checkpoints,
    get_mamba_prefill_checkpoint_position,
    is_mamba_prefill_checkpoint_valid,
)

if TYPE_CHECKING:
    from mambackpt.metadata import MambaPrefillCheckpointMetadata

_UNITS = (1, 2, 3, 4, 8, 16, 16, 32, 64, 128, 528)
_WORKER = "vllm_checkpoints.py"


def _random_sizes(random: Random) -> dict[str, Any]:
    """Sizes of one cache group: M and U are multiples of H, in no other relation."""
    H = random.choice(_UNITS)
    M = H * random.choice((1, 1, 2, 3, 4, 8, 33))
    return {
        "H": H,
        "M": M,
        "A": random.choice((1, 1, 2, 8, 16, 64, H, M, None)),
        "U": random.choice((H, H, H, M, 2 * M, 3 * H)),
        "drop": random.random() < 0.4,
        "lookahead": random.choice((0, 0, 0, 1, 2, 3, H)),
    }


def _near(random: Random, sizes: dict[str, Any], most: int) -> int:
    """A count of tokens, often on a boundary of some grid or a few tokens from it."""
    count = random.randint(0, most)
    if random.random() < 0.8:
        grid = random.choice((sizes["H"], sizes["M"], sizes["U"], sizes["A"] or 1))
        count = count // grid * grid + random.choice((0, 0, 0, 1, -1, sizes["lookahead"]))
    return min(max(count, 0), most)


# --- planner and predicate ------------------------------------------------------------------------


def _planner_case(seed: int) -> Case:
    random = Random(seed)
    sizes = _random_sizes(random)
    rows = []
    for _ in range(random.choice((20, 100, 100, 300))):
        seq = max(1, _near(random, sizes, random.choice((2, 6, 20)) * sizes["M"] + 5))
        start = _near(random, sizes, seq)
        at = _near(random, sizes, seq + sizes["M"])
        rows.append({"seq": seq, "query": seq - start, "at": at})
    return {"asks": "planner", "settings": sizes, "requests": rows}


def _plan(case: Case) -> Answer:
    sizes, rows = case["settings"], case["requests"]
    H, M, A, U, drop, lookahead = (
        sizes[name] for name in ("H", "M", "A", "U", "drop", "lookahead")
    )
    seq, query = [row["seq"] for row in rows], [row["query"] for row in rows]
    offsets, columns = compute_mamba_prefill_checkpoints(seq, query, H, M, A, drop, U, lookahead)
    answers = []
    for row, offset, column in zip(rows, offsets, columns, strict=True):
        end = row["seq"]
        start = end - row["query"]
        answers.append(
            {
                "position": get_mamba_prefill_checkpoint_position(end, U, drop, lookahead),
                "valid": is_mamba_prefill_checkpoint_valid(start, end, row["at"], H, M, A),
                "offset": offset,
                "column": column,
                "state": start + offset if offset else 0,
            }
        )
    return {"requests": answers}


# --- metadata builder -----------------------------------------------------------------------------


def _builder_case(seed: int) -> Case:
    random = Random(seed)
    sizes = _random_sizes(random)
    sizes["drop"] = random.choice((None, None, False, True))
    sizes["mode"] = random.choice(("align",) * 12 + ("all", "none"))
    sizes["reserved"] = random.choice((1,) * 9 + (0,))
    if random.random() < 0.05:
        sizes[random.choice(("H", "U"))] = None
    aims = {**sizes, "H": sizes["H"] or 16, "U": sizes["U"] or 16}
    seq = [max(1, _near(random, aims, 6 * sizes["M"] + 3)) for _ in range(random.randint(1, 12))]
    query = [length - random.choice((0, _near(random, aims, length))) for length in seq]
    columns = -(-max(seq) // sizes["M"]) + random.randint(0, 2)
    rows = random.sample(range(len(seq)), random.randint(1, len(seq)))
    return {
        "asks": "builder",
        "settings": sizes,
        "seq": seq,
        "starts": [0, *accumulate(query)],
        "rows": rows,
        "table": _random_table(random, len(seq), columns),
        "other": _random_table(random, len(seq), columns),
    }


def _random_table(random: Random, rows: int, columns: int) -> list[list[int]]:
    """A block table: early columns are often the null block."""
    blocks = random.sample(range(1, 10 * rows * columns + 1), rows * columns)
    return [
        [0 if random.random() < 0.1 else blocks[r * columns + c] for c in range(columns)]
        for r in range(rows)
    ]


def _build(case: Case) -> Answer:
    import torch

    from mambackpt import metadata

    sizes = case["settings"]
    drop = sizes["drop"]
    config = metadata.EngineConfig(
        metadata.CacheConfig(sizes["H"], sizes["U"], sizes["mode"]),
        None if drop is None else metadata.SpeculativeConfig(drop),
        sizes["lookahead"],
    )
    spec = metadata.KVCacheSpec(sizes["M"], sizes["A"], sizes["reserved"])
    starts = torch.tensor(case["starts"], dtype=torch.int32)
    batch = metadata.CommonMetadata(
        starts,
        starts.clone(),
        torch.tensor(case["seq"], dtype=torch.int32),
        torch.tensor(case["table"], dtype=torch.int32),
    )
    made = metadata.MambaPrefillCheckpointBuilder(config, spec).build(batch, case["rows"])
    if made is None:
        return {"metadata": None}
    other = made.regather_state_indices(torch.tensor(case["other"], dtype=torch.int64))
    return {"metadata": _fields(made), "regathered": _fields(other)}


def _fields(made: "MambaPrefillCheckpointMetadata") -> dict[str, Any]:
    """Every field of the metadata, tensors with their type."""
    fields: dict[str, Any] = {"offsets": made.offsets, "query_lens": made.query_lens}
    for name in ("checkpoint_offsets", "state_indices", "request_rows", "block_cols"):
        tensor = getattr(made, name)
        fields[name] = [str(tensor.dtype), str(tensor.device), tensor.tolist()]
    return fields


def _builder_differences(case: Case, theirs: Answer, ours: Answer) -> list[Difference]:
    """The fields that differ, of either table."""
    if not theirs.get("metadata") or not ours.get("metadata"):
        return by_request(case, theirs, ours)
    said = {"requests": [theirs["metadata"], theirs["regathered"]]}
    say = {"requests": [ours["metadata"], ours["regathered"]]}
    return by_request(case, said, say)


def _fewer_rows(case: Case) -> Iterator[Case]:
    """Cases with one request row less."""
    rows = case["rows"]
    for place in range(len(rows)):
        if len(rows) > 1:
            yield {**case, "rows": rows[:place] + rows[place + 1 :]}


# --- exporter -------------------------------------------------------------------------------------


def _exporter_case(seed: int) -> Case:
    random = Random(seed)
    columns = random.randint(1, 6)
    state_len = random.choice((None, columns, random.randint(1, columns)))
    row = random.choice((None, (1, 5), (2, 8), (3, 7), (4, 64)))
    floats = ("float32", "bfloat16")
    blocks = random.randint(4, 9)
    free = random.sample(range(1, blocks), blocks - 1)
    requests = []
    for _ in range(random.randint(1, min(3, len(free)))):
        query = random.randint(0, 12)
        offset = random.choice((0, random.randint(0, query), random.randint(0, query)))
        block = 0 if random.random() < 0.15 else free.pop()
        requests.append({"query": query, "offset": offset, "block": block})
    settings = {
        "width": random.choice((1, 3, 8, 17)),
        "columns": columns,
        "state_len": state_len,
        "blocks": blocks,
        "padding": random.choice((0, 0, 3)),
        "dim_first": random.random() < 0.5,
        "transposed": random.random() < 0.3,
        "mapped": random.random() < 0.3,
        "rows_chosen": random.random() < 0.4,
        "source": random.choice(floats),
        "window": random.choice(floats),
        "state_row": row,
        "emitted": random.choice(floats),
        "state": random.choice(floats),
    }
    return {"asks": "exporter", "data": seed % 2**32, "settings": settings, "requests": requests}


def _export(case: Case) -> Answer:
    import torch

    from mambackpt import exporter, metadata
    from mambackpt.conformance.workers.export_tensors import Export

    tensors = Export(case)
    made = metadata.MambaPrefillCheckpointMetadata(
        checkpoint_offsets=torch.tensor(tensors.offsets, dtype=torch.int32),
        state_indices=tensors.state_indices,
        offsets=tensors.offsets,
        query_lens=tensors.query_lens,
        request_rows=torch.arange(len(tensors.offsets)),
        block_cols=torch.zeros(len(tensors.offsets), dtype=torch.int64),
    )
    ours = exporter.MambaPrefillCheckpointExporter(case["settings"]["state_len"])
    ours.export(made, short_windows="engine", **tensors.arguments())
    return {"requests": tensors.digests()}


def _fewer_exports(case: Case) -> Iterator[Case]:
    """Cases with a row less; what differs is a block, so the rest of the case stays."""
    rows = case["requests"]
    for place in range(len(rows)):
        if len(rows) > 1:
            yield {**case, "requests": rows[:place] + rows[place + 1 :]}


# --- splitter -------------------------------------------------------------------------------------


def _splitter_case(seed: int) -> Case:
    random = Random(seed)
    sizes = _random_sizes(random)
    H, M = sizes["H"], sizes["M"]
    # A hit inside a block lands on the hash grid, any other on whole blocks.
    sizes["U"] = H if H < M and random.random() < 0.8 else M * random.choice((1, 1, 2))
    sizes["internal"] = random.random() < 0.6
    sizes["shared"] = sizes["U"] < M and random.random() < 0.3
    sizes["budget"] = max(1, _near(random, sizes, random.choice((M, 2 * M, 8 * M, 40 * M))))
    sizes["limit"] = sizes["budget"] + random.choice((0, 0, M, random.randint(0, 2 * M)))
    requests = []
    for _ in range(12):
        longest = min(random.choice((2, 6, 20)) * M + 5, 60 * sizes["budget"])
        prompt = max(1, _near(random, sizes, longest))
        total = prompt + random.choice((0, 0, 1, 2, random.randint(0, 2 * M)))
        start = min(_near(random, sizes, total), total - 1)
        start -= start % random.choice((1, H, H, M))
        junction = random.choice((0, 0, _near(random, sizes, total)))
        requests.append({"prompt": prompt, "total": total, "start": start, "junction": junction})
    return {"asks": "splitter", "settings": sizes, "requests": requests}


def _split(case: Case) -> Answer:
    sizes = case["settings"]
    geometry = CacheGeometry(
        sizes["H"], sizes["M"], sizes["A"], sizes["U"], sizes["drop"], sizes["lookahead"]
    )
    splitter = Splitter(
        geometry,
        sizes["limit"],
        internal_checkpoints=sizes["internal"],
        shared_prefix_checkpoint=sizes["shared"],
    )
    return {"requests": [_split_request(splitter, sizes["budget"], r) for r in case["requests"]]}


def _split_request(splitter: Splitter, budget: int, request: dict[str, int]) -> Answer:
    g = splitter.geometry
    alignment = g.A if splitter.internal_checkpoints else None
    start, total = request["start"], request["total"]
    ends: list[int] = []
    saved: list[int] = []
    while start < total:
        end = splitter.end(
            start,
            min(budget, total - start),
            prompt=request["prompt"],
            num_tokens=total,
            junction=request["junction"],
        )
        ends.append(end)
        if end == start:  # it waits for ever
            break
        [offset], _ = compute_mamba_prefill_checkpoints(
            [end],
            [end - start],
            g.H,
            g.M,
            alignment,
            g.drop_eagle_block,
            g.U,
            g.num_hash_lookahead_tokens,
        )
        if offset:
            saved.append(start + offset)
        start = end
    return {"ends": ends, "saved": saved}


def _deepest_state(answer: Answer) -> list[int]:
    """The last state before each prompt's end: what the same prompt would resume after."""
    return [max([0, *one["ends"][:-1], *one["saved"]]) for one in answer["requests"]]


PIECES = (
    Piece(
        name="planner",
        worker=_WORKER,
        cases=seeded(_planner_case),
        answer=_plan,
        reused=lambda answer: [row["state"] for row in answer["requests"]],
    ),
    Piece(
        name="builder",
        worker=_WORKER,
        cases=seeded(_builder_case),
        answer=_build,
        differences=_builder_differences,
        requests=lambda case: len(case["rows"]),
        smaller=_fewer_rows,
    ),
    Piece(
        name="exporter",
        worker=_WORKER,
        cases=seeded(_exporter_case),
        answer=_export,
        smaller=_fewer_exports,
    ),
    Piece(
        name="splitter",
        worker=_WORKER,
        cases=seeded(_splitter_case),
        answer=_split,
        reused=_deepest_state,
    ),
)
