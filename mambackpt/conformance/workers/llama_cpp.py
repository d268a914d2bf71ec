"""Serve token lists with llama.cpp's own server and say what it kept and reused.

A script for an environment of its own (xllamacpp, gguf, numpy; a CPU with AVX2). One JSON line in,
one JSON line out, in order:

    {"settings": {"batch": 64, "ubatch": 64, "checkpoints": 32, "min_step": 8192,
                  "host_cache": true, "model": "mamba"},
     "requests": [{"tokens": [260, 261], "users": [], "generated": 1, "forced": 262}]}
    {"requests": [{"cached": 0, "created": [], "erased": []}]}

``model`` is "mamba" (recurrent layers only) or "lfm2" (attention too): random weights, made here.
``forced`` is the token that all outputs are; without it they are letters of the model's choice.
A request with ``users`` is sent as a chat, as only there the server knows where messages begin: its
tokens are LETTERS, and USER exactly at the starts. With ``"top": n`` an answer has the n likeliest
first tokens, as pairs of token and log-probability. A case that fails is answered
{"error": "..."}.

The server does not say what it keeps: that is read from its log.
"""

import json
import os
import re
import sys
import tempfile
import time
import urllib.request
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import xllamacpp
from gguf import GGUFWriter, TokenType

Json = dict[str, Any]

LETTERS = range(259, 285)  # a to z, after three special tokens and 256 bytes
USER, FILLER = 285, 286
VOCABULARY = 287
USER_TEXT = "<|im_start|>"
TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'user' %}" + USER_TEXT + "{% endif %}"
    "{{ m.content }}{% endfor %}"
)
CONTEXT = 262_144

TASK = re.compile(r"slot\s+\S+ id\s+\d+ \| task (\d+) \|\s+(.*)")
TOKENS = re.compile(r"n_tokens = (\d+)")
CREATED = "created context checkpoint"
ERASED = ("erased invalidated", "erasing old", "erasing context checkpoint", "superseding")
DONE = "stop processing"


# --- two tiny models ------------------------------------------------------------------------------


class Weights:
    """A GGUF file in the making: random matrices, and a vocabulary of letters."""

    def __init__(self, path: Path, kind: str, seed: int) -> None:
        self.writer = GGUFWriter(path, kind)
        self.random = np.random.default_rng(seed)

    def matrix(self, name: str, *shape: int) -> None:
        """Add a random matrix of one tenth's size."""
        values = self.random.standard_normal(shape).astype(np.float32) * np.float32(0.1)
        self.writer.add_tensor(name + ".weight", values)

    def ones(self, name: str, *shape: int) -> None:
        """Add a tensor of ones."""
        self.writer.add_tensor(name, np.ones(shape, np.float32))

    def vocabulary(self) -> None:
        """Add special tokens, bytes, letters, and two more special tokens: USER and FILLER."""
        letters = [bytes([c]) for c in range(ord("a"), ord("z") + 1)]
        special = [b"<unk>", b"<s>", b"</s>"]
        tokens = special + [b"<0x%02X>" % i for i in range(256)] + letters
        kinds = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL]
        kinds += [TokenType.BYTE] * 256 + [TokenType.NORMAL] * 26 + [TokenType.CONTROL] * 2
        add = self.writer
        add.add_tokenizer_model("llama")
        add.add_token_list([*tokens, USER_TEXT.encode(), b"<|im_end|>"])
        add.add_token_scores([0.0] * VOCABULARY)
        add.add_token_types([int(kind) for kind in kinds])
        add.add_bos_token_id(1)
        add.add_eos_token_id(2)
        add.add_unk_token_id(0)
        add.add_add_bos_token(False)
        add.add_add_eos_token(False)
        add.add_add_space_prefix(False)

    def finish(self) -> None:
        """Write the file."""
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


def make_mamba(path: Path) -> None:
    """One Mamba layer: width 32, inner 64, state 4, convolution 4, step rank 2."""
    width, inner, state, taps, rank = 32, 64, 4, 4, 2
    model = Weights(path, "mamba", seed=0)
    model.vocabulary()
    add = model.writer
    add.add_context_length(CONTEXT)
    add.add_embedding_length(width)
    add.add_feed_forward_length(0)
    add.add_head_count(0)
    add.add_block_count(1)
    add.add_ssm_conv_kernel(taps)
    add.add_ssm_inner_size(inner)
    add.add_ssm_state_size(state)
    add.add_ssm_time_step_rank(rank)
    add.add_layer_norm_rms_eps(1e-5)
    model.matrix("token_embd", VOCABULARY, width)
    model.ones("output_norm.weight", width)
    model.ones("blk.0.attn_norm.weight", width)
    model.matrix("blk.0.ssm_in", 2 * inner, width)
    model.matrix("blk.0.ssm_conv1d", inner, taps)
    model.ones("blk.0.ssm_conv1d.bias", inner)
    model.matrix("blk.0.ssm_x", rank + 2 * state, inner)
    model.matrix("blk.0.ssm_dt", inner, rank)
    model.ones("blk.0.ssm_dt.bias", inner)
    add.add_tensor("blk.0.ssm_a", -np.ones((inner, state), np.float32))
    model.ones("blk.0.ssm_d", inner)
    model.matrix("blk.0.ssm_out", width, inner)
    model.finish()


def make_lfm2(path: Path) -> None:
    """Three layers: short convolution, attention, short convolution."""
    width, heads, taps = 32, 2, 3
    model = Weights(path, "lfm2", seed=1)
    model.vocabulary()
    add = model.writer
    add.add_context_length(CONTEXT)
    add.add_embedding_length(width)
    add.add_feed_forward_length(width)
    add.add_block_count(3)
    add.add_head_count(heads)
    add.add_head_count_kv([0, 1, 0])
    add.add_rope_freq_base(1e6)
    add.add_layer_norm_rms_eps(1e-5)
    add.add_vocab_size(VOCABULARY)
    add.add_shortconv_l_cache(taps)
    model.matrix("token_embd", VOCABULARY, width)
    model.ones("token_embd_norm.weight", width)
    for layer in range(3):
        name = f"blk.{layer}."
        model.ones(name + "attn_norm.weight", width)
        model.ones(name + "ffn_norm.weight", width)
        for part in ("gate", "down", "up"):
            model.matrix(f"{name}ffn_{part}", width, width)
        if layer == 1:
            model.matrix(name + "attn_q", width, width)
            model.matrix(name + "attn_k", width // heads, width)
            model.matrix(name + "attn_v", width // heads, width)
            model.matrix(name + "attn_output", width, width)
            model.ones(name + "attn_q_norm.weight", width // heads)
            model.ones(name + "attn_k_norm.weight", width // heads)
        else:
            model.matrix(name + "shortconv.conv", width, taps)
            model.matrix(name + "shortconv.in_proj", 3 * width, width)
            model.matrix(name + "shortconv.out_proj", width, width)
    model.finish()


MODELS = {"mamba": make_mamba, "lfm2": make_lfm2}


# --- the server -----------------------------------------------------------------------------------


class Server:
    """A server in this process, asked over its own socket."""

    def __init__(self, settings: Json, model: Path, longest: int) -> None:
        params = xllamacpp.CommonParams()
        params.model.path = str(model)
        params.n_ctx = max(8192, -(-(longest + 64) // 1024) * 1024)
        params.n_batch = settings.get("batch", 2048)
        params.n_ubatch = settings.get("ubatch", 512)
        params.n_ctx_checkpoints = settings.get("checkpoints", 32)
        step = "checkpoint_min_step"
        if not hasattr(params, step):  # b9294 and before
            step = "checkpoint_every_nt"
        setattr(params, step, settings.get("min_step", 8192))
        params.cache_ram_mib = 8192 if settings.get("host_cache", True) else 0
        params.n_parallel = 1
        params.chat_template = TEMPLATE
        params.warmup = params.fit_params = False
        params.verbosity = 5
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
        self.server = xllamacpp.Server(params)
        self.open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def ask(self, request: Json) -> Json:
        """Send one request and return the reply."""
        bias: list[list[float]] = [
            [token, -100] for token in range(259)
        ]  # letters only: others may be no whole text
        if "forced" in request:
            bias = [[request["forced"], 1e4]]
        body = {
            "n_predict": request.get("generated", 1),
            "temperature": 0.0,
            "ignore_eos": True,
            "cache_prompt": True,
            "n_probs": request.get("top", 0),
            "logit_bias": bias,
        }
        if request.get("users"):
            path, body["messages"] = "/v1/chat/completions", messages_of(request)
        else:
            path, body["prompt"] = "/completion", request["tokens"]
        address = self.server.listening_address + path
        headers = {"Content-Type": "application/json"}
        with self.open(urllib.request.Request(address, json.dumps(body).encode(), headers)) as got:
            reply: Json = json.load(got)
        return reply


def messages_of(request: Json) -> list[Json]:
    """The chat whose tokens are the request's, as TEMPLATE writes it."""
    tokens, users = request["tokens"], request["users"]
    if [place for place, token in enumerate(tokens) if token == USER] != users:
        raise ValueError(f"users is {users}; expected the places of token {USER}")
    ends = [*users, len(tokens)]
    texts = [text_of(tokens[: ends[0]])]
    texts += [text_of(tokens[a + 1 : b]) for a, b in pairwise(ends)]
    messages = [{"role": "user", "content": text} for text in texts[1:]]
    return [{"role": "system", "content": texts[0]}, *messages] if texts[0] else messages


def text_of(tokens: list[int]) -> str:
    """The text of tokens that are letters."""
    if not set(tokens) <= set(LETTERS):
        raise ValueError(f"tokens outside {LETTERS} in a request with users")
    return "".join(chr(ord("a") + token - LETTERS[0]) for token in tokens)


# --- the log --------------------------------------------------------------------------------------


def read_log(path: Path, requests: int) -> list[Json]:
    """What happened to each request; the log is written late, so wait for its end."""
    for _ in range(500):
        lines = path.read_text(errors="replace").splitlines()
        tasks: dict[int, list[str]] = {}
        for task, said in (m.groups() for m in map(TASK.search, lines) if m):
            tasks.setdefault(int(task), []).append(said)
        done = [said for said in tasks.values() if any(DONE in line for line in said)]
        if len(done) == requests:
            return [events(said) for said in done]
        time.sleep(0.01)
    raise RuntimeError(f"{requests} requests, but the log tells of {len(done)}")


def events(said: list[str]) -> Json:
    """Positions created, in order of time, and erased, in order of position."""
    created: list[int] = []
    erased: list[int] = []
    for line in said:
        position = TOKENS.search(line)
        if position and line.startswith((CREATED, *ERASED)):
            (created if line.startswith(CREATED) else erased).append(int(position[1]))
    return {"created": created, "erased": sorted(erased)}


# --- cases ----------------------------------------------------------------------------------------


def run(case: Json, models: dict[str, Path], log: Path) -> Json:
    """Serve one case; ``log`` is the file that this process writes to."""
    requests, settings = case["requests"], case["settings"]
    longest = max(len(r["tokens"]) + r.get("generated", 1) for r in requests)
    server = Server(settings, models[settings.get("model", "mamba")], longest)
    answers = []
    for request in requests:
        reply = server.ask(request)
        timings = reply["timings"]
        if timings["cache_n"] + timings["prompt_n"] != len(request["tokens"]):
            raise RuntimeError(f"the server saw another prompt: {timings}, {request}")
        answer = {"cached": timings["cache_n"]}
        if request.get("top"):
            [first, *_] = reply["completion_probabilities"]
            answer["top"] = [[t["id"], round(t["logprob"], 5)] for t in first["top_logprobs"]]
        answers.append(answer)
    del server
    told = read_log(log, len(requests))
    return {"requests": [a | events for a, events in zip(answers, told, strict=True)]}


def run_apart(line: str, models: dict[str, Path], folder: Path) -> str:
    """Answer one case from a process of its own.

    A server's first micro-batch stays with its process (a static in its code), and a server that
    aborts ends it.
    """
    log, answer = folder / "log", folder / "answer"
    answer.unlink(missing_ok=True)
    child = os.fork()
    if child == 0:
        file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(file, 1)
        os.dup2(file, 2)
        try:
            said = run(json.loads(line), models, log)
        except Exception as error:
            said = {"error": f"{type(error).__name__}: {error}"}
        answer.write_text(json.dumps(said, separators=(",", ":")))
        os._exit(0)
    _, status = os.waitpid(child, 0)
    if answer.exists():
        return answer.read_text()
    return json.dumps({"error": f"the server's process ended with status {status}"})


def main() -> int:
    """Answer every case on standard input; exit status 3 on a machine that cannot."""
    cpu = Path("/proc/cpuinfo")
    if cpu.exists() and "avx2" not in cpu.read_text():
        print("skipped: llama.cpp's wheel needs a CPU with AVX2", file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as name:
        models = {kind: Path(name) / f"{kind}.gguf" for kind in MODELS}
        for kind, make in MODELS.items():
            make(models[kind])
        for line in sys.stdin:
            print(run_apart(line, models, Path(name)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
