"""GEMM weights of a materialized layer, by the finest key, whatever transformers fuses, stacks or interleaves."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn

from quantkit.archs import Architecture, Dims, Key
from quantkit.archs.assemble import rows_in_fused
from quantkit.archs.modeling import parameter_key
from quantkit.calibrate.weights import gemm_keys


class LayerWeights:
    """Views `[N, K]` of the parameters of a layer; they share its memory.

    Args:
        arch, dims: of the model.
        prefix: of the layer's parameter names, `model.layers.3`.
        module: the layer.
    """

    def __init__(self, arch: Architecture, dims: Dims, prefix: str, module: nn.Module) -> None:
        self._arch, self._dims = arch, dims
        self._found: dict[Key, tuple[Tensor, Key]] = {}
        for name, parameter in module.named_parameters():
            stored = parameter_key(arch, f"{prefix}.{name}")
            for key in gemm_keys(arch, dims, stored):
                self._found[key] = parameter, stored

    def __contains__(self, key: object) -> bool:
        return key in self._found

    def __iter__(self) -> Iterator[Key]:
        return iter(self._found)

    def view(self, key: Key) -> Tensor:
        """Weight `[N, K]` of one GEMM."""
        parameter, stored = self._found[key]
        weight = parameter.detach()
        stacked = stored.expert is None and key.expert is not None
        if stacked:
            weight = weight[key.expert].T if self._arch.experts_transposed else weight[key.expert]
        if key.role == stored.role:
            return weight
        if stacked and self._arch.gate_up_interleaved:
            parts = self._arch.role(stored.role).parts
            return weight[parts.index(key.role) :: len(parts)]
        start, stop = rows_in_fused(self._arch, self._dims, key.role, weight.shape[0])
        return weight[start:stop]
