"""Greedy continuations and perplexity through a server, against a baseline that was written by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from quantkit.spec.baseline import (
    BASELINE_NAME,
    LOGPROBS_NAME,
    Baseline,
    Sequence,
    TokenizerRecord,
    baseline_bytes,
    sequences_digest,
)
from quantkit.spec.files import file_sha256
from tests.endpoint.conftest import Run
from tests.endpoint.stub import Stub

PROMPTS = tuple(
    Sequence(name=f"prompt.{i}", kind="code", use="prompt", ids=(i, 7, 8, *range(20, 30)), prompt_tokens=3)
    for i in range(2)
)
TEXTS = tuple(
    Sequence(name=f"{kind}.0", kind=kind, use="text", ids=(5, 6, 7, n), prompt_tokens=4, scored=(0, 1, 2))
    for n, kind in enumerate(("code", "math"))
)
LOGPROBS = {"code.0": [-1.0, -2.0, -3.0], "math.0": [-0.5, -0.25, -0.75]}


@pytest.fixture
def baseline(tmp_path: Path, stub: Stub) -> Path:
    """Folder of the baseline; the stub answers exactly as it says."""
    sequences = (*PROMPTS, *TEXTS)
    rows = [value for sequence in sequences for value in LOGPROBS.get(sequence.name, [])]
    save_file({"next_logprob": np.array(rows, np.float32)}, tmp_path / LOGPROBS_NAME)
    found = Baseline(
        tool_version="0",
        versions={},
        compute="float32 cpu",
        architecture="llama",
        model_type="llama",
        config={},
        source_digest="",
        source_formats={},
        limits=(),
        sequences=sequences,
        sequences_sha256=sequences_digest(sequences),
        tokenizer=TokenizerRecord(sha256="", chat_template="", stop_tokens=()),
        top_k=1,
        full=False,
        perplexity=(),
        layers=1,
        files={LOGPROBS_NAME: file_sha256(tmp_path / LOGPROBS_NAME)},
    )
    (tmp_path / BASELINE_NAME).write_bytes(baseline_bytes(found))
    stub.continuations = {row.ids[:3]: list(row.ids[3:]) for row in PROMPTS}
    stub.logprobs = {row.ids: LOGPROBS[row.name] for row in TEXTS}
    return tmp_path


def test_the_same_answers(check: Run, baseline: Path) -> None:
    assert check("greedy", baseline=baseline).measured == {"agreement": 1.0, "prompts": 2.0, "equal": 2.0}
    measured = check("perplexity", baseline=baseline).measured
    assert measured == {"ratio_code": pytest.approx(1), "ratio_math": pytest.approx(1)}


def test_a_token_that_differs_ends_the_agreement(check: Run, baseline: Path, stub: Stub) -> None:
    stub.continuations[PROMPTS[0].ids[:3]][4] = 999
    found = check("greedy", baseline=baseline)
    assert (found.status, found.measured["agreement"]) == ("pass", 0.7)
    assert "prompt.0: differs at token 4 of 10" in found.evidence[0]
    stub.continuations[PROMPTS[1].ids[:3]][0] = 999
    found = check("greedy", baseline=baseline)
    assert (found.findings[0].key, found.measured["agreement"]) == ("greedy_differs", 0.2)


def test_without_token_ids_the_echo_tells(check: Run, baseline: Path, stub: Stub) -> None:
    """The fifth token of one continuation is not the likeliest."""
    for row in PROMPTS:
        stub.logprobs[row.ids] = [-0.5] * (len(row.ids) - 1)
    stub.best[PROMPTS[0].ids, 2 + 4] = -0.1
    found = check("greedy", "no_token_ids", baseline=baseline)
    assert found.measured["agreement"] == pytest.approx((0.4 + 1) / 2)


def test_perplexity_by_kind(check: Run, baseline: Path, stub: Stub) -> None:
    stub.logprobs[TEXTS[1].ids] = [value - 0.1 for value in LOGPROBS["math.0"]]
    found = check("perplexity", baseline=baseline)
    assert found.measured["ratio_math"] == pytest.approx(math.exp(0.1))
    assert found.measured["ratio_code"] == pytest.approx(1)
    assert [finding.values["kind"] for finding in found.findings] == ["math"]


def test_not_a_number_is_no_agreement(check: Run, baseline: Path, stub: Stub) -> None:
    stub.logprobs[TEXTS[1].ids] = [float("nan")] * 3
    assert check("perplexity", baseline=baseline).status == "fail"


def test_a_server_that_cannot_echo(check: Run, baseline: Path) -> None:
    assert check("perplexity", "no_echo", baseline=baseline).status == "unsupported"
    assert check("greedy", "no_echo", "no_token_ids", baseline=baseline).status == "unsupported"
    assert check("perplexity").status == "skipped"
