"""`quantkit-runtime compare`: load a candidate and run it on a baseline's inputs; `quantkit.compare` judges."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from quantkit.archs.modeling import TOKENIZER_FILES, load_tokenizer, text_of
from quantkit.compare.candidate import Subject
from quantkit.compare.companions import companion_differences, tokenizer_record
from quantkit.compare.compare import compare
from quantkit.compare.limits import Kind, Limits, load_limits
from quantkit.compare.result import Comparison, Difference
from quantkit.console import Progress
from quantkit.errors import NonFiniteError
from quantkit.spec.baseline import Baseline, read_baseline
from quantkit.spec.files import is_file
from quantkit.spec.manifest import manifest_path, read_manifest
from quantkit.spec.transform import Step
from quantkit_runtime import device as devices
from quantkit_runtime.engine import Engine
from quantkit_runtime.graft import LoadedModel, load_model
from quantkit_runtime.kv_cache import KvFormat
from quantkit_runtime.loader import require_folder
from quantkit_runtime.memory import out_of_memory_as_error
from quantkit_runtime.session import make_runner


@dataclass(frozen=True)
class Options:
    """What the command was asked for; `limits` are a file of them, those of an earlier run, or the shipped ones."""

    baseline: Path
    candidate: Path
    device: str = "auto"
    dtype: str = "auto"
    limits: Path | Limits | None = None
    verify: bool = True


def run(options: Options) -> Comparison:
    """Compare; whether the candidate passed is in the result.

    Raises:
        UsageError, InputError: the baseline, the limits or the candidate cannot be used.
    """
    baseline = read_baseline(options.baseline, verify=options.verify)
    limits_for("int8", options.limits)  # a mistake in the file shows before anything is loaded
    require_folder(options.candidate)
    device = devices.resolve(options.device)
    dtype = devices.compute_dtype(options.dtype, device)
    longest = max(len(sequence.ids) for sequence in baseline.sequences)
    loaded = load_model(
        options.candidate, device, dtype, verify=options.verify, cache_tokens=longest, prompt_tokens=longest
    )
    quantized = any(row.int8 for row in loaded.planned)
    path = manifest_path(options.candidate)
    transforms: tuple[Step, ...] = read_manifest(path).transforms if path is not None else ()
    tokenizer = _tokenizer(options.candidate)
    tokens = sum(len(sequence.ids) for sequence in baseline.sequences)
    with out_of_memory_as_error(loaded.memory), Progress("compare", tokens, "tokens") as progress:
        return compare(
            options.baseline,
            baseline,
            Subject(loaded.model, loaded.files.arch, device.torch, dtype, transforms),
            limits_for("int8" if quantized else "float", options.limits),
            facts={
                "form": loaded.files.form,
                "layers": str(baseline.layers),
                "weights": "int8" if quantized else "floating point",
                "dtype": str(dtype).removeprefix("torch."),
                "device": device.name,
                "transforms": ", ".join(step.step for step in transforms),
            },
            companions=_companions(options.candidate, baseline, loaded, tokenizer, transformed=bool(transforms)),
            text=_decoder(tokenizer),
            decode=_continuation(loaded),
            advance=progress.advance,
        )


def limits_for(kind: Kind, given: Path | Limits | None) -> Limits:
    """Limits for a candidate of this kind.

    Raises:
        UsageError: the file cannot be used.
    """
    return given if isinstance(given, Limits) else load_limits(kind, given)


def _tokenizer(root: Path) -> Any:
    return load_tokenizer(root) if any(is_file(root / name) for name in TOKENIZER_FILES) else None


def _companions(
    root: Path, baseline: Baseline, loaded: LoadedModel, tokenizer: Any, *, transformed: bool
) -> tuple[Difference, ...]:
    record = tokenizer_record(root, tokenizer)
    return tuple(companion_differences(baseline, loaded.files.config, record, transformed=transformed))


def _decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    def text(ids: Sequence[int]) -> str:
        return " ".join(map(str, ids)) if tokenizer is None else text_of(tokenizer, ids)

    return text


def _continuation(loaded: LoadedModel) -> Callable[[Sequence[int], int], Sequence[int]]:
    fmt = KvFormat(loaded.dtype, loaded.dtype)

    def decode(prompt: Sequence[int], count: int) -> Sequence[int]:
        if not count:
            return ()
        runner = make_runner(loaded, fmt, 1 + fmt.blocks(len(prompt) + count), sequences=1)
        try:
            with torch.inference_mode():
                (generated,) = Engine(runner).generate([prompt], count)
        except NonFiniteError:  # what makes it so is found layer by layer
            return ()
        return generated.tokens

    return decode
