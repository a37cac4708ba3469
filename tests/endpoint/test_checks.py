"""Each fault of a server is named by the check that looks for it, and a sound server passes all."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from quantkit.acceptance.capability import haystack, read_tasks
from quantkit.acceptance.endpoint import connect
from quantkit.acceptance.load import Sample, figures
from quantkit.acceptance.run import CHECKS
from quantkit.acceptance.session import Session, run_check
from quantkit.acceptance.settings import Settings
from quantkit.acceptance.stability import slowing, theil_sen
from quantkit.errors import InputError
from tests.endpoint.conftest import Run
from tests.endpoint.stub import Stub

SOUND = [spec.name for spec in CHECKS if spec.name not in ("greedy", "perplexity", "tasks", "soak", "restart")]


@pytest.mark.parametrize("name", SOUND)
def test_a_sound_server_passes(name: str, check: Run) -> None:
    found = check(name)
    assert found.status == "pass", found


@pytest.mark.parametrize(
    ("fault", "name", "key"),
    [
        ("errors", "single_turn", "server_error"),
        ("unknown_finish", "single_turn", "finish_unknown"),
        ("wrong_finish", "finish_reason", "finish_wrong"),
        ("forgets", "multi_turn", "history_dropped"),
        ("broken_events", "streaming", "no_json"),
        ("cuts_stream", "streaming", "connection_lost"),
        ("no_finish", "streaming", "stream_truncated"),
        ("no_done", "streaming", "stream_no_done"),
        ("other_text", "streaming", "stream_differs"),
        ("cuts_characters", "streaming", "stream_broken_characters"),
        ("ignores_stop", "stop", "stop_ignored"),
        ("tool_broken", "tools_named", "tool_arguments"),
        ("tool_unknown", "tools_auto", "tool_unknown"),
        ("tool_finish", "tools_auto", "tool_finish"),
        ("breaks_schema", "structured_output", "structure_broken"),
        ("takes_anything", "bad_request", "bad_accepted"),
        ("unreadable_errors", "bad_request", "unreadable_error"),
        ("long_is_cut", "long_input", "long_accepted"),
        ("long_breaks", "long_input", "server_error"),
        ("loses_middle", "needles", "needles_missed"),
        ("some_errors", "short", "load_errors"),
        ("cuts_stream", "short", "load_errors"),
        ("slow", "short", "load_ttft"),
    ],
)
def test_a_fault_is_named(fault: str, name: str, key: str, check: Run) -> None:
    found = check(name, fault)
    assert found.status == "fail"
    assert key in [finding.key for finding in found.findings]
    assert found.evidence or found.findings[0].values


@pytest.mark.parametrize("name", ["single_turn", "multi_turn", "finish_reason", "streaming", "stop", "short"])
def test_a_model_that_reasons_first(name: str, check: Run) -> None:
    """What the server tells apart as reasoning is part of the answer."""
    assert check(name, "reasons").status == "pass"
    if name == "streaming":
        assert check(name, "reasons", "other_text").findings[0].key == "stream_differs"


@pytest.mark.parametrize(
    ("fault", "name"), [("no_tools", "tools_named"), ("no_auto_tools", "tools_auto"), ("no_tools", "tools_auto")]
)
def test_a_feature_that_the_server_refuses_is_no_failure(fault: str, name: str, check: Run) -> None:
    found = check(name, fault)
    assert found.status == "unsupported"
    assert "tool choice" in found.evidence[0]


def test_prompts_of_a_load_are_unique(check: Run, stub: Stub) -> None:
    check("short")
    check("mixed")
    starts = [prompt[:40] for prompt in stub.prompts]
    assert len(starts) == len(set(starts)) == 12 + 1 + 12 + 1


def test_every_chat_request_carries_the_extra_body(stub: Stub, quick: Settings) -> None:
    extra = {"chat_template_kwargs": {"enable_thinking": False}}
    endpoint = connect(stub.url, "", timeout_s=5, context=None, extra_body=extra)
    for name in ("single_turn", "streaming", "structured_output", "short", "restart"):
        spec = next(spec for spec in CHECKS if spec.name == name)
        run_check(spec, Session(endpoint, quick, restart_command="exit 3"))
    assert stub.bodies
    assert all(body["chat_template_kwargs"] == extra["chat_template_kwargs"] for body in stub.bodies)


def test_context_of_the_needles_is_used(check: Run, stub: Stub) -> None:
    stub.context = 4000
    found = check("needles")
    assert found.measured == {"solved": 9, "of": 9}
    lengths = [int(row.split()[1]) for row in found.evidence]
    assert 3400 < max(lengths) < 4000
    assert 250 < min(lengths) < 500


@pytest.mark.parametrize("lines", [12, 9000])
def test_sentences_of_long_texts_are_no_longer(lines: int) -> None:
    """A tokenizer that splits numbers into digits must find the length that a short text promised."""
    text = haystack(lines, 0.5, "12345", 0)
    digits = sum(character.isdigit() for character in text)
    assert digits == 8 * (lines - 1) + 5
    assert text.count("\n") == lines - 1


# ---------------------------------------------------------------------------------------------------- your tasks


def test_tasks(check: Run, tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    rows = ['{"prompt": "What is 2 plus 3?", "equals": "5"}', '{"prompt": "4 plus 4", "regex": "^8$", "kind": "sum"}']
    path.write_text("\n".join(rows))
    assert check("tasks", tasks=path).status == "pass"
    path.write_text("\n".join([rows[0], '{"prompt": "1 plus 1", "contains": ["3"], "kind": "wrong"}']))
    found = check("tasks", tasks=path)
    assert found.findings[0].key == "tasks_missed"
    assert found.evidence[0].startswith("wrong: ")


def test_lines_that_are_no_tasks_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "tasks.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": "a", "regex": "("}\nx\n{"prompt": "a", "equals": "b", "colour": 1}\n')
    with pytest.raises(InputError) as caught:
        read_tasks(path)
    assert [item.split(":")[0] for item in caught.value.items] == ["line 1", "line 2", "line 3", "line 4"]


# ----------------------------------------------------------------------------------------------------- stability

HOURS = 1 / 3600


def test_soak(check: Run, stub: Stub) -> None:
    stub.token_s = 0.001
    found = check("soak", soak_hours=HOURS, rate=40.0)
    assert found.status == "pass", found
    assert found.measured["growth_mib"] == 0
    assert 16 < found.measured["requests"] < 48  # 80 % of 40 a second
    without = check("soak", "no_metrics", soak_hours=HOURS, rate=40.0)
    assert without.findings[0].key == "soak_without_memory"


def test_leak_is_named(check: Run) -> None:
    found = check("soak", "leak", soak_hours=HOURS, rate=40.0)
    assert [finding.key for finding in found.findings] == ["memory_grows"]


def test_slowing_down_is_named(check: Run, stub: Stub) -> None:
    stub.token_s = 0.002
    found = check("soak", "slows_down", soak_hours=3 * HOURS, rate=40.0, stability={"max_slowdown": 2})
    assert "latency_grows" in [finding.key for finding in found.findings]


def test_soak_is_off_by_default(check: Run) -> None:
    assert check("soak").status == "skipped"
    assert check("soak", soak_hours=1.0).findings[0].key == "soak_without_rate"


def restart_command(stub: Stub, seconds: float) -> str:
    address = stub.url.removesuffix("/v1") + "/restart"
    code = f"import urllib.request as r; r.urlopen('{address}', b'{{\\\"seconds\\\": {seconds}}}')"
    return f'{sys.executable} -S -c "{code}"'


def test_recovery_is_measured(check: Run, stub: Stub) -> None:
    found = check("restart", restart_command=restart_command(stub, 0.5))
    assert found.status == "pass", found
    assert 0.4 < found.measured["recovery_s"] < 5


@pytest.mark.parametrize(
    ("command", "key"), [("true", "never_down"), ("exit 3", "restart_command_failed"), ("", "no_restart")]
)
def test_restart_that_is_none(command: str, key: str, check: Run) -> None:
    assert check("restart", restart_command=command, stability={"max_recovery_s": 0.6}).findings[0].key == key


def test_no_recovery(check: Run, stub: Stub) -> None:
    assert (
        check("restart", restart_command=restart_command(stub, 30), stability={"max_recovery_s": 1.5}).findings[0].key
        == "no_recovery"
    )


# ------------------------------------------------------------------------------------------------------- figures


def test_figures_of_a_load() -> None:
    samples = [Sample(start=i, first=i + 0.5, end=i + 2.5, prompt_tokens=10, tokens=21) for i in range(4)]
    found = figures([*samples, Sample(start=4, end=5, error="500 no")])
    assert found["error_rate"] == 0.2
    assert found["tokens_per_s"] == pytest.approx(4 * 21 / 5.5)
    assert found["ttft_p50_s"] == pytest.approx(0.5)
    assert found["token_p99_s"] == pytest.approx(0.1)


def test_slopes_ignore_single_peaks() -> None:
    points = [(float(t), 100.0 + 2 * t) for t in range(20)]
    points[7] = (7.0, 5000.0)
    assert theil_sen(points) == pytest.approx(2, rel=0.02)
    steady = [Sample(start=i, first=i, end=i + 1.0, tokens=11) for i in range(30)]
    assert slowing(steady) == pytest.approx(1)
    assert slowing(steady[:6]) is None
