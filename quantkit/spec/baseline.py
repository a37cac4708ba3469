"""A baseline: what the source model answers, kept so that any candidate can be held against it on another machine.

A folder with
- `baseline.json`: `Baseline`, canonical JSON, written last;
- `logprobs.safetensors`: one row for each scored position, sequence by sequence in the order of `Baseline.sequences`:
  `top_ids` I32 and `top_logprobs` F32 `[P, k]`, likeliest first; `rest_logprob` F32 `[P]`, the log of the probability
  of all other tokens together; `next_logprob` F32 `[P]` of the token that follows; with `full`, k is the vocabulary;
- `layers/layer-NNNNN.safetensors`: what one decoder layer did, see `LAYER_TENSORS`;
- `outside.safetensors`: fingerprints of the weights outside the layers.

A fingerprint is a projection on random signs (`quantkit.compare.fingerprint`): differences keep their size in it.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quantkit.errors import InputError
from quantkit.spec.baseline_checks import contradictions, layer_problems, outside_problems, row_problems
from quantkit.spec.document import Strict, read_finished
from quantkit.spec.files import file_sha256, is_file, is_inside, open_regular
from quantkit.spec.tensorfile import read_header, read_tensor, read_tensors

if TYPE_CHECKING:
    from torch import Tensor

BASELINE_NAME = "baseline.json"
LOGPROBS_NAME = "logprobs.safetensors"
OUTSIDE_NAME = "outside.safetensors"
LAYERS_FOLDER = "layers"

LAYER_TENSORS = {
    "input": "F32 [T, H]: what enters the layer on the probe; `input.ARGUMENT` what else the layer before hands on",
    "output": "F32 [T, H]: what it returns",
    "long": "F32 [S, H]: what it returns on the long text at the sampled positions",
    "routing": "I16 [all tokens of the texts, k]: chosen experts, ascending; absent without experts",
    "probe.routing": "I16 [T, k]: the same on the probe; `probe.router` F32 [T, E]: the router's logits",
    "probe.NNN.MODULE.in, .out": "F32 [T, 64]: fingerprints of what enters and leaves a module, in order of completion",
    "long.NNN.MODULE.in, .out": "F32 [S, 64]: the same on the long text",
    "experts.input": "F32 [R, H]: rows that entered the experts; `experts.output` F32 [E, R, 64]: of each expert alone",
    "weight.NAME": "F32 [8, 8] (stacked experts [E, 8, 8]): fingerprint of a weight; vectors stand there themselves",
    "rows.NAME": "F32 [N, 8]: fingerprint of each row of a router",
}
"""Tensors of a layer's file: T tokens of the probe, S sampled positions, H hidden, E experts."""

Use = Literal["text", "long", "needle", "prompt", "probe"]


class Sequence(Strict):
    """Token ids that both models are given.

    Attributes:
        name: "english_prose.0", "long", "needle.middle", "prompt.math".
        kind: of text.
        use: "text" and "long" measure distributions, "needle" retrieval, "prompt" was continued greedily, "probe" goes
            through each layer by itself.
        text: that the ids stand for; "" where they were put together from pieces.
        ids: all of them; of a prompt the continuation too.
        prompt_tokens: ids before the continuation; all ids for other uses.
        scored: positions, ascending, whose next token's distribution is kept.
        sampled: positions whose hidden states are kept, of "probe" and "long".
        distance: of a needle's answer to its question in tokens; 0: it stands nowhere.
    """

    name: str
    kind: str
    use: Use
    text: str = ""
    ids: tuple[int, ...]
    prompt_tokens: int
    scored: tuple[int, ...] = ()
    sampled: tuple[int, ...] = ()
    distance: int = 0

    @property
    def sha256(self) -> str:
        """Hash over the ids and the positions."""
        return hashlib.sha256(json.dumps([self.ids, self.scored, self.sampled]).encode()).hexdigest()


class TokenizerRecord(Strict):
    """What the prompts depend on.

    Attributes:
        sha256: of tokenizer.json, "" when there is none.
        chat_template: "" when there is none, else the text of `CHAT` under it.
        stop_tokens: end-of-text ids of config.json and generation_config.json.
    """

    sha256: str
    chat_template: str
    stop_tokens: tuple[int, ...]


CHAT = (
    {"role": "user", "content": "What is the sea?"},
    {"role": "assistant", "content": "Salt water."},
    {"role": "user", "content": "And the sky?"},
)
"""A conversation that templates are compared on."""


class PerplexityRow(Strict):
    """Perplexity of the source on the positions [start, stop) of one kind of text; "" for all kinds."""

    kind: str
    start: int
    stop: int
    tokens: int
    perplexity: float


class Baseline(Strict):
    """All of `baseline.json`.

    Attributes:
        format_version: of this model.
        tool_version: quantkit's.
        versions: of torch and transformers.
        compute: dtype and device that it was computed with.
        architecture: record used.
        model_type: of the config.
        config: the source's config.json without its quantization.
        source_digest: `Source.digest`.
        source_formats: how the source stores its weights -> tensors.
        limits: windows and top-k counts of the attention, in tokens.
        sequences: what was fed.
        sequences_sha256: over all of them.
        tokenizer: what prompts depend on.
        top_k: likeliest tokens that are kept.
        full: whether all log-probabilities are.
        perplexity: by kind and range of positions.
        layers: of the model.
        files: sha256 by name.
        warnings: sentences.
    """

    format_version: Literal[1] = 1
    tool_version: str
    versions: dict[str, str]
    compute: str
    architecture: str
    model_type: str
    config: dict[str, Any]
    source_digest: str
    source_formats: dict[str, int]
    limits: tuple[int, ...]
    sequences: tuple[Sequence, ...]
    sequences_sha256: str
    tokenizer: TokenizerRecord
    top_k: int
    full: bool
    perplexity: tuple[PerplexityRow, ...]
    layers: int
    files: dict[str, str]
    warnings: tuple[str, ...] = ()

    def of_use(self, *uses: Use) -> tuple[Sequence, ...]:
        return tuple(sequence for sequence in self.sequences if sequence.use in uses)

    def rows(self) -> dict[str, tuple[int, int]]:
        """Sequence name -> its rows [start, stop) of `logprobs.safetensors`."""
        found, position = {}, 0
        for sequence in self.sequences:
            found[sequence.name] = (position, position + len(sequence.scored))
            position += len(sequence.scored)
        return found


def layer_name(layer: int) -> str:
    """File of a layer, relative to the baseline's folder."""
    return f"{LAYERS_FOLDER}/layer-{layer:05d}.safetensors"


def sequences_digest(sequences: tuple[Sequence, ...]) -> str:
    """sha256 over names and hashes of the sequences, in order."""
    lines = "".join(f"{sequence.sha256} {sequence.use} {sequence.name}\n" for sequence in sequences)
    return hashlib.sha256(lines.encode()).hexdigest()


def baseline_bytes(baseline: Baseline) -> bytes:
    """Canonical JSON."""
    return (json.dumps(baseline.model_dump(mode="json"), sort_keys=True, ensure_ascii=False) + "\n").encode()


def read_baseline(folder: Path, *, verify: bool = True) -> Baseline:
    """Read `baseline.json` and hold the files beside it against their checksums.

    Raises:
        InputError: missing, unfinished, damaged, or not what it claims to be.
    """
    path = folder / BASELINE_NAME
    found = read_finished(path, Baseline, "baseline", "quantkit baseline")
    if found.sequences_sha256 != sequences_digest(found.sequences):
        raise InputError(f"{path}: the token ids are not those that were recorded", "copy the baseline again")
    if problems := contradictions(found):
        raise InputError(f"{path} contradicts itself", "copy the baseline again, or make it again", items=problems)
    if outside := [name for name in found.files if not is_inside(name)]:
        raise InputError(f"{path} names files outside its folder", "use a baseline of quantkit's own", items=outside)
    wrong = [name for name in found.files if not is_file(folder / name)]
    if verify and not wrong:
        wrong = [name for name, digest in found.files.items() if file_sha256(folder / name) != digest]
    if wrong:
        raise InputError(
            f"{folder}: files are missing or differ from what was recorded", "copy the baseline again", items=wrong
        )
    return found


def read_rows(folder: Path, baseline: Baseline) -> dict[str, Tensor]:
    """Tensors of `logprobs.safetensors`.

    Raises:
        InputError: they are not those of this baseline's sequences.
    """
    path = folder / LOGPROBS_NAME
    return _checked(path, row_problems(baseline, read_header(path)))


def read_layer(folder: Path, baseline: Baseline, layer: int) -> dict[str, Tensor]:
    """Tensors of a layer's file, see `LAYER_TENSORS`.

    Raises:
        InputError: they are not those of this baseline's sequences.
    """
    path = folder / layer_name(layer)
    return _checked(path, layer_problems(baseline, read_header(path)))


def read_outside(folder: Path) -> dict[str, Tensor]:
    """Fingerprints of the weights outside the layers.

    Raises:
        InputError: something else stands there.
    """
    path = folder / OUTSIDE_NAME
    return _checked(path, outside_problems(read_header(path)))


def read_next_logprobs(folder: Path, baseline: Baseline) -> dict[str, list[float]]:
    """Sequence -> log-probabilities that the source gave the tokens that follow its scored positions.

    Raises:
        InputError: as `read_rows`.
    """
    path = folder / LOGPROBS_NAME
    header = read_header(path)
    if problems := row_problems(baseline, header, ["next_logprob"]):
        raise _misfit(path, problems)
    fd = open_regular(path)
    try:
        values = read_tensor(fd, header.tensors["next_logprob"], path=path).tolist()
    finally:
        os.close(fd)
    return {name: values[start:stop] for name, (start, stop) in baseline.rows().items()}


def _misfit(path: Path, problems: list[str]) -> InputError:
    return InputError(f"{path} does not fit {BASELINE_NAME}", "make the baseline again", items=problems)


def _checked(path: Path, problems: list[str]) -> dict[str, Tensor]:
    if problems:
        raise _misfit(path, problems)
    return read_tensors(path)
