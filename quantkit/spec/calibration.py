"""The calibration artifact: what `quantkit calibrate` leaves and `quantkit convert` reads.

A folder with
- `calibration.json`: this model (canonical JSON), the summary that humans and tools read;
- `scales.safetensors`: `SHARD_NAME.weight_scale` F32 `[N, 1]` for every quantized GEMM (`Key.shard_name` without its
  part, per expert and per part of a fused weight);
- `activations.safetensors`: statistics by GEMM input, see `quantkit.calibrate.observe`;
- `report.html`: the same for reading;
- where methods that learn from text were used, `transforms.safetensors` (see `quantkit.spec.transform`), and
  `codes-LAYER.safetensors` with `SHARD_NAME` I8 `[N, K]` and `SHARD_NAME_scale` F32 `[N, 1]` of every rounded GEMM, and
  `biases.safetensors` with `SCHEME/SHARD_NAME` `[N]`, in the source's dtype, of every bias that was corrected for GEMMs
  of that scheme.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from quantkit.errors import InputError
from quantkit.spec.decisions import Decisions, HeldOut
from quantkit.spec.document import Strict, read_finished
from quantkit.spec.files import file_sha256, is_inside

SUMMARY_NAME = "calibration.json"
SCALES_NAME = "scales.safetensors"
ACTIVATIONS_NAME = "activations.safetensors"
REPORT_NAME = "report.html"
BIASES_NAME = "biases.safetensors"


def bias_name(scheme: str, shard_name: str) -> str:
    """Name of a corrected bias in that file."""
    return f"{scheme}/{shard_name}"


def codes_name(layer: int | str) -> str:
    """File with the INT8 codes and scales of a layer, where a method has rounded its weights."""
    return f"codes-{layer:05d}.safetensors" if isinstance(layer, int) else f"codes-{layer}.safetensors"


ARTIFACT_NAMES = (SCALES_NAME, ACTIVATIONS_NAME, REPORT_NAME, SUMMARY_NAME)
"""Files that every artifact has, in the order of writing: the summary is the last."""


class GemmSummary(Strict):
    """Statistics of one observed GEMM.

    Attributes:
        name: `Key.shard_name` without its part ("layers.3.expert.down.7").
        role: of the weight.
        layer: decoder layer, None for a GEMM outside the layers.
        expert: routed expert, None for others.
        shape: [N, K] of the weight.
        quantized: whether the recipe converts it.
        tokens: rows that entered it.
        absmax: largest magnitude of its input; 0 when it saw no token.
        token_error: relative error of its input after per-token INT8, ||x - q(x)|| / ||x||. It is measured on every row
            of a batch of fewer than 256 rows, and of a larger one on the largest 1/16 of the rows and on every n-th of
            the others by size, each counted n times, n = min(8, rows / 128).
        group_error: the same with groups of `group_size`.
        group_size: 128, or the largest divisor of K below it.
        outlier_channels: input channels whose absolute maximum exceeds 6 x the median channel's.
        fallback: what its activation statistics were taken from instead, "" when its own; after "errors: " what its
            two errors alone were taken from, where none of an expert's rows was among the measured ones.
    """

    name: str
    role: str
    layer: int | None
    expert: int | None
    shape: tuple[int, int]
    quantized: bool
    tokens: int
    absmax: float
    token_error: float
    group_error: float
    group_size: int
    outlier_channels: int
    fallback: str = ""


class SampleRecord(Strict):
    """One calibration sample: where it came from, and the sha256 of its token ids as little-endian int32."""

    source: str
    kind: str
    tokens: int
    sha256: str


class KvSummary(Strict):
    """Keys and values of one layer, as a cache would hold them.

    Attributes:
        layer: decoder layer.
        key_absmax, value_absmax: largest magnitude by key/value head.
        key_error, value_error: relative error of INT8 with one scale for each token and head, ||x - q(x)|| / ||x||.
        k_scale, v_scale: static scales of the layer for FP8 (e4m3), float32.
    """

    layer: int
    key_absmax: tuple[float, ...]
    value_absmax: tuple[float, ...]
    key_error: float
    value_error: float
    k_scale: float
    v_scale: float


class ClippingRow(Strict):
    """Share of input channels of `role` where text `clipped` exceeds the absolute maximum seen on `scales_from`."""

    role: str
    scales_from: str
    clipped: str
    share: float


NOTHING = "nothing to do: "
"""How the note of GEMMs begins that have no place for what a method does."""


class MethodRow(Strict):
    """What a method that learns from text did at one place.

    Attributes:
        method: its name.
        layer: decoder layer.
        name: the producer whose channels were scaled, or the GEMM whose weight was rounded.
        before, after: relative error ||y - y'|| / ||y|| of what it computes on sampled rows, without and with the
            method; equal where nothing was changed.
        note: what was chosen, or why nothing was.
        gemms: that the row stands for.
    """

    method: str
    layer: int
    name: str
    before: float
    after: float
    note: str = ""
    gemms: int = 1


class CalibrationSummary(Strict):
    """All of `calibration.json`.

    Attributes:
        format_version: of this model.
        tool_version: quantkit's.
        recipe: as resolved.
        architecture: record used.
        model_type: of the config.
        source_digest: `Source.digest`: sha256 over names, dtypes and shapes of the source's tensors and the sizes of
            its files; convert refuses scales of another source.
        samples: what was fed, in order.
        tokens: all of them.
        expected_gemms, observed_gemms: GEMM weights of the decoder layers, fused ones by part and stacked ones by
            expert, and those that were seen: with at least one token, or an expert that ran beside others when the
            router sent it none; coverage = observed / expected. Less than 1 is an error of `calibrate`.
        gemms: one row each, sorted by layer, role, expert.
        clipping: between kinds of text.
        methods: what methods that learn from text did.
        expert_tokens: layer -> tokens of each expert.
        files: sha256 of the artifact's tensor files by name.
        kv_cache: one row for each layer that caches keys and values, where the recipe has `kv_cache`.
        decisions: exceptions and why, where the recipe has a budget for them.
        held_out: the quantized model beside the source on text that no statistic saw.
        warnings: whatever a person should look at, each a sentence.
    """

    format_version: int = 1
    tool_version: str
    recipe: dict[str, object]
    architecture: str
    model_type: str
    source_digest: str
    samples: tuple[SampleRecord, ...]
    tokens: int
    expected_gemms: int
    observed_gemms: int
    gemms: tuple[GemmSummary, ...]
    clipping: tuple[ClippingRow, ...] = ()
    methods: tuple[MethodRow, ...] = ()
    expert_tokens: dict[int, tuple[int, ...]]
    files: dict[str, str]
    kv_cache: tuple[KvSummary, ...] = ()
    decisions: Decisions | None = None
    held_out: HeldOut | None = None
    warnings: tuple[str, ...] = ()

    @property
    def coverage(self) -> float:
        return self.observed_gemms / self.expected_gemms if self.expected_gemms else 1.0


def read_summary(folder: Path) -> CalibrationSummary:
    """Read `calibration.json` of an artifact.

    Raises:
        InputError: missing, unfinished or not what it claims to be.
    """
    return read_finished(folder / SUMMARY_NAME, CalibrationSummary, "calibration", "quantkit calibrate")


class Artifact(NamedTuple):
    """A calibration's folder, and what its summary says: half a million rows for a large model, so it is read once."""

    folder: Path
    summary: CalibrationSummary

    @classmethod
    def read(cls, folder: Path) -> Artifact:
        return cls(folder, read_summary(folder))

    def digest(self) -> str:
        """sha256 of the summary, hex; it holds the checksums of the rest."""
        return file_sha256(self.folder / SUMMARY_NAME)

    def check_files(self) -> None:
        """Hold the tensor files against the checksums of the summary.

        Raises:
            InputError: files are missing or changed; all of them are named.
        """
        names = sorted({SCALES_NAME, *self.summary.files})
        if outside := [name for name in names if not is_inside(name)]:
            raise InputError(
                f"{self.folder / SUMMARY_NAME} names files outside its folder",
                "use a calibration of quantkit's own",
                items=outside,
            )
        wrong = [name for name in names if file_sha256(self.folder / name) != self.summary.files.get(name)]
        if wrong:
            raise InputError(
                f"{self.folder}: files differ from what `quantkit calibrate` wrote",
                "copy the calibration again, or calibrate again",
                items=wrong,
            )
