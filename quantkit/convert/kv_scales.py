"""Static scales of an FP8 cache in the checkpoint form: `self_attn.k_scale` and `self_attn.v_scale`, F32 `[1]`.

vLLM's `maybe_remap_kv_scale_name` takes these names to its attention layer, and its compressed-tensors loader accepts
one scale for all heads of a layer. INT8 per token and head needs no scales: vLLM has it as `--kv-cache-dtype
int8_per_token_head`, our runtime as `--kv-keys int8`.
"""

from __future__ import annotations

from collections.abc import Sequence

from quantkit.archs import Key
from quantkit.checkpoint.reader import Source
from quantkit.convert.units import How, PlannedTensor
from quantkit.errors import UsageError
from quantkit.recipe import Recipe
from quantkit.spec.calibration import Artifact, KvSummary

ROLE = "attn.cache_scale"


def cache_scales(recipe: Recipe, form: str, calibration: Artifact | None) -> tuple[KvSummary, ...]:
    """What the calibration found out about the cache; () where the output has no scales for it.

    Raises:
        UsageError: the recipe forbids this form, or there is no calibration.
    """
    if recipe.kv_cache is None or form != "checkpoint":
        return ()
    if recipe.kv_cache.checkpoint == "none":
        raise UsageError(
            "engines cannot be told in a checkpoint how this recipe keeps keys and values",
            "use --format sharded; or give kv_cache `checkpoint: fp8` for static FP8 scales; or leave kv_cache out and "
            "start vLLM with --kv-cache-dtype int8_per_token_head",
        )
    if calibration is None:
        raise UsageError(
            f"the recipe {recipe.name} wants static scales of keys and values",
            "run `quantkit calibrate` with this recipe, and pass its folder with --calibration",
        )
    return calibration.summary.kv_cache


def scale_tensors(source: Source, rows: Sequence[KvSummary]) -> list[tuple[PlannedTensor, ...]]:
    """The scales of each layer, beside its attention's projections."""
    return [_of_layer(source, row) for row in rows]


def _of_layer(source: Source, row: KvSummary) -> tuple[PlannedTensor, ...]:
    role = next(name for name in ("attn.k", "attn.qkv") if source.has(Key(row.layer, name)))
    attention = source.entries[Key(row.layer, role)].module.rpartition(".")[0]
    return tuple(
        PlannedTensor(
            f"{attention}.{name}",
            Key(row.layer, ROLE, part="scale", label=f"self_attn.{name}"),
            How.GIVEN,
            "F32",
            (1,),
            (),
            global_shape=(1,),
            values=(value,),
        )
        for name, value in (("k_scale", row.k_scale), ("v_scale", row.v_scale))
    )


def has_scales(source: Source) -> bool:
    """Whether a source brings such scales along."""
    return any(key.role == ROLE for key in source.entries)
