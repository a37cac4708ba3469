"""transformers' model with INT8 modules grafted in: what the files hold in INT8 is replaced, all else is loaded.

The modelling code stays transformers' own, so a difference to the source model can only come from the weights or from
the arithmetic. A checkpoint without INT8 weights goes through the same code and gives transformers' logits bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor, nn

from quantkit.archs import Key, Split
from quantkit.archs.assemble import assemble
from quantkit.archs.modeling import build_skeleton, load_config, parameter_value, set_tensor
from quantkit.console import Progress
from quantkit.errors import InputError
from quantkit_runtime import attention, experts, split, stages
from quantkit_runtime.account import Account, unfused
from quantkit_runtime.device import Device
from quantkit_runtime.errors import UnsupportedDtype
from quantkit_runtime.kv_cache import KvFormat, LayerSpec
from quantkit_runtime.layers import Int8Experts, Int8Linear
from quantkit_runtime.loader import open_model
from quantkit_runtime.memory import (
    MemoryPlan,
    on_meta,
    out_of_memory_as_error,
    require,
    transformers_kv_bytes,
    workspace_bytes,
)
from quantkit_runtime.parallel import ALONE, Team
from quantkit_runtime.plan import Planned, Planner
from quantkit_runtime.shards import Checked, ModelFiles


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run.

    Attributes:
        model: transformers' causal language model with INT8 modules.
        files: what it was loaded from (closed).
        planned: every parameter.
        unused: stored tensors that the model does not build, by rule (draft layers, vision towers).
        account: ledger of its GEMMs.
        memory: the plan.
        device, dtype: where and in what it computes.
        kv: what each layer's attention hands to the paged cache, or why transformers' cache must serve.
    """

    model: nn.Module
    files: ModelFiles
    planned: tuple[Planned, ...]
    unused: tuple[str, ...]
    account: Account
    memory: MemoryPlan
    device: Device
    dtype: torch.dtype
    kv: tuple[LayerSpec, ...] | str

    @property
    def checked(self) -> Checked:
        return self.files.checked


def load_model(
    root: Path,
    device: Device,
    dtype: torch.dtype,
    *,
    verify: bool = True,
    cache_tokens: int = 512,
    prompt_tokens: int = 512,
    kv_format: KvFormat | None = None,
    on_plan: Callable[[MemoryPlan], None] | None = None,
    dispatch: bool | None = None,
    overlap: int = 0,
) -> LoadedModel:
    """Load a converted folder of either form, or a plain checkpoint; of shards the part of this process.

    Args:
        root: the folder.
        device: from `device.resolve`.
        dtype: of everything that is not INT8.
        verify: check every tensor's checksum while reading.
        cache_tokens: positions that the memory plan counts for keys and values.
        prompt_tokens: tokens of the longest forward, for the memory plan.
        kv_format: of the paged cache; None keeps keys and values in `dtype`.
        on_plan: called with the memory plan before anything is read.
        dispatch: whether tokens travel to their experts, see `experts.Placement`.
        overlap: see `parallel.Team`.

    Raises:
        InputError, UsageError: and the four classes of `quantkit_runtime.errors`. On a mesh every rank raises what
            any of them met.
    """
    experts.register()
    attention.register()

    def load_own() -> LoadedModel:
        model = _skeleton(root, files, dtype)
        planned, unused = Planner(model, files, dtype).run()
        probe = on_meta(model, files.dims)
        kv = attention.probe_layers(probe)
        kv_cache = (
            transformers_kv_bytes(probe, files.dims, cache_tokens, dtype)
            if isinstance(kv, str)
            else (fmt := kv_format or KvFormat(dtype, dtype)).pool_bytes(kv, 1 + fmt.blocks(cache_tokens), sequences=1)
        )
        memory = _memory_plan(files, planned, device, dtype, kv_cache, cache_tokens, prompt_tokens)
        if on_plan is not None:
            on_plan(memory)
        require(memory)
        account = _account(files, planned)
        grafter = _Grafter(model, files, account, device)
        with out_of_memory_as_error(memory), Progress("load", sum(_stored_bytes(files, planned))) as progress:
            grafter.run(planned, progress)
        _require_complete(model, planned)
        return LoadedModel(model, files, tuple(planned), tuple(unused), account, memory, device, dtype, kv)

    with open_model(root, verify=verify, on_card=device.torch.type == "cuda", overlap=overlap) as files:
        loaded = files.ranks.together(load_own, f"loading {root}")
    reasons = files.ranks.world.objects(loaded.kv if isinstance(loaded.kv, str) else "")
    if reason := next(filter(None, reasons), ""):  # stages whose layers differ must run in the same steps
        loaded = replace(loaded, kv=reason)
    split.connect(loaded.model, files, loaded.planned, device.torch, dispatch)
    stages.connect(loaded.model, files.arch, files.ranks)
    return loaded


def _skeleton(root: Path, files: ModelFiles, dtype: torch.dtype) -> nn.Module:
    """The model of this rank on `meta`. Whole and without INT8 experts it keeps transformers' choice of experts
    function, so that results are its own."""
    int8_experts = any(
        files.arch.role(key.role).per_expert and stored.info.dtype == "I8" for key, stored in files.tensors.items()
    )
    ours = int8_experts or files.ranks.stage.size > 1
    model = build_skeleton(load_config(root), dtype=dtype, experts=experts.NAME if ours else "")
    stages.vacate(model, files.arch, files.ranks)
    split.localize(model, files)
    return model


def _memory_plan(
    files: ModelFiles,
    planned: Iterable[Planned],
    device: Device,
    dtype: torch.dtype,
    kv_cache: int,
    cache_tokens: int,
    prompt_tokens: int,
) -> MemoryPlan:
    distinct = {row.key: row for row in planned}.values()  # tied ends are one tensor
    weights: Counter[str] = Counter()
    for row in distinct:
        weights[row.column] += row.nbytes
    return MemoryPlan(
        weights=weights,
        scales=sum(row.scale_nbytes for row in distinct),
        kv_cache=kv_cache,
        workspace=workspace_bytes(files.dims, prompt_tokens, dtype, on_cpu=device.family == "cpu"),
        tokens=cache_tokens,
        free=device.free_memory(),
    )


def _account(files: ModelFiles, planned: Iterable[Planned]) -> Account:
    """What must run in INT8, from the files alone: every INT8 weight of a layer that the model builds."""
    expected: set[str] = set()
    routed: set[str] = set()
    built = {row.key.layer for row in planned}
    for key, stored in files.tensors.items():
        if stored.info.dtype == "I8" and key.part == "weight" and key.layer in built:
            names = unfused(files.arch, files.experts, key)
            expected.update(names)
            if files.arch.role(key.role).per_expert:
                routed.update(names)
    return Account(expected, routed)


def _stored_bytes(files: ModelFiles, planned: Iterable[Planned]) -> Iterable[int]:
    layers = {row.key.layer for row in planned}
    return (stored.info.nbytes for key, stored in files.tensors.items() if key.layer in layers)


class _Grafter:
    """Fills a skeleton."""

    def __init__(self, model: nn.Module, files: ModelFiles, account: Account, device: Device) -> None:
        self._model, self._files, self._account, self._device = model, files, account, device
        self._shared: dict[Key, Tensor] = {}

    def run(self, planned: Iterable[Planned], progress: Progress) -> None:
        def get(key: Key) -> Tensor:
            return assemble(
                self._files.arch,
                self._files.dims,
                key,
                self._files.has,
                lambda leaf: self._files.fetch(leaf, self._device.torch, progress),
            )

        rows = sorted(planned, key=self._place)
        self._files.read_ahead((leaf for row in rows for leaf in row.leaves), self._device.torch)
        for row in rows:
            if not row.int8:
                set_tensor(self._model, row.name, self._float(row, get))
            elif len(row.shape) == 3:
                self._experts(row, get)
            else:
                self._linear(row, get)
        for name, buffer in list(self._model.named_buffers()):
            if buffer.device != self._device.torch and not buffer.is_meta:
                set_tensor(self._model, name, buffer.to(self._device.torch))

    def _place(self, row: Planned) -> tuple[str, int]:
        """Where the first byte of a parameter lies, so that files are read from front to back."""
        return min((stored.file, stored.info.start) for leaf in row.leaves if (stored := self._files.tensors[leaf]))

    def _float(self, row: Planned, get: Callable[[Key], Tensor]) -> Tensor:
        """Value of a parameter that stays in floating point; tied ends share one tensor."""
        if row.key in self._shared:
            return self._shared[row.key]
        files = self._files
        value = parameter_value(files.arch, files.dims, row.name, lambda _: get(row.key)).to(row.dtype)
        if row.key.role == "embed":
            self._shared[row.key] = value
        return value

    def _linear(self, row: Planned, get: Callable[[Key], Tensor]) -> None:
        module_name = row.name.removesuffix(".weight")
        module = self._model.get_submodule(module_name)
        if not isinstance(module, nn.Linear):
            raise UnsupportedDtype(
                f"{row.name} is stored in INT8, but {type(module).__name__} is no linear layer",
                "convert with a rule that keeps it",
            )
        # a bias has a row of its own, which is loaded into the new module afterwards
        bias: Tensor | None = module._parameters["bias"]
        parent, _, leaf = module_name.rpartition(".")
        linear = Int8Linear(
            get(row.key),
            get(row.key.with_part("weight_scale")).float(),
            bias,
            group_size=row.group_size,
            names=unfused(self._files.arch, self._files.experts, row.key),
            account=self._account,
            family=self._device.family,
            team=self._team(row, self._files.ranks.tp),
        )
        setattr(self._model.get_submodule(parent), leaf, linear)

    def _experts(self, row: Planned, get: Callable[[Key], Tensor]) -> None:
        files = self._files

        def stacked(part: str) -> Tensor:
            """In the row order of the module (interleaved where it wants that), but always `[E, N, ...]`."""
            value = parameter_value(files.arch, files.dims, row.name, lambda _: get(row.key.with_part(part)))
            return value.transpose(1, 2).contiguous() if files.arch.experts_transposed else value

        module_name, _, parameter = row.name.rpartition(".")
        projection = Int8Experts(
            stacked("weight"),
            stacked("weight_scale").float(),
            group_size=row.group_size,
            names=tuple(unfused(files.arch, (), row.key._replace(expert=expert)) for expert in files.experts),
            account=self._account,
            family=self._device.family,
            team=self._team(row, files.ranks.moe_tp),
        )
        experts.install(self._model.get_submodule(module_name), parameter, projection)

    def _team(self, row: Planned, team: Team) -> Team:
        """Ranks whose outputs must be added, when the inputs of this GEMM are split over them."""
        return team if self._files.arch.role(row.key.role).split is Split.ROW else ALONE


def _require_complete(model: nn.Module, planned: Iterable[Planned]) -> None:
    """Nothing may be left at its initial value: not on `meta`, and no parameter without a plan."""
    names = {row.name for row in planned}
    left = [name for name, parameter in model.named_parameters() if parameter.is_meta or name not in names]
    left += [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise InputError("parameters were left without a value", "report this with the model's config.json", items=left)
