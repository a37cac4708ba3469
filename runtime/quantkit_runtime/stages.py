"""Pipeline stages: layers of other stages are not built, hidden states go from rank to rank.

The model's own forward runs on every rank, with an empty seat in the place of what other stages hold. So masks,
positions and rotary embeddings are computed everywhere as transformers computes them, and nothing about a model needs
to be known but what a layer hands to the next one (`Architecture.carried_state`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Architecture, Stage
from quantkit.archs.modeling import decoder_layers
from quantkit_runtime.parallel import Ranks, Team


class _LayerSeat(nn.Module):
    """In the place of another stage's layer: passes on what came in, and counts its positions in the cache.

    transformers asks any layer of the cache how many tokens it holds, so it holds one number for each of them.
    """

    def __init__(self, index: int, carries: Mapping[str, int]) -> None:
        super().__init__()
        self._index, self._carries = index, carries

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Any:
        cache = kwargs.get("past_key_values")
        if cache is not None:
            self._count(cache, hidden_states)
        if not self._carries:
            return hidden_states
        output: list[Tensor | None] = [hidden_states, *[None] * max(self._carries.values())]
        for name, position in self._carries.items():
            output[position] = kwargs.get(name)
        return tuple(output)

    def _count(self, cache: Any, hidden_states: Tensor) -> None:
        layer = cache.layers[self._index]
        if hasattr(layer, "keys"):
            batch, tokens = hidden_states.shape[:2]
            cache.update(*[hidden_states.new_zeros((batch, 1, tokens, 1))] * 2, self._index)
        else:  # linear attention has a state in place of positions
            layer.has_previous_state = dict.fromkeys(layer.has_previous_state, True)


class _EmbeddingSeat(nn.Module):
    """Hidden states of the right shape where they come from the stage before."""

    def __init__(self, hidden: int, dtype: torch.dtype) -> None:
        super().__init__()
        self._hidden, self._dtype = hidden, dtype

    def forward(self, input_ids: Tensor) -> Tensor:
        return torch.zeros((*input_ids.shape, self._hidden), dtype=self._dtype, device=input_ids.device)


class _HeadSeat(nn.Module):
    """Logits of the right shape where they come from the last stage."""

    def __init__(self, vocab: int) -> None:
        super().__init__()
        self._vocab = vocab

    def forward(self, hidden_states: Tensor) -> Tensor:
        return hidden_states.new_zeros((*hidden_states.shape[:2], self._vocab))  # there may be parallel streams


def vacate(model: Any, arch: Architecture, ranks: Ranks) -> None:
    """Take what other stages hold out of a skeleton."""
    mesh, stage = ranks.mesh, ranks.at.pp
    if mesh.pp == 1:
        return
    _, layers = decoder_layers(arch, model)
    mine = mesh.stage_layers(len(layers))[stage]
    for index in range(len(layers)):
        if index not in mine:
            layers[index] = _LayerSeat(index, arch.carried_state)
    table = model.get_input_embeddings()
    if stage > 0:
        model.set_input_embeddings(_EmbeddingSeat(table.weight.shape[1], table.weight.dtype))
    if stage < mesh.pp - 1:
        model.set_output_embeddings(_HeadSeat(table.weight.shape[0]))
        _vacate_end(model, arch)


def _vacate_end(model: Any, arch: Architecture) -> None:
    """Take out what stands between the layers and the output head: the final norm, the joining of streams."""
    decoder = model.get_decoder()
    prefix = next(name for name, module in model.named_modules() if module is decoder)
    for name, module in list(decoder.named_children()):
        keys = [arch.parse(f"{prefix}.{name}.{leaf}") for leaf, _ in module.named_parameters()]
        if keys and all(key is not None and arch.role(key.role).stage is Stage.LAST for key in keys):
            setattr(decoder, name, nn.Identity())


def connect(model: Any, arch: Architecture, ranks: Ranks) -> None:
    """Let hidden states go from stage to stage, and the logits of the last one to all."""
    mesh, stage, team = ranks.mesh, ranks.at.pp, ranks.pp
    if mesh.pp == 1:
        return
    _, layers = decoder_layers(arch, model)
    mine = mesh.stage_layers(len(layers))[stage]
    if stage > 0:
        layers[mine[0]].register_forward_pre_hook(_receive(team, arch.carried_state), with_kwargs=True)
    if stage < mesh.pp - 1:
        layers[mine[-1]].register_forward_hook(_send(team, arch.carried_state))
    model.get_output_embeddings().register_forward_hook(lambda _, __, logits: team.broadcast(logits, mesh.pp - 1))


def _send(team: Team, carries: Mapping[str, int]) -> Any:
    def hook(_: nn.Module, __: Any, output: Any) -> None:
        parts = output if isinstance(output, tuple) else (output,)
        team.send(parts[0], team.index + 1)
        for position in carries.values():
            _send_any(team, parts[position])

    return hook


def _receive(team: Team, carries: Mapping[str, int]) -> Any:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        hidden = args[0] if args else kwargs["hidden_states"]
        hidden = team.receive(hidden, team.index - 1)
        carried = {name: _receive_any(team, hidden) for name in carries}
        if args:
            return (hidden, *args[1:]), {**kwargs, **carried}
        return args, {**kwargs, "hidden_states": hidden, **carried}

    return hook


def _send_any(team: Team, x: Tensor) -> None:
    """Send indices, whose shape the other side does not know: first how many dimensions there are, then which."""
    shape = torch.tensor(x.shape, device=x.device)
    team.send(shape.new_tensor([len(shape)]), team.index + 1)
    team.send(shape, team.index + 1)
    team.send(x.long(), team.index + 1)


def _receive_any(team: Team, like: Tensor) -> Tensor:
    count = torch.zeros(1, dtype=torch.long, device=like.device)
    count = team.receive(count, team.index - 1)
    shape = team.receive(count.new_zeros(int(count)), team.index - 1)
    return team.receive(count.new_zeros(tuple(shape.tolist())), team.index - 1)
