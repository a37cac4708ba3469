"""Dimension "accuracy": the served model against the baseline of its source (`quantkit baseline`), token by token.

Prompts are sent as token ids, so neither a tokenizer nor a chat template stands between both. Two measures: greedy
continuations up to the first difference, and the perplexity of the baseline's own texts, which a server can tell when
it echoes a prompt with log-probabilities.
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from quantkit.acceptance.endpoint import BAD_FORM
from quantkit.acceptance.outcome import Finding, Value, failed, missed, skipped, unsupported
from quantkit.acceptance.session import Found, Session
from quantkit.spec.baseline import Baseline, read_baseline, read_next_logprobs
from quantkit.spec.baseline import Sequence as Text

_LARGEST_LOG = 700.0
"""Of a ratio: beyond it there is no floating-point number, and nothing to tell apart either."""


def greedy(session: Session) -> Found:
    """Share of each greedy continuation before its first difference to the source's."""
    baseline = _baseline(session)
    shares: list[float] = []
    rows = []
    for text in baseline.of_use("prompt"):
        wanted = list(text.ids[text.prompt_tokens :])
        body = _complete(session, text.ids[: text.prompt_tokens], len(wanted), return_token_ids=True, ignore_eos=True)
        got = body["choices"][0].get("token_ids")  # vLLM's extension of the API
        same = _common_prefix(wanted, got) if isinstance(got, list) else _forced_prefix(session, text)
        shares.append(same / max(1, len(wanted)))
        if same < len(wanted):
            rows.append(
                f"{text.name}: differs at token {same} of {len(wanted)}: {body['choices'][0].get('text', '')!r}"
            )
    if not shares:
        raise skipped("baseline_without_prompts")
    mean, least = sum(shares) / len(shares), session.settings.accuracy.min_agreement
    measured = {"agreement": mean, "prompts": float(len(shares)), "equal": float(sum(share == 1 for share in shares))}
    if mean < least:
        values: dict[str, Value] = {"got": f"{mean:.1%}", "wanted": f"{least:.0%}"}
        raise missed([Finding(key="greedy_differs", values=values)], measured, *rows)
    return Found("greedy_agrees", {"got": f"{mean:.1%}", "prompts": len(shares)}, tuple(rows), measured)


def perplexity(session: Session) -> Found:
    """Perplexity of the baseline's texts through the server, by kind, over the source's on the same positions."""
    baseline = _baseline(session)
    assert session.baseline is not None
    known = read_next_logprobs(session.baseline, baseline)
    losses: defaultdict[str, list[tuple[float, float]]] = defaultdict(list)
    for text in baseline.of_use("text"):
        served = _prompt_logprobs(_complete(session, text.ids, 1, echo=True, logprobs=0), len(text.ids))
        for position, before in zip(text.scored, known[text.name], strict=True):
            losses[text.kind].append((before, served[position + 1]))
    if not losses:
        raise skipped("baseline_without_prompts")
    most, problems, measured = session.settings.accuracy.max_perplexity_ratio, [], {}
    for kind, pairs in sorted(losses.items()):
        ratio = math.exp(min(sum(before - after for before, after in pairs) / len(pairs), _LARGEST_LOG))
        measured[f"ratio_{kind}"] = ratio
        if not ratio <= most:
            problems.append(
                Finding(key="perplexity_high", values={"kind": kind, "got": f"{ratio:.4f}", "wanted": most})
            )
    if problems:
        raise missed(problems, measured)
    worst = max(measured.values())
    return Found("perplexity_kept", {"kinds": len(measured), "worst": f"{worst:.4f}"}, (), measured)


def _forced_prefix(session: Session, text: Text) -> int:
    """Tokens of a continuation that the server would have chosen after all those before: where they are its likeliest.

    For servers that return no token ids: the whole text is echoed with log-probabilities.
    """
    tokens = len(text.ids)
    body = _complete(session, text.ids, 1, echo=True, logprobs=1)
    own = _prompt_logprobs(body, tokens)
    try:
        rows = body["choices"][0]["logprobs"]["top_logprobs"][text.prompt_tokens : tokens]
        best = [float(max(row.values())) for row in rows]
        pairs = list(zip(own[text.prompt_tokens :], best, strict=True))
    except BAD_FORM as error:
        raise unsupported("no_token_ids", json.dumps(body)) from error
    return next((index for index, (mine, best) in enumerate(pairs) if mine < best), tokens - text.prompt_tokens)


def _baseline(session: Session) -> Baseline:
    if session.baseline is None:
        raise skipped("no_baseline")
    return read_baseline(session.baseline, verify=False)  # its files were hashed before the first check


def _complete(session: Session, ids: Sequence[int], max_tokens: int, **options: Any) -> dict[str, Any]:
    """Body of a greedy completion of token ids; options outside the API's reference go into the request as they are."""
    endpoint = session.endpoint
    known = {name: options.pop(name) for name in ("echo", "logprobs") if name in options}
    raw = endpoint.client.completions.with_raw_response.create(
        model=endpoint.model, prompt=list(ids), max_tokens=max_tokens, temperature=0, extra_body=options, **known
    )
    try:
        body: dict[str, Any] = json.loads(raw.text)
        body["choices"][0].keys()
    except BAD_FORM as error:
        raise failed("malformed_answer", raw.text, what=repr(error)) from error
    return body


def _prompt_logprobs(body: dict[str, Any], tokens: int) -> list[float]:
    """Log-probability of each token of an echoed prompt; NaN for the first, which nothing predicts."""
    try:
        values = body["choices"][0]["logprobs"]["token_logprobs"][:tokens]
        found = [math.nan if value is None else float(value) for value in values]
    except BAD_FORM as error:
        raise unsupported("no_prompt_logprobs", json.dumps(body)) from error
    if len(found) != tokens:
        raise unsupported("no_prompt_logprobs", json.dumps(body))
    return found


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    return next((index for index, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
