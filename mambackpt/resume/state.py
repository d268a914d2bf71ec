"""States out of a model's cache and into a fresh one: windows, memories, keys and values.

S = convolution width less one. A window is [width, S], oldest input first; a memory is [H, V, K] as
engines keep it. The models keep S + 1 inputs, and delta-rule memories as [H, K, V].
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mambackpt.resume.architectures import Architecture, attention_layers, recurrent_layers

_TURNED = ("gated delta rule", "KDA")  # layers whose models keep a memory with K before V


@dataclass(frozen=True, slots=True)
class LayerState:
    """What a recurrent layer knows after a token; a layer of short convolutions has no memory."""

    window: torch.Tensor
    memory: torch.Tensor | None


def take_states(architecture: Architecture, cache: Any) -> list[LayerState]:
    """Return copies of all states of a cache, in the engine's layout.

    >>> from mambackpt.resume.architectures import load_model
    >>> model = load_model("kimi-linear")
    >>> [state, *_] = take_states(model.architecture, model.run([1, 2, 3, 4]).cache)
    >>> state.window.shape, state.memory.shape
    (torch.Size([192, 3]), torch.Size([4, 16, 16]))
    """
    states = []
    for layer in recurrent_layers(cache):
        memory = layer.recurrent_states[0]
        if memory is not None:
            memory = _turned(architecture, memory[0]).clone(memory_format=torch.contiguous_format)
        states.append(LayerState(layer.conv_states[0][0, :, 1:].clone(), memory))
    return states


def take_attention(cache: Any) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return copies of keys and values of each attention layer, each [tokens, heads, channels]."""
    return [
        (layer.keys[0].transpose(0, 1).clone(), layer.values[0].transpose(0, 1).clone())
        for layer in attention_layers(cache)
    ]


def fill_cache(
    architecture: Architecture,
    cache: Any,
    states: Sequence[LayerState],
    attention: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> Any:
    """Fill an empty cache, and return it: as if the model had computed these tokens itself.

    The input that no later token sees, which the models keep before a window, becomes NaN: were
    it read, it would show.
    """
    for layer, (keys, values) in zip(attention_layers(cache), attention, strict=True):
        layer.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
    for layer, state in zip(recurrent_layers(cache), states, strict=True):
        unseen = torch.full_like(state.window[:, :1], torch.nan)
        layer.update_conv_state(torch.cat([unseen, state.window], 1)[None].contiguous())
        if state.memory is not None:
            layer.update_recurrent_state(_turned(architecture, state.memory)[None].contiguous())
    return cache


def _turned(architecture: Architecture, memory: torch.Tensor) -> torch.Tensor:
    return memory.transpose(-1, -2) if architecture.layer in _TURNED else memory
