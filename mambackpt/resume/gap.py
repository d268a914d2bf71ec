"""Attention matches more tokens than a state has read: ways to close that gap, measured.

The model is Qwen3-Next's, with two blocks of three recurrent layers and one of attention. A state
exists after 64 tokens, keys and values after 96; the prompt has 128. Each way brings the states to
96, and the prompt goes on from there.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch

from mambackpt.resume.architectures import (
    TinyModel,
    attention_layers,
    load_model,
    one_thread,
    random_prompt,
)
from mambackpt.resume.check import Comparison, compare, spread
from mambackpt.resume.state import LayerState, take_attention, take_states

STATE, ATTENTION, PROMPT = 64, 96, 128
_BLOCK = ("linear_attention",) * 3 + ("full_attention",)


def gap_model() -> TinyModel:
    """Return the model that the ways are tried on: eight layers, attention in the fourth and last.

    >>> len(gap_model().module.model.layers)
    8
    """
    return load_model("qwen3-next", layer_types=2 * _BLOCK, num_hidden_layers=8)


@dataclass(frozen=True, slots=True)
class Way:
    """One way to close the gap: its error in each recurrent layer's state, in the answer, its cost.

    ``errors`` are relative to the largest element of a state; ``cost`` is the share of the matrix
    products that the whole model takes for the gap's tokens; ``kept_bytes`` is what it needs to
    have been kept per token of the gap, beside keys and values.
    """

    name: str
    errors: tuple[float, ...]
    comparison: Comparison
    cost: float
    kept_bytes: int = 0

    @property
    def exact_layers(self) -> int:
        """How many recurrent layers have the right state, as far as the model rounds."""
        return sum(error < 1e-4 for error in self.errors)


@contextmanager
def _left_out(model: TinyModel, *parts: str) -> Iterator[None]:
    """Let parts of the attention layers add nothing to the residual stream."""
    with ExitStack() as stack:
        for layer in model.module.model.layers:
            if hasattr(layer, "self_attn"):
                for part in parts:
                    chosen = getattr(layer, part)
                    stack.enter_context(patch.object(chosen, "forward", _nothing(part)))
        yield


def _nothing(part: str) -> Callable[..., Any]:
    def forward(hidden_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        none = torch.zeros_like(hidden_states)
        return (none, None) if part == "self_attn" else none

    return forward


def _kept_inputs(model: TinyModel, prompt: list[int]) -> list[torch.Tensor]:
    """Run the whole prompt and keep what goes into each recurrent layer."""
    kept: list[torch.Tensor] = []

    def note(_: Any, words: Any, more: Any) -> None:
        kept.append((words[0] if words else more["hidden_states"]).clone())

    mixers = [layer.linear_attn for layer in model.module.model.layers if _is_recurrent(layer)]
    hooks = [mixer.register_forward_pre_hook(note, with_kwargs=True) for mixer in mixers]
    model.run(prompt)
    for hook in hooks:
        hook.remove()
    return kept


def _is_recurrent(layer: Any) -> bool:
    return hasattr(layer, "linear_attn")


@one_thread()
def gap_ways(model: TinyModel | None = None) -> list[Way]:
    """Return each way to bring the states from 64 to 96 tokens, with its error and its cost.

    >>> [(way.name, way.comparison.equal) for way in gap_ways()][:2]
    [('the whole model', True), ('recurrent layers alone', False)]
    """
    model = model or gap_model()
    prompt = random_prompt(PROMPT)
    cold, right = model.run(prompt), model.run(prompt[:ATTENTION])
    truth = take_states(model.architecture, right.cache)
    gap = torch.tensor([prompt[STATE:ATTENTION]])
    inputs = _kept_inputs(model, prompt[:ATTENTION])

    def whole(cache: Any) -> None:
        model.module.model(gap, cache=cache, use_cache=True)

    def without(*parts: str) -> Callable[[Any], None]:
        def run(cache: Any) -> None:
            with _left_out(model, *parts):
                whole(cache)

        return run

    def from_inputs(cache: Any) -> None:
        mixers = [la.linear_attn for la in model.module.model.layers if _is_recurrent(la)]
        for mixer, hidden in zip(mixers, inputs, strict=True):
            mixer(hidden_states=hidden[:, STATE:], cache=cache)

    ways: dict[str, Callable[[Any], None]] = {
        "the whole model": whole,
        "recurrent layers alone": without("self_attn", "mlp"),
        "all but attention itself": without("self_attn"),
        "recurrent layers, inputs kept": from_inputs,
        "nothing: the state of 64": lambda _: None,
    }
    whole_cost = _flops(whole, model.run(prompt[:STATE]).cache)
    found = []
    for name, way in ways.items():
        cache = model.run(prompt[:STATE]).cache
        cost = _flops(way, cache) / whole_cost
        _append_attention(cache, take_attention(right.cache))
        errors = _errors(take_states(model.architecture, cache), truth)
        rest = model.run(prompt[ATTENTION:], cache).logits
        compared = compare(cold.logits[ATTENTION:], rest, spread(model))
        kept = sum(hidden[0, 0].nbytes for hidden in inputs) if way is from_inputs else 0
        found.append(Way(name, errors, compared, cost, kept))
    return found


def _append_attention(cache: Any, attention: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Append the cached keys and values of the gap, where a way has not computed them itself."""
    for layer, (keys, values) in zip(attention_layers(cache), attention, strict=True):
        have = layer.get_seq_length()
        if have < ATTENTION:
            layer.update(keys[have:].transpose(0, 1)[None], values[have:].transpose(0, 1)[None])


def _errors(states: list[LayerState], truth: list[LayerState]) -> tuple[float, ...]:
    return tuple(
        float((one.memory - right.memory).abs().max() / right.memory.abs().max())
        for one, right in zip(states, truth, strict=True)
        if one.memory is not None and right.memory is not None
    )


def _flops(way: Callable[[Any], None], cache: Any) -> int:
    """Run a way and return the floating-point operations of its matrix products."""
    from torch.utils.flop_counter import FlopCounterMode

    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        way(cache)
    return int(counter.get_total_flops())
