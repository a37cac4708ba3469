"""The finished artifact from the layers' records: one layer in memory at a time, `calibration.json` last."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from quantkit import __version__
from quantkit.calibrate.data import Samples
from quantkit.calibrate.methods import learning
from quantkit.calibrate.methods.base import FALLBACK, STARVED
from quantkit.calibrate.passes import record_path
from quantkit.calibrate.search import rows_found
from quantkit.calibrate.state import (
    INPUT_PREFIX,
    LAYER_NAME,
    SCALE_PREFIX,
    GemmRecord,
    LayerRecord,
    join_records,
    load_layer,
)
from quantkit.calibrate.statistics import InputStats, clipping_shares
from quantkit.calibrate.trials import YARDSTICK, checked, decisions_in, held_out_in
from quantkit.checkpoint.reader import Source
from quantkit.checkpoint.writer import write_atomic
from quantkit.errors import InputError
from quantkit.recipe import Calibration, Recipe
from quantkit.spec.calibration import (
    ACTIVATIONS_NAME,
    BIASES_NAME,
    REPORT_NAME,
    SCALES_NAME,
    SUMMARY_NAME,
    CalibrationSummary,
    ClippingRow,
    GemmSummary,
    KvSummary,
    MethodRow,
    codes_name,
)
from quantkit.spec.decisions import Decisions, HeldOut
from quantkit.spec.files import file_sha256, is_file
from quantkit.spec.tensorfile import Header, read_header
from quantkit.spec.transform import VECTORS_NAME

HIGH_ERROR = 0.05
"""Relative error of a GEMM input under per-token INT8 from which the report warns."""

LOW_AGREEMENT = 0.995
"""Share of equal choices of experts below which the report warns."""


def write_artifact(out: Path, work: Path, source: Source, recipe: Recipe, samples: Samples) -> CalibrationSummary:
    """Write the four files of the artifact from the records in `work`."""
    paths = [record_path(work, LAYER_NAME, layer) for layer in range(source.dims.layers)]
    headers = [read_header(path) for path in paths]
    _check_starving(headers, recipe.calibration)
    join_records(out / SCALES_NAME, paths, SCALE_PREFIX, ".weight_scale")
    join_records(out / ACTIVATIONS_NAME, paths, INPUT_PREFIX)
    files = {name: file_sha256(out / name) for name in (SCALES_NAME, ACTIVATIONS_NAME, *_learned(out))}
    summary = _with_methods(_with_trials(_summarize(paths, source, recipe, samples, files), work), recipe, work)
    from quantkit.report.calibration import render

    write_atomic(out / REPORT_NAME, [render(summary).encode()])
    text = json.dumps(summary.model_dump(mode="json"), indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False)
    write_atomic(out / SUMMARY_NAME, [f"{text}\n".encode()])
    return summary


def _check_starving(headers: Iterable[Header], options: Calibration) -> None:
    """Refuse experts that saw too few tokens where the recipe says so."""
    if options.starving_experts != "error":
        return
    gemms = [gemm for header in headers for gemm in json.loads(header.metadata["gemms"])]
    starving = [gemm for gemm in gemms if gemm["expert"] is not None and gemm["rows"] < options.min_tokens_per_expert]
    if starving:
        raise InputError(
            f"GEMMs of experts saw fewer than {options.min_tokens_per_expert} tokens",
            "calibrate into a new folder with more text, a smaller calibration.min_tokens_per_expert, or another "
            "calibration.starving_experts (warn, all_tokens)",
            items=[f"{gemm['name']}: {gemm['rows']} tokens" for gemm in starving],
        )


def _learned(out: Path) -> list[str]:
    """Files that methods which learn from text have left."""
    names = [name for name in (VECTORS_NAME, BIASES_NAME) if is_file(out / name)]
    return [*names, *sorted(path.name for path in out.glob(codes_name("*")))]


def _with_methods(summary: CalibrationSummary, recipe: Recipe, work: Path) -> CalibrationSummary:
    """The summary with what methods that learn from text did."""
    layers = sorted({gemm.layer for gemm in summary.gemms if gemm.layer is not None})
    rows = [
        row
        for name in learning(recipe.methods)
        for layer in layers
        for row in rows_found(record_path(work, name, layer))
    ]
    warnings = (
        *summary.warnings,
        *_named(rows, FALLBACK, "are rounded to nearest"),
        *_named(rows, STARVED, "keep the bias that they have"),
    )
    return summary.model_copy(update={"methods": tuple(rows), "warnings": warnings})


def _named(rows: Sequence[MethodRow], prefix: str, what: str) -> Iterator[str]:
    """A sentence on the GEMMs whose notes begin so."""
    found = [row for row in rows if row.note.startswith(prefix)]
    if found:
        named = ", ".join(row.name for row in found[:8]) + (", ..." if len(found) > 8 else "")
        yield f"{len(found)} GEMM{'s' * (len(found) > 1)} {what} ({found[0].note}): {named}"


def _with_trials(summary: CalibrationSummary, work: Path) -> CalibrationSummary:
    """The summary with what was decided, and what was measured on held-out text."""
    decided, held_out = decisions_in(work), held_out_in(work)
    if decided and held_out:
        decided = checked(decided, held_out)
    warnings = (*summary.warnings, *_trial_warnings(decided, held_out))
    return summary.model_copy(update={"decisions": decided, "held_out": held_out, "warnings": warnings})


def _trial_warnings(decided: Decisions | None, held_out: HeldOut | None) -> Iterator[str]:
    for form, row in decided.forms.items() if decided else ():
        if not row.within_budget:
            kl = row.measured_kl or row.predicted_kl
            kind = max(kl, key=kl.__getitem__)
            yield (
                f"the {form} form misses its budget of KL divergence {row.budget:g}: {kl[kind]:.4f} on {kind} with "
                f"{len(row.exceptions)} exceptions, {row.kept_share:.1%} of the weights kept"
            )
    routing = held_out.routing if held_out else {}
    yardstick = routing.get(YARDSTICK, {})
    for stream, by_layer in routing.items():
        low = {layer: share for layer, share in by_layer.items() if share < LOW_AGREEMENT}
        if low and stream != YARDSTICK:
            worst = min(low, key=low.__getitem__)
            beside = f"; the source in BF16 arithmetic makes {yardstick[worst]:.2%} of them" if yardstick else ""
            yield (
                f"{stream}: in {len(low)} of {len(by_layer)} layers with experts fewer than {LOW_AGREEMENT:.1%} of the "
                f"source's choices of experts are made; worst: layer {worst} with {low[worst]:.2%}{beside}"
            )


@dataclass
class _Totals:
    """What is added up over the layers."""

    gemms: list[GemmSummary] = field(default_factory=list)
    expert_tokens: dict[int, tuple[int, ...]] = field(default_factory=dict)
    by_kind: defaultdict[str, list[Tensor]] = field(default_factory=lambda: defaultdict(list))
    caches: list[KvSummary] = field(default_factory=list)


def _summarize(
    paths: Iterable[Path], source: Source, recipe: Recipe, samples: Samples, files: dict[str, str]
) -> CalibrationSummary:
    totals = _Totals()
    options = recipe.calibration
    for layer, path in enumerate(paths):
        _add_layer(totals, layer, load_layer(path), options)
    warnings = (*samples.warnings, *_warnings(totals.gemms, options))
    return CalibrationSummary(
        tool_version=__version__,
        recipe=recipe.model_dump(mode="json"),
        architecture=source.arch.name,
        model_type=str(source.config.get("model_type", "")),
        source_digest=source.digest(),
        samples=tuple(sample.record for sample in samples.samples),
        tokens=samples.tokens,
        expected_gemms=len(totals.gemms),
        observed_gemms=len(totals.gemms),
        gemms=tuple(totals.gemms),
        clipping=tuple(_clipping(totals.by_kind, samples.kinds)),
        expert_tokens=totals.expert_tokens,
        files=files,
        kv_cache=tuple(totals.caches),
        warnings=warnings,
    )


def _add_layer(totals: _Totals, layer: int, record: LayerRecord, options: Calibration) -> None:
    pooled: dict[str, InputStats] = {}
    for gemm in record.gemms:
        stats = record.inputs[gemm.input]
        unknown = gemm.expert is not None and not stats.is_measured(gemm.expert)
        if (_starves(gemm, options) or unknown) and gemm.input not in pooled:
            pooled[gemm.input] = stats.over_experts()
        totals.gemms.append(_gemm_summary(layer, gemm, stats, pooled.get(gemm.input), options))
    for role, name in {gemm.role: gemm.input for gemm in record.gemms}.items():
        totals.by_kind[role].append(record.inputs[name].absmax_by_kind)
    if record.cache is not None:
        totals.caches.append(record.cache)
    rows = Counter({gemm.expert: gemm.rows for gemm in record.gemms if gemm.expert is not None})
    if rows:
        totals.expert_tokens[layer] = tuple(rows[expert] for expert in sorted(rows))


def _starves(gemm: GemmRecord, options: Calibration) -> bool:
    return gemm.expert is not None and gemm.rows < options.min_tokens_per_expert


def _gemm_summary(
    layer: int, gemm: GemmRecord, own: InputStats, pooled: InputStats | None, options: Calibration
) -> GemmSummary:
    stats, row, fallback = own, gemm.expert or 0, ""
    if _starves(gemm, options) and int(own.tokens[row]) > gemm.rows:
        fallback = f"{int(own.tokens[row]) - gemm.rows} tokens of layer {layer}, sent through it for statistics only"
    elif _starves(gemm, options) and pooled is not None:
        stats, row, fallback = pooled, 0, f"all experts of layer {layer}"
    errors, error_row = stats, row
    if pooled is not None and stats is own and not own.is_measured(row):
        errors, error_row, fallback = pooled, 0, f"errors: all experts of layer {layer}"
    return GemmSummary(
        name=gemm.name,
        role=gemm.role,
        layer=layer,
        expert=gemm.expert,
        shape=gemm.shape,
        quantized=gemm.quantized,
        tokens=gemm.rows,
        absmax=float(stats.absmax[row].max()),
        token_error=errors.token_relative(error_row),
        group_error=errors.group_relative(error_row),
        group_size=stats.group_size,
        outlier_channels=len(stats.outlier_channels(row)),
        fallback=fallback,
    )


def _clipping(by_kind: Mapping[str, list[Tensor]], kinds: tuple[str, ...]) -> Iterator[ClippingRow]:
    for role in sorted(by_kind):
        shares: NDArray[np.float64] = clipping_shares(by_kind[role])
        for a, scales_from in enumerate(kinds):
            for b, clipped in enumerate(kinds):
                if a != b:
                    yield ClippingRow(
                        role=role, scales_from=scales_from, clipped=clipped, share=round(float(shares[a, b]), 6)
                    )


def _warnings(gemms: list[GemmSummary], options: Calibration) -> Iterator[str]:
    starving = (gemm for gemm in gemms if gemm.fallback and gemm.tokens < options.min_tokens_per_expert)
    experts = {(gemm.layer, gemm.expert): gemm.tokens for gemm in starving}
    if experts:
        named = ", ".join(f"layer {layer} expert {expert} ({tokens})" for (layer, expert), tokens in experts.items())
        many = f"{len(experts)} expert{'s' if len(experts) > 1 else ''}"
        fed = options.starving_experts == "all_tokens"
        instead = "a sample of their layer's tokens, sent through them" if fed else "all experts of their layer"
        yield (
            f"{many} saw fewer than {options.min_tokens_per_expert} tokens; their activation statistics are those of "
            f"{instead}, their weights are quantized from the weights alone: {named}"
        )
    high = sorted((gemm for gemm in gemms if gemm.token_error > HIGH_ERROR), key=lambda gemm: -gemm.token_error)
    if high:
        worst = high[0]
        yield (
            f"{len(high)} GEMM inputs lose more than {HIGH_ERROR:.0%} to per-token INT8; worst: {worst.name} with "
            f"{worst.token_error:.1%} ({worst.group_error:.1%} in groups of {worst.group_size})"
        )
