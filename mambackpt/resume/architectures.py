"""Tiny models of published architectures: the code of `transformers`, weights from a seed.

To add one, add an entry to `ARCHITECTURES`. Nothing is downloaded: a configuration of a few
thousand weights is built in memory, so the arithmetic is the published one and the words are noise.
"""

import inspect
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache as memoized
from importlib import import_module
from typing import Any

import torch

from mambackpt.errors import CheckpointError, CheckpointValueError, checked_choice, checked_int

VOCABULARY = 512


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture: its recurrent layers, the grid on which they emit states, its sizes.

    >>> ARCHITECTURES["kimi-linear"].layer, ARCHITECTURES["kimi-linear"].alignment
    ('KDA', 16)

    ``alignment`` is in tokens from a query's start: what vllm 0.33.0's kernel of such a layer asks
    for (its short convolutions declare none; a window can be cut anywhere, so 1 here). ``scan`` is
    the function of the architecture's own module that computes the recurrence; a layer without a
    memory has none. ``sizes`` are arguments of the configuration class ``config``.
    """

    name: str
    layer: str
    alignment: int
    config: str
    scan: str | None
    sizes: Mapping[str, Any]


_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
_WIDE = {"vocab_size": VOCABULARY, "hidden_size": 64, "initializer_range": 0.1}
_MLP = {"intermediate_size": 96}
_LINEAR, _FULL = "linear_attention", "full_attention"
_LISTED = [
    Architecture(
        "qwen3-next",
        "gated delta rule",
        64,
        "Qwen3NextConfig",
        "torch_chunk_gated_delta_rule",
        {
            **_WIDE, **_HEADS, **_MLP, "num_experts": 0, "mlp_only_layers": [], "head_dim": 16,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR], "num_hidden_layers": 4,
            "linear_key_head_dim": 16, "linear_value_head_dim": 16,
            "linear_num_key_heads": 2, "linear_num_value_heads": 4,
        },
    ),
    Architecture(
        "kimi-linear",
        "KDA",
        16,
        "KimiLinearConfig",
        "chunk_kimi_delta_attention",
        {
            **_WIDE, **_MLP, "num_attention_heads": 4, "num_key_value_heads": 4,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR], "num_hidden_layers": 4,
            "mlp_layer_types": ["dense"] * 4, "kv_lora_rank": 24, "qk_rope_head_dim": 8,
            "v_head_dim": 16, "qk_nope_head_dim": 16, "linear_head_dim": 16, "linear_num_heads": 4,
            "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
        },
    ),
    Architecture(
        "mamba-2",
        "Mamba-2",
        1,
        "Mamba2Config",
        "mamba2_chunk_scan",
        {
            **_WIDE, "num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2,
            "num_hidden_layers": 3, "chunk_size": 64,
        },
    ),
    Architecture(
        "nemotron-h",
        "Mamba-2",
        1,
        "NemotronHConfig",
        "mamba2_chunk_scan",
        {
            **_WIDE, **_HEADS, **_MLP, "layers_block_type": [_LINEAR, _FULL, _LINEAR, "mlp"],
            "num_hidden_layers": 4, "head_dim": 16, "ssm_state_size": 16, "mamba_num_heads": 8,
            "mamba_head_dim": 16, "n_groups": 2, "chunk_size": 64,
        },
    ),
    Architecture(
        "falcon-h1",
        "Mamba-2 beside attention",
        1,
        "FalconH1Config",
        "mamba2_chunk_scan",
        {
            **_WIDE, **_HEADS, **_MLP, "num_hidden_layers": 2, "head_dim": 16, "mamba_d_ssm": 128,
            "mamba_n_heads": 8, "mamba_d_head": 16, "mamba_n_groups": 2, "mamba_d_state": 16,
            "mamba_chunk_size": 64, "mamba_rms_norm": True,
        },
    ),
    Architecture(
        "lfm2",
        "short convolution",
        1,
        "Lfm2Config",
        None,
        {
            **_WIDE, **_HEADS, **_MLP, "block_auto_adjust_ff_dim": False, "num_hidden_layers": 4,
            "layer_types": ["conv", _FULL, "conv", "conv"],
        },
    ),
]  # fmt: skip
ARCHITECTURES: dict[str, Architecture] = {one.name: one for one in _LISTED}


def transformers() -> Any:
    """Return the `transformers` package, offline and quiet.

    >>> transformers().__name__
    'transformers'

    Raises CheckpointValueError where it is not installed.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when the package is first imported
    try:
        package = import_module("transformers")
    except ImportError as error:
        raise CheckpointValueError(
            f"transformers cannot be imported ({error}); expected the package, whose models these "
            "are. Try installing this kit with its extra [models]."
        ) from error
    package.logging.set_verbosity_error()  # it would say that it computes with plain torch: it does
    return package


class CacheUnusedError(CheckpointError, AssertionError):
    """A model was given a cache and did not use it: its answer is that of a cold start."""


@dataclass(slots=True)
class Run:
    """What one forward left: logits [tokens, vocabulary], the cache, and what its layers got.

    ``raw`` holds the convolution's inputs of each recurrent layer, [tokens, width]; ``scans`` the
    arguments of each scan by name (none for a single token, nor where there is no memory).
    """

    logits: torch.Tensor
    cache: Any
    raw: list[torch.Tensor] = field(default_factory=list)
    scans: list[dict[str, Any]] = field(default_factory=list)


def recurrent_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold a window, in order."""
    return [layer for layer in cache.layers if hasattr(layer, "conv_states")]


def attention_layers(cache: Any) -> list[Any]:
    """Return the layers of a cache that hold keys and values, in order; some hold both kinds."""
    return [layer for layer in cache.layers if hasattr(layer, "get_seq_length")]


@dataclass(frozen=True, slots=True, eq=False)
class TinyModel:
    """A model with random weights, and how to run it.

    >>> model = load_model("lfm2")
    >>> model.run([5, 6, 7]).logits.shape
    torch.Size([3, 512])
    """

    architecture: Architecture
    module: Any

    def new_cache(self) -> Any:
        """Return an empty cache with the layers of this model."""
        return transformers().DynamicCache(config=self.module.config)

    def run(self, tokens: Sequence[int], cache: Any = None) -> Run:
        """Compute tokens after those of a cache, which is then one of all of them.

        Raises CacheUnusedError where the model left the cache as it was.
        """
        used = self.new_cache() if cache is None else cache
        before = _fingerprint(used)
        run = Run(torch.empty(0), used)
        with torch.no_grad(), one_thread(), self._recorded(run):
            ids = torch.tensor([list(tokens)], dtype=torch.int64)
            answer = self.module(ids, cache=used, use_cache=True)
        run.logits = answer.logits[0]
        _check_used(before, used, answer, len(tokens))
        if not run.raw:  # a single token after others goes by another path
            run.raw = [
                layer.conv_states[0][0, :, -1:].T.clone() for layer in recurrent_layers(used)
            ]
        return run

    @contextmanager
    def _recorded(self, run: Run) -> Iterator[None]:
        """Note what goes into convolutions and scans while the model computes as ever."""
        update = run.cache.update_conv_state

        def noted(conv_states: torch.Tensor, *words: Any, **more: Any) -> Any:
            run.raw.append(conv_states[0].T.clone())
            return update(conv_states, *words, **more)

        run.cache.update_conv_state = noted
        name = self.architecture.scan
        home = import_module(type(self.module).__module__)
        scan = getattr(home, name) if name else None
        if scan is not None:
            arguments = inspect.signature(scan)

            def scanned(*words: Any, **more: Any) -> Any:
                run.scans.append(dict(arguments.bind(*words, **more).arguments))
                return scan(*words, **more)

            setattr(home, str(name), scanned)
        try:
            yield
        finally:
            del run.cache.update_conv_state
            if scan is not None:
                setattr(home, str(name), scan)


@contextmanager
def one_thread() -> Iterator[None]:
    """Compute on one thread: a sum is then taken in one order, however many cores there are.

    >>> with one_thread():
    ...     torch.get_num_threads()
    1
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def _fingerprint(cache: Any) -> list[Any]:
    """The windows and attention lengths of a cache, to see afterwards whether they moved."""
    windows = [layer.conv_states[0] for layer in recurrent_layers(cache)]
    lengths = [layer.get_seq_length() for layer in attention_layers(cache)]
    return [[None if window is None else window.clone() for window in windows], lengths]


def _check_used(before: list[Any], cache: Any, answer: Any, tokens: int) -> None:
    windows, lengths = before
    after = _fingerprint(cache)
    # The same token again may leave a window as it was, but not all of them.
    still = all(
        new is None or (old is not None and torch.equal(old, new))
        for old, new in zip(windows, after[0], strict=True)
    )
    grown = [length + tokens for length in lengths] == after[1]
    if still or not grown or getattr(answer, "cache", cache) is not cache:
        raise CacheUnusedError(
            f"the model computed {tokens} tokens and left the cache as it was; expected "
            "windows to move and every attention layer to grow. Try the argument that this model's "
            "forward has: cache=."
        )


@memoized
def load_model(name: str, seed: int = 0, **sizes: Any) -> TinyModel:
    """Return a tiny model of an architecture with weights from a seed; the same one each time.

    >>> load_model("mamba-2").architecture.layer
    'Mamba-2'

    ``sizes`` replace those of `ARCHITECTURES`. Raises CheckpointValueError for another name, and
    where `transformers` is not installed.
    """
    architecture = ARCHITECTURES[checked_choice("model", name, ARCHITECTURES)]
    seed = checked_int("seed", seed, least=0, unit="seeds")
    package = transformers()
    listed = {key: list(v) if isinstance(v, tuple) else v for key, v in sizes.items()}
    config = getattr(package, architecture.config)(**{**architecture.sizes, **listed})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        module = package.AutoModelForCausalLM.from_config(config)
        _remember(module)
    return TinyModel(architecture, module.eval().requires_grad_(False))


def _remember(module: Any) -> None:
    """Let memories carry weight, as trained ones do.

    Steps from 0.001 to 0.1, Mamba-2's own range: some defaults forget within a token. And a Mamba-2
    layer that adds a tenth of its input: with untrained projections the whole of it hides what was
    read from the memory.
    """
    for part in module.modules():
        bias, skip = getattr(part, "dt_bias", None), getattr(part, "D", None)
        if isinstance(bias, torch.nn.Parameter):
            step = 10 ** (2 * torch.rand_like(bias) - 3)
            bias.data = step + (-torch.expm1(-step)).log()  # softplus of this is the step
        if isinstance(skip, torch.nn.Parameter):
            skip.data = torch.full_like(skip, 0.1)


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Return a prompt of random token ids.

    >>> random_prompt(3) == random_prompt(5)[:3]
    True
    """
    generator = torch.Generator().manual_seed(seed)
    return [int(torch.randint(VOCABULARY, (), generator=generator)) for _ in range(length)]
