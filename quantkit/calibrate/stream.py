"""transformers' model, one decoder layer in memory at a time.

The model is built on `meta`; embeddings, final norm and head get their weights. To run layer i, the model's own
forward is called for each batch with every other layer passing its input through: layer i gets the hidden states that
the model hands to it there, and exactly the arguments (masks, position embeddings, ...) that this model calls it with,
so nothing needs to be recorded or understood. What enters layer i + 1 is kept for the next round. The results are bit
for bit those of the whole model in memory.

Peak memory: embeddings and head, one layer in the compute dtype and its stored tensors while they are assembled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Key
from quantkit.archs.modeling import build_skeleton, load_config, parameter_key, parameter_value, set_tensor
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError

GetTensor = Callable[[Key], Tensor]


class _Mode(Enum):
    PASS = 0  # return what came in
    FEED = 1  # replace what came in, run nothing
    RUN = 2  # replace what came in (unless there is nothing to replace it with) and run the layer


class _Seat:
    """What a decoder layer's `forward` is replaced with: passes hidden states through, or feeds and runs the layer."""

    def __init__(self, layer: nn.Module) -> None:
        self._forward = layer.forward
        self.mode = _Mode.PASS
        self.feed: Tensor | None = None
        self.received: Tensor | None = None
        self.returned: Tensor | None = None
        layer.forward = self  # an instance attribute shadows the method, on purpose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        self.received = hidden
        if self.feed is not None and self.mode is not _Mode.PASS:
            hidden = self.feed
        if self.mode is not _Mode.RUN:
            return hidden
        output = self._forward(hidden, *args, **kwargs)
        self.returned = output[0] if isinstance(output, tuple) else output
        return output


class LayerStream:
    """A model whose decoder layers are materialized one at a time.

    Args:
        source: checkpoint.
        dtype: of parameters and computation.
        device: where layers run.
        experts, attention: implementations registered with transformers; "" leaves transformers' choice.

    Attributes:
        model: the skeleton.
        layers: its decoder layers, parameters on `meta` outside `materialized`.
        prefix: of a layer's parameter names, `model.layers`.
    """

    def __init__(
        self, source: Source, *, dtype: torch.dtype, device: torch.device, experts: str = "", attention: str = ""
    ) -> None:
        self.source, self.dtype, self.device = source, dtype, device
        config = load_config(source.root)
        self.model = build_skeleton(config, dtype=dtype, experts=experts, attention=attention)
        self.prefix = _layers_prefix(source, self.model)
        layers = self.model.get_submodule(self.prefix)
        assert isinstance(layers, nn.ModuleList)
        self.layers = layers
        self._place_outside()
        self._seats = [_Seat(layer) for layer in layers]

    def __len__(self) -> int:
        return len(self.layers)

    def _place_outside(self) -> None:
        """Weights outside the layers, and every buffer that the class computed, on the device."""
        for name, buffer in list(self.model.named_buffers()):
            set_tensor(self.model, name, buffer.to(self.device))
        placed: dict[Key, Tensor] = {}  # a tied table is placed twice and read once
        stored = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        for name in [*stored, *_stored_buffers(self.model)]:
            if not name.startswith(f"{self.prefix}."):
                key = self._stored_key(name)
                if key not in placed:
                    placed[key] = self._value(name, key, self.source.get)
                set_tensor(self.model, name, placed[key])

    def _stored_key(self, name: str) -> Key:
        """Key of a parameter; a tied output head is the embedding table."""
        key = parameter_key(self.source.arch, name)
        return Key(None, "embed") if key == Key(None, "lm_head") and self.source.tied else key

    def _value(self, name: str, key: Key, get: GetTensor) -> Tensor:
        if key.layer is None:
            value = get(key)
        else:
            value = parameter_value(self.source.arch, self.source.dims, name, get)
        keep_float32 = key.role in self.source.arch.float32_parameters
        return value.to(self.device, torch.float32 if keep_float32 else self.dtype)

    @contextmanager
    def materialized(self, layer: int, get: GetTensor | None = None) -> Iterator[nn.Module]:
        """Give a layer its weights inside the block; each stored tensor is read once.

        Args:
            layer: index.
            get: reads a key in canonical orientation; `Source.get` by default. Statistics of weights go here.
        """
        module = self.layers[layer]
        placeholders = dict(module.named_parameters())
        for name in [*placeholders, *_stored_buffers(module)]:
            full = f"{self.prefix}.{layer}.{name}"
            key = parameter_key(self.source.arch, full)
            set_tensor(module, name, self._value(full, key, get or self.source.get))
        try:
            yield module
        finally:
            for name, parameter in placeholders.items():
                set_tensor(module, name, parameter)

    def run_layer(self, layer: int, ids_BS: Tensor, hidden: Tensor | None) -> Tensor:
        """Run one materialized layer on one batch.

        Args:
            layer: index.
            ids_BS: token ids `[batch, tokens]`, without padding.
            hidden: what enters the layer; None for layer 0, which takes the embeddings.

        Returns:
            What enters the next layer (of the last layer: what it returns).
        """
        seat = self._seats[layer]
        seat.mode, seat.feed = _Mode.RUN, hidden
        try:
            self._decoder(ids_BS)
            is_last = layer + 1 == len(self)
            result = seat.returned if is_last else self._seats[layer + 1].received
        finally:
            self._clear()
        assert result is not None
        return result

    def logits(self, ids_BS: Tensor, hidden: Tensor) -> Tensor:
        """Logits `[batch, tokens, vocabulary]` from the last layer's output."""
        seat = self._seats[-1]
        seat.mode, seat.feed = _Mode.FEED, hidden
        try:
            with torch.inference_mode():
                output: Tensor = self.model(input_ids=ids_BS.to(self.device), use_cache=False).logits
                return output
        finally:
            self._clear()

    def _decoder(self, ids_BS: Tensor) -> None:
        decoder = self.model.get_decoder()  # type: ignore[operator]  # of every transformers language model
        try:
            with torch.inference_mode():
                decoder(input_ids=ids_BS.to(self.device), use_cache=False)
        except ValueError as error:
            raise InputError(
                f"the layers of {type(self.model).__name__} cannot be run one at a time ({error}): they hand on more "
                "than hidden states, such as another layer's indices",
                "this family cannot be calibrated yet; convert it without --calibration",
            ) from error

    def _clear(self) -> None:
        for seat in self._seats:
            seat.mode, seat.feed, seat.received, seat.returned = _Mode.PASS, None, None, None


def _layers_prefix(source: Source, model: nn.Module) -> str:
    """Name of the ModuleList of decoder layers, from the first parameter that parses to a layer."""
    for name, _ in model.named_parameters():
        key = source.arch.parse(name)
        if key is not None and key.layer is not None:
            prefix = name.split(f".{key.layer}.", 1)[0]
            if isinstance(model.get_submodule(prefix), nn.ModuleList):
                return prefix
    raise InputError(
        f"transformers' model of {source.root} has no list of decoder layers", "give a decoder language model"
    )


def _stored_buffers(module: nn.Module) -> list[str]:
    """Buffers that belong to the state dict (router correction biases), so that the source holds them."""
    persistent = module.state_dict().keys()
    return [name for name, _ in module.named_buffers() if name in persistent]
