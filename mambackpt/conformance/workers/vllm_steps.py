"""One history on vllm's own scheduler, on a CPU, step by step: what `vllm_scheduler.py` runs.

The scheduler, its cache managers and its block pool are vllm's own; what the forward pass would do
to the blocks is followed here, with vllm's own `compute_mamba_prefill_checkpoints`.
"""

import json
from math import lcm

import torch
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
)
from vllm.model_executor.layers.mamba.checkpoint import compute_mamba_prefill_checkpoints
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import (
    get_block_hash,
    get_group_id,
    get_request_block_hasher,
    init_none_hash,
)
from vllm.v1.core.sched.interface import PauseState
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.core.single_type_kv_cache_manager import register_all_kvcache_specs
from vllm.v1.kv_cache_interface import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroupSpec,
    MambaSpec,
)
from vllm.v1.outputs import DraftTokenIds, ModelRunnerOutput
from vllm.v1.request import Request

MAX_TOKENS = 262_144
DRAFT = 999_999  # a token that no request contains
FREE_SHOWN = 64
# The digest of a token history, as in mambackpt.engine.blocks.
MODULUS, FACTOR, NO_TOKENS = (1 << 61) - 1, 0x1B873593CC9E2D51, 0x5F3759DF

HYBRID = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "num_hidden_layers": 4,
    "max_position_embeddings": MAX_TOKENS,
    "vocab_size": 50272,
    "torch_dtype": "bfloat16",
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "full_attention_interval": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
    "decoder_sparse_step": 1,
    "rms_norm_eps": 1e-6,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "rope_theta": 1e6,
    "partial_rotary_factor": 0.25,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
DRAFTER = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_hidden_layers": 1,
    "max_position_embeddings": MAX_TOKENS,
    "vocab_size": 50272,
    "torch_dtype": "float16",
    "draft_vocab_size": 50272,
}


def extend(digest, token):
    """Return the digest of a history with one more token."""
    return (digest * FACTOR + token + 1) % MODULUS


class Configurations:
    """vllm's configuration objects: made once for each kind of drafting, without any weights."""

    def __init__(self, folder):
        init_none_hash(sha256)
        for name, config in (("hybrid", HYBRID), ("drafter", DRAFTER)):
            (folder / name).mkdir()
            (folder / name / "config.json").write_text(json.dumps(config))
        self.drafter = str(folder / "drafter")
        self.model = ModelConfig(
            model=str(folder / "hybrid"),
            dtype="float16",
            seed=0,
            skip_tokenizer_init=True,
            max_model_len=MAX_TOKENS,
        )
        self.made = {}

    def find(self, settings):
        """Return the configuration of a case; its sizes are set for each case anew."""
        drafts, lookahead = settings["speculative_tokens"], settings["num_hash_lookahead_tokens"]
        if lookahead > 1:
            raise ValueError("hashes that look further ahead than one token are not driven")
        drop = settings["drop_eagle_block"] and not lookahead
        kind = (drop, lookahead, drafts, settings["shared_prefix_checkpoint"])
        if kind not in self.made:
            self.made[kind] = self._make(*kind)
        return self.made[kind]

    def _make(self, drop, lookahead, drafts, shared):
        self.model.config_updated = False
        speculative = None
        if drop or lookahead or drafts:
            # Before 0.33 no hash looked ahead, and there was nothing to turn off.
            known = "disable_lookahead_block_hashes" in SpeculativeConfig.__dataclass_fields__
            ahead = {"disable_lookahead_block_hashes": not lookahead} if known or lookahead else {}
            speculative = SpeculativeConfig(
                method="eagle",
                model=self.drafter,
                num_speculative_tokens=drafts or 1,
                target_model_config=self.model,
                target_parallel_config=ParallelConfig(),
                **ahead,
                disable_eagle_block_drop=not (drop or lookahead),
            )
        return VllmConfig(
            model_config=self.model,
            cache_config=CacheConfig(
                block_size=64,
                enable_prefix_caching=True,
                enable_mamba_shared_prefix_checkpoint=shared,
            ),
            scheduler_config=SchedulerConfig(
                max_num_seqs=16,
                max_num_batched_tokens=8192,
                max_model_len=MAX_TOKENS,
                enable_chunked_prefill=True,
                is_encoder_decoder=False,
                watermark=0.0,
                async_scheduling=False,
            ),
            parallel_config=ParallelConfig(),
            device_config=DeviceConfig(device="cpu"),
            speculative_config=speculative,
        )


class NoGrammar:
    """Stands where the scheduler asks about structured output."""

    def accept_tokens(self, *_args, **_options):
        """Accept what was sampled."""
        return True

    def grammar_init(self, *_args, **_options):
        """Know no grammar."""
        return None

    def validate_tokens(self, _request, tokens):
        """Keep every draft."""
        return list(tokens)


def make_scheduler(config, settings):
    """Return vllm's scheduler for one attention group and the recurrent groups of a case."""
    B, h = settings["mamba_block_size"], settings["hash_block_size"]
    attention, drafts = settings["attention_block_size"], settings["speculative_tokens"]
    checkpoints, blocks = settings["internal_checkpoints"], settings["pool_blocks"] + 1
    cache, scheduling = config.cache_config, config.scheduler_config
    scheduling.max_num_batched_tokens = scheduling.max_num_scheduled_tokens = settings["budget"]
    scheduling.max_num_seqs = settings["max_running"]
    scheduling.long_prefill_token_threshold = settings["long_prefill_threshold"]
    cache.block_size = cache.mamba_block_size = B
    cache.num_gpu_blocks, cache.mamba_cache_mode = blocks, "align"
    recurrent = MambaSpec(
        block_size=B,
        shapes=((1, 1),),
        dtypes=(torch.float32,),
        mamba_cache_mode="align",
        num_speculative_blocks=drafts,
        num_prefill_checkpoint_blocks=int(checkpoints),
        prefill_checkpoint_alignment=settings["checkpoint_alignment"] if checkpoints else None,
    )
    full = FullAttentionSpec(block_size=attention, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["attention"], full)] + [
        KVCacheGroupSpec([f"recurrent {n + 1}"], recurrent)
        for n in range(settings["recurrent_groups"])
    ]
    register_all_kvcache_specs(config)
    scheduler = Scheduler(
        vllm_config=config,
        kv_cache_config=KVCacheConfig(
            num_blocks=blocks,
            kv_cache_tensors=[],
            kv_cache_groups=groups,
            prefix_cache_retention_interval=settings["retention"],
        ),
        structured_output_manager=NoGrammar(),
        block_size=lcm(attention, B),
        hash_block_size=h,
        log_stats=False,
    )
    scheduler.num_lookahead_tokens = settings["num_lookahead_tokens"]
    if not drafts:  # a drafter that is there for its drop alone
        scheduler.num_spec_tokens = scheduler._spec_decode_step_blocks = 0
        scheduler.can_skip_drafts = False
    return scheduler


class Live:
    """A request in flight: what was asked for, vllm's object, and its digests."""

    def __init__(self, asked, hash_block_size, lookahead):
        self.asked, self.name = asked, asked["name"]
        parameters = SamplingParams(max_tokens=len(asked["output"]), ignore_eos=True)
        parameters.update_from_generation_config({}, eos_token_id=-1)
        self.request = Request(
            request_id=self.name,
            prompt_token_ids=list(asked["prompt"]),
            sampling_params=parameters,
            pooling_params=None,
            block_hasher=get_request_block_hasher(
                hash_block_size, sha256, *([lookahead] if lookahead else [])
            ),
        )
        self.digests = [NO_TOKENS]
        self.column, self.accepted, self.decodes = -1, 1, 0
        self.read_tokens()

    def read_tokens(self):
        """Digest the tokens that are known by now."""
        for token in self.request._all_token_ids[len(self.digests) - 1 :]:
            self.digests.append(extend(self.digests[-1], token))

    def advance(self, digest, start, end):
        """Return what a state becomes when the tokens [start, end) are applied to it."""
        if digest == self.digests[start]:
            return self.digests[end]
        for token in self.request._all_token_ids[start:end]:
            digest = extend(digest, token)
        return digest


class Run:
    """One history on one scheduler, with what every block of the recurrent groups really holds."""

    def __init__(self, case, configurations):
        self.settings = settings = case["settings"]
        config = configurations.find(settings)
        self.B, self.h = settings["mamba_block_size"], settings["hash_block_size"]
        self.lookahead = settings["num_hash_lookahead_tokens"]
        self.drop = settings["drop_eagle_block"] and not self.lookahead
        self.drafts = settings["speculative_tokens"]
        self.scheduler = make_scheduler(config, settings)
        self.managers = self.scheduler.kv_cache_manager.coordinator.single_type_managers
        self.pool = self.scheduler.kv_cache_manager.block_pool
        self.groups = range(1, len(self.managers))
        self.held = {group: {} for group in self.groups}  # block -> digest
        self.meaning = {}  # hash -> position, digest of what is hashed, digest of the prefix
        self.lives = {}
        self.coming = list(case["requests"])
        self.last_keys = None
        self.preempted = []
        preempt = self.scheduler._preempt_request

        def note_and_preempt(request, *arguments, **options):
            self.preempted.append(request.request_id)
            return preempt(request, *arguments, **options)

        self.scheduler._preempt_request = note_and_preempt

    def steps(self):
        """Run to the end and yield every step."""
        number = idle = 0
        while self.coming or self.scheduler.waiting or self.scheduler.running:
            number += 1
            if not (self.scheduler.waiting or self.scheduler.running):
                number = max(number, self.coming[0]["arrival"])
            while self.coming and self.coming[0]["arrival"] <= number:
                self._add(self.coming.pop(0))
            step = self.step(number)
            yield step
            idle = 0 if step["scheduled"] or step["preempted"] else idle + 1
            if idle > len(self.settings["budgets"]) + 2:
                raise RuntimeError(f"nothing is scheduled any more after step {number}")

    def _add(self, asked):
        live = self.lives[asked["name"]] = Live(asked, self.h, self.lookahead)
        self.scheduler.add_request(live.request)

    def step(self, number):
        """Schedule, follow what the forward pass does, and report."""
        scheduler, offers = self.scheduler, self.settings["budgets"]
        if offers:
            scheduler.scheduler_config.max_num_batched_tokens = offers[(number - 1) % len(offers)]
        self.preempted = []
        self._force_out(number)
        before = {request.request_id for request in scheduler.running}
        output = scheduler.schedule()
        scheduler._pause_state = PauseState.UNPAUSED
        queries = [
            (self.lives[name], self.lives[name].request.num_computed_tokens - count, count)
            for name, count in output.num_scheduled_tokens.items()
        ]
        report = {
            "step": number,
            "preempted": self.preempted,
            "hits": {
                live.name: [start, live.request.shared_prefix_boundary]
                for live, start, _ in queries
                if live.name not in before
            },
            "scheduled": [[live.name, start, start + count] for live, start, count in queries],
            "rows": {
                request.request_id: [
                    [block.block_id for block in manager.req_to_blocks[request.request_id]]
                    for manager in self.managers
                ]
                for request in scheduler.running
            },
            "copies": [
                [copy.src_block_id, copy.dst_block_id]
                for copy in output.kv_cache_block_copies or ()
            ],
        }
        self._compute(output, queries, report)
        report.update(self._cache())
        return report

    def _force_out(self, number):
        """Preempt the requests that are to be preempted in this step; nobody starts in it."""
        for request in list(self.scheduler.running):
            if number in self.lives[request.request_id].asked["preempt_at"]:
                self.scheduler.running.remove(request)
                self.scheduler._preempt_request(request, 0.0)
                self.scheduler._pause_state = PauseState.PAUSED_NEW

    def _compute(self, output, queries, report):
        """Do what the copies and the forward passes do, then hand the sampled tokens back."""
        for source, target in report["copies"]:
            for held in self.held.values():
                if source in held:
                    held[target] = held[source]
        for live, start, _ in queries:
            if live.name in report["hits"]:
                live.column, live.accepted = (start - 1) // self.B if start else -1, 1
        initial = [
            [self._initial(group, query, report) for group in self.groups] for query in queries
        ]
        known = [live.request.num_tokens for live, _, _ in queries]
        sampled = []
        for query, digests in zip(queries, initial, strict=True):
            self._forward(query, digests, report)
            sampled.append(self._sample(*query, padded=query[0].name in report["hits"]))
        if not queries:
            return
        names = [live.name for live, _, _ in queries]
        self.scheduler.update_from_output(
            output,
            ModelRunnerOutput(
                req_ids=names,
                req_id_to_index={name: n for n, name in enumerate(names)},
                sampled_token_ids=sampled,
                logprobs=None,
                prompt_logprobs_dict={},
                pooler_output=[],
            ),
        )
        if self.drafts:
            alive = [r.request_id for r in self.scheduler.running if r.request_id in names]
            self.scheduler.update_draft_token_ids(
                DraftTokenIds(alive, [[DRAFT] * self.drafts for _ in alive])
            )
        for name in names:
            self.lives[name].read_tokens()
        for (live, start, count), tokens in zip(queries, known, strict=True):
            if start + count > tokens:
                self._keep_drafts(live, tokens, start + count, report["rows"][live.name])

    def _initial(self, group, query, report):
        """Bring a state to the column that will run, and return what is there."""
        live, start, count = query
        if not start:
            return NO_TOKENS
        row, held = report["rows"][live.name][group], self.held[group]
        block, column = row[live.column + live.accepted - 1], -(-(start + count) // self.B) - 1
        if live.column != column:
            held[row[column]] = held.get(block, -block)
            block = row[column]
        return held.get(block, -block)

    def _forward(self, query, digests, report):
        """Write the states of one query: the checkpoint's, then the running one."""
        live, start, count = query
        end, settings = start + count, self.settings
        known = min(end, live.request.num_tokens)
        [offset], [column] = compute_mamba_prefill_checkpoints(
            [end],
            [count],
            hash_block_size=self.h,
            mamba_block_size=self.B,
            checkpoint_alignment=settings["checkpoint_alignment"]
            if settings["internal_checkpoints"]
            else None,
            drop_eagle_block=bool(self.drop),
            cache_hit_alignment_tokens=self.managers[1].cache_hit_alignment_tokens,
            **({"num_hash_lookahead_tokens": self.lookahead} if self.lookahead else {}),
        )
        live.column, live.accepted = -(-end // self.B) - 1, 1
        for group, digest in zip(self.groups, digests, strict=True):
            row, held, at = report["rows"][live.name][group], self.held[group], start
            if offset:
                at = start + offset
                digest = live.advance(digest, start, at)
                if row[column]:
                    held[row[column]] = digest
            held[row[live.column]] = live.advance(digest, at, known)

    def _keep_drafts(self, live, known, end, rows):
        """Write a state for each draft, and move that of a boundary to the boundary's column."""
        accepted, boundary = live.accepted - 1, (known + live.accepted - 1) // self.B * self.B
        for group in self.groups:
            row, held = rows[group], self.held[group]
            digest = held[row[live.column]]
            for n in range(1, end - known + 1):
                place = known + n - 1
                digest = live.advance(digest, place, place + 1) if n <= accepted else -end
                held[row[live.column + n]] = digest
            if boundary >= known:
                held[row[boundary // self.B - 1]] = held[row[live.column + boundary - known]]
        if boundary >= known and live.column == boundary // self.B - 1:
            live.accepted = 1

    def _sample(self, live, start, count, *, padded):
        """Return the tokens that follow a query: given ones, and as many drafts as are accepted.

        What a first query is padded with is no draft, and never accepted.
        """
        tokens = live.request.num_tokens
        if start + count < tokens:
            return []
        place, drafts = tokens - live.request.num_prompt_tokens, start + count - tokens
        accepted, output = 0, live.asked["output"]
        if drafts > 0 and not padded:
            cycle = live.asked["accepted"]
            accepted = min(cycle[live.decodes % len(cycle)], drafts, len(output) - place - 1)
            live.decodes += 1
        live.accepted = 1 + accepted
        return output[place : place + 1 + accepted] or output[-1:]

    def _cache(self):
        """Return the keys, those whose block holds another state, and the free list."""
        for live in self.lives.values():
            for n, digest in enumerate(live.request.block_hashes):
                position = (n + 1) * self.h
                hashed = live.digests[position + self.lookahead]
                self.meaning.setdefault(bytes(digest), (position, hashed, live.digests[position]))
        keys, wrong = [[] for _ in self.managers], []
        for entry, found in self.pool.cached_block_hash_to_block._cache.items():
            group = get_group_id(entry)
            position, hashed, claim = self.meaning[bytes(get_block_hash(entry))]
            blocks = list(found) if isinstance(found, dict) else [found.block_id]
            keys[group].append([position, hashed, blocks])
            wrong += [
                [group, position, hashed, block]
                for block in blocks
                if group and self.held[group].get(block) != claim
            ]
        keys = [sorted(group) for group in keys]
        changed, self.last_keys = keys != self.last_keys, keys
        free, block = [], self.pool.free_block_queue.fake_free_list_head.next_free_block
        while block.next_free_block is not None and len(free) < FREE_SHOWN:
            free.append(block.block_id)
            block = block.next_free_block
        return {"keys": keys if changed else None, "wrong": sorted(wrong), "free": free}
