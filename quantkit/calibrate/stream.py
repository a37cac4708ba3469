"""transformers' model, one decoder layer in memory at a time.

The model is built on `meta`. To run layer i, the model's own forward is called for each batch with every other layer
passing its input through: layer i gets the hidden states that belong there, and exactly the arguments (masks,
position embeddings, ...) that this model calls it with, so nothing needs to be recorded or understood. What enters
layer i + 1 is kept for the next round, with the state that layers of some families hand on beside the hidden states
(`Architecture.carried_state`) and what the model makes of the token ids for every layer (`layer_arguments`). The
results are bit for bit those of the whole model in memory.

Several threads may run batches through one layer: only the layer itself runs side by side, the model around it one
batch at a time, because some of its modules keep state between calls (rotary embeddings that grow with the length).

Peak memory: one layer in the compute dtype and one stored tensor of it (one expert of stacked ones); before the first
layer, the rows of the embedding table that the text needs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from quantkit.archs import Architecture, Key
from quantkit.archs.modeling import (
    build_skeleton,
    decoder_layers,
    load_config,
    parameter_key,
    parameter_value,
    set_tensor,
)
from quantkit.calibrate.activations import LayerInput
from quantkit.calibrate.by_rows import linear_by_rows
from quantkit.calibrate.weights import not_finite
from quantkit.checkpoint.reader import Source
from quantkit.errors import InputError

GetTensor = Callable[[Key], Tensor]

_TABLE_BYTES = 32 * 2**20
"""Of a table outside the layers that are read at once."""


@dataclass
class _Call:
    """One pass of one batch through the model.

    Attributes:
        layer: the layer that is fed, -1 for none.
        feed: what it gets instead of what comes in.
        runs: whether it runs, or passes on what it got.
        received: what entered the layer after it.
        returned: hidden states that it returned.
    """

    layer: int
    feed: LayerInput | None = None
    runs: bool = False
    received: LayerInput | None = None
    returned: LayerInput | None = None


class _Calls(threading.local):
    """The pass that this thread is in."""

    current: _Call


class _Seat:
    """What a decoder layer's `forward` is replaced with: passes on what came in, or feeds and runs the layer."""

    def __init__(
        self, index: int, layer: nn.Module, arch: Architecture, calls: _Calls, outside: threading.Lock
    ) -> None:
        self._index, self._forward = index, layer.forward
        self._carries, self._arguments = arch.carried_state, arch.layer_arguments
        self._calls, self._outside = calls, outside
        layer.forward = self  # an instance attribute shadows the method, on purpose

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if args:
            hidden, args = args[0], args[1:]
        else:
            hidden = kwargs.pop("hidden_states")
        names = (*self._carries, *self._arguments)
        carried = {name: kwargs[name] for name in names if isinstance(kwargs.get(name), Tensor)}
        value, call = LayerInput(hidden, carried), self._calls.current
        if self._index == call.layer + 1:
            call.received = value
        if self._index != call.layer:
            return self._passed(value)
        value = call.feed or value
        return self._run(call, value, args, kwargs) if call.runs else self._passed(value)

    def _run(self, call: _Call, value: LayerInput, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        carried = {name: value.carried.get(name) for name in (*self._carries, *self._arguments)}
        self._outside.release()  # other batches may pass through the model around the layer meanwhile
        try:
            output = self._forward(value.hidden, *args, **{**kwargs, **carried})
        finally:
            self._outside.acquire()
        call.returned = LayerInput(output[0] if isinstance(output, tuple) else output)
        return output

    def _passed(self, value: LayerInput) -> Any:
        """`value` in the form of the layer's output."""
        if not self._carries:
            return value.hidden
        output: list[Tensor | None] = [value.hidden, *[None] * max(self._carries.values())]
        for name, position in self._carries.items():
            output[position] = value.carried.get(name)
        return tuple(output)


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
        self.prefix, self.layers = decoder_layers(source.arch, self.model)
        self._tables = _table_names(self.model)
        self._place_outside()
        self._calls, self._outside = _Calls(), threading.Lock()
        for index, layer in enumerate(self.layers):
            _Seat(index, layer, source.arch, self._calls, self._outside)

    def __len__(self) -> int:
        return len(self.layers)

    # ------------------------------------------------------------------------------------------------- weights

    def _place_outside(self) -> None:
        """Weights outside the layers but the two tables, and every buffer that the class computed, on the device."""
        for name, buffer in list(self.model.named_buffers()):
            set_tensor(self.model, name, buffer.to(self.device))
        stored = [name for name, _ in self.model.named_parameters(remove_duplicate=False)]
        for name in [*stored, *_stored_buffers(self.model)]:
            if not name.startswith(f"{self.prefix}.") and name not in self._tables.values():
                key = parameter_key(self.source.arch, name)
                set_tensor(self.model, name, self.source.get(key).to(self.device, self._dtype_of(key)))

    def _dtype_of(self, key: Key) -> torch.dtype:
        return torch.float32 if key.role in self.source.arch.float32_parameters else self.dtype

    def _table_key(self, name: str) -> Key:
        """Stored key of the embeddings or the head; a tied head is the embedding table."""
        key = parameter_key(self.source.arch, name)
        return Key(None, "embed") if key == Key(None, "lm_head") and self.source.tied else key

    @contextmanager
    def embeddings(self, ids: Tensor) -> Iterator[None]:
        """Give the embedding table the rows of these token ids inside the block.

        The table has its full size, but rows that no text needs are never written, so they take no memory.

        Raises:
            InputError: the table, any row of it, is not finite.
        """
        with self._placed(self._tables["input"], ids.unique()):
            yield

    @contextmanager
    def _placed(self, name: str, wanted: Tensor | None, dtype: torch.dtype | None = None) -> Iterator[None]:
        """Give a table its rows (`wanted`: ascending indices, None: all) inside the block; `dtype`: not in its own."""
        placeholder = self.model.get_parameter(name)
        key = self._table_key(name)
        table = torch.empty(placeholder.shape, dtype=dtype or self._dtype_of(key), device=self.device)
        if wanted is None:
            for start, rows in self._rows_of(key):
                table[start : start + len(rows)] = rows
        else:
            for start, stop in self._pieces(key):
                rows, computed = self.source.fetch_lazily(key, (start, stop))
                self._require_finite(key, rows)
                mine = wanted[(wanted >= start) & (wanted < stop)]
                table[mine.to(self.device)] = computed(rows[mine - start]).to(table)
        set_tensor(self.model, name, table)
        try:
            yield
        finally:
            set_tensor(self.model, name, placeholder)

    def _pieces(self, key: Key) -> Iterator[tuple[int, int]]:
        """Ranges of rows of a stored table."""
        total, width = self.source.entries[key].shape
        step = max(1, _TABLE_BYTES // (4 * width))
        return ((start, min(start + step, total)) for start in range(0, total, step))

    def _rows_of(self, key: Key) -> Iterator[tuple[int, Tensor]]:
        """(first row, rows) of a stored table, a piece at a time, checked to be finite."""
        for start, stop in self._pieces(key):
            rows = self.source.fetch(key, (start, stop))
            self._require_finite(key, rows)
            yield start, rows

    def _require_finite(self, key: Key, rows: Tensor) -> None:
        if not bool(torch.isfinite(rows).all()):
            raise not_finite(self.source.entries[key].name)

    def check_outside(self) -> None:
        """Read everything outside the layers but the embeddings, which are read anyway.

        Raises:
            InputError: it is not finite; the tensor on disk is named.
        """
        for name, parameter in self.model.named_parameters():
            if not parameter.is_meta and not bool(torch.isfinite(parameter).all()):
                raise not_finite(name)
        head = self._table_key(self._tables["output"]) if "output" in self._tables else Key(None, "embed")
        if head != Key(None, "embed"):
            for _ in self._rows_of(head):
                pass

    @contextmanager
    def materialized(self, layer: int, get: GetTensor | None = None) -> Iterator[nn.Module]:
        """Give a layer its weights inside the block; each stored tensor is read once.

        Args:
            layer: index.
            get: reads a key in canonical orientation; `Source.get` by default. Statistics of weights go here.
        """
        module = self.layers[layer]
        placeholders = dict(module.named_parameters())
        wanted = {**placeholders, **{name: module.get_buffer(name) for name in _stored_buffers(module)}}
        try:
            for name, like in wanted.items():
                set_tensor(module, name, self._value(f"{self.prefix}.{layer}.{name}", like, get or self.source.get))
            yield module
        finally:
            for name, parameter in placeholders.items():
                set_tensor(module, name, parameter)

    def _value(self, name: str, like: Tensor, get: GetTensor) -> Tensor:
        """Value of a layer's parameter on the device; stacked experts come one by one into their place."""
        arch, dims = self.source.arch, self.source.dims
        key = parameter_key(arch, name)
        stacked = arch.role(key.role).per_expert and key.expert is None
        if not stacked:
            value = parameter_value(arch, dims, name, get)
            return value.to(self.device, self._dtype_of(key) if value.is_floating_point() else value.dtype)
        value = torch.empty(like.shape, dtype=self._dtype_of(key), device=self.device)
        for expert in range(dims.experts):
            one = parameter_value(arch, dims, name, lambda key, e=expert: get(key._replace(expert=e))[None])  # type: ignore[misc]
            if one.shape[1:] != value.shape[1:] or len(value) != dims.experts:
                return parameter_value(arch, dims, name, get)  # `set_tensor` names the two shapes
            value[expert] = one[0]
        return value

    # ------------------------------------------------------------------------------------------------- running

    def embed(self, ids_BS: Tensor) -> LayerInput:
        """What enters layer 0, inside `embeddings`; token ids `[batch, tokens]`, without padding."""
        call = _Call(-1)
        self._pass(call, self.model.get_decoder(), input_ids=ids_BS.to(self.device))  # type: ignore[operator]
        assert call.received is not None
        return call.received

    def run_layer(self, layer: int, value: LayerInput) -> LayerInput:
        """Run one materialized layer on one batch.

        Returns:
            What enters the next layer (of the last layer: the hidden states that it returns).
        """
        call = _Call(layer, value, runs=True)
        self._pass(call, self.model.get_decoder(), inputs_embeds=self._stand_in(value))  # type: ignore[operator]
        result = call.returned if layer + 1 == len(self) else call.received
        assert result is not None
        arguments = {name: value.carried[name] for name in self.source.arch.layer_arguments if name in value.carried}
        return LayerInput(result.hidden, {**result.carried, **arguments}) if arguments else result

    @contextmanager
    def head(self) -> Iterator[None]:
        """Give the output head its weights inside the block, so that several calls of `logits` read them once.

        On a CPU they stay in the stored dtype where that is narrower; rows are widened some at a time as they are used.
        """
        head, name = self.model.get_output_embeddings(), self._tables["output"]  # type: ignore[operator]  # of every language model
        stored = self.source.fetch(self._table_key(name), (0, 1)).dtype
        if type(head) is not nn.Linear or self.device.type != "cpu" or stored.itemsize >= self.dtype.itemsize:
            with self._placed(name, None):
                yield
            return
        with self._placed(name, None, stored):
            setattr(head, "forward", partial(_widened, head))  # noqa: B010  # an instance attribute shadows the method
            try:
                yield
            finally:
                del head.forward

    def logits(self, value: LayerInput) -> Tensor:
        """Logits `[batch, tokens, vocabulary]` from the last layer's output."""
        if self.model.get_parameter(self._tables["output"]).is_meta:
            with self.head():
                return self.logits(value)
        call = _Call(len(self) - 1, value)
        logits: Tensor = self._pass(call, self.model, inputs_embeds=self._stand_in(value)).logits
        return logits

    def _stand_in(self, value: LayerInput) -> Tensor:
        """In the place of embeddings where the model only looks at their shape: the layer that runs is fed."""
        batch, tokens = value.hidden.shape[:2]
        return value.hidden.new_zeros(1, 1, 1).expand(batch, tokens, self.source.dims.hidden)

    def _pass(self, call: _Call, model: nn.Module, **inputs: Tensor) -> Any:
        self._calls.current = call
        try:
            with self._outside, torch.inference_mode():
                return model(**inputs, use_cache=False)
        except ValueError as error:
            raise InputError(
                f"the layers of {type(self.model).__name__} cannot be run one at a time ({error}): they hand on more "
                "than hidden states, such as another layer's indices",
                "declare `carried_state` in the family's record in quantkit/archs, or convert without --calibration",
            ) from error
        finally:
            self._calls.current = _Call(-1)


def _widened(head: nn.Linear, x: Tensor) -> Tensor:
    """What a linear module with narrower weights gives in the dtype of `x` `[..., K]`, some of its rows at a time."""
    step = max(1, _TABLE_BYTES // (x.element_size() * head.in_features))
    return linear_by_rows(x, head.out_features, step, lambda rows: head.weight[rows].to(x.dtype), head.bias)


def _table_names(model: nn.Module) -> dict[str, str]:
    """Parameter names of the embedding table ("input") and of the output head ("output")."""
    modules = {
        "input": model.get_input_embeddings(),  # type: ignore[operator]  # of every transformers language model
        "output": model.get_output_embeddings(),  # type: ignore[operator]
    }
    names = {id(module): name for name, module in model.named_modules()}
    return {end: f"{names[id(module)]}.weight" for end, module in modules.items() if module is not None}


def _stored_buffers(module: nn.Module) -> list[str]:
    """Buffers that belong to the state dict (router correction biases), so that the source holds them."""
    persistent = module.state_dict().keys()
    return [name for name, _ in module.named_buffers() if name in persistent]
