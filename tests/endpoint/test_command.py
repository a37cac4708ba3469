"""`quantkit acceptance` as a user calls it: exit codes, both files, the page in a browser."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from quantkit.acceptance.settings import Settings, load_settings
from quantkit.cli import main
from quantkit.errors import UsageError
from quantkit.report.page import load_strings
from tests.browser import Browser, check_report
from tests.endpoint.stub import Stub


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(main, ["acceptance", *map(str, arguments)])


@pytest.fixture
def thresholds(quick: Settings, tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    path.write_text(yaml.safe_dump(quick.model_dump(mode="json")))
    return path


def test_a_sound_server(stub: Stub, thresholds: Path, tmp_path: Path, browser: Browser) -> None:
    out = tmp_path / "out"
    done = run("--endpoint", stub.url, "-o", out, "--thresholds", thresholds, "--soak", "0.0003")
    assert done.exit_code == 0, done.output
    assert "stub: accepted" in done.output
    report = json.loads((out / "acceptance.json").read_text())
    states = {check["name"]: check["status"] for check in report["checks"]}
    assert {name for name, status in states.items() if status == "skipped"} == {
        "greedy",
        "perplexity",
        "tasks",
        "restart",
    }
    assert set(states.values()) == {"pass", "skipped"}
    check_report(browser, out / "acceptance.html", "streams keep the protocol", "个流符合协议")
    again = run("--endpoint", stub.url, "-o", out, "--thresholds", thresholds)
    assert (again.exit_code, "earlier acceptance" in again.output) == (2, True)


def test_a_faulty_server(stub: Stub, thresholds: Path, tmp_path: Path, browser: Browser) -> None:
    stub.faults = {"tool_broken", "no_done", "ignores_stop"}
    out = tmp_path / "out"
    done = run("--endpoint", stub.url, "-o", out, "--thresholds", thresholds, "--only", "function", "--json")
    assert done.exit_code == 4
    document = json.loads(done.stdout)
    failed = {check["name"] for check in document["checks"] if check["status"] == "fail"}
    assert failed == {"streaming", "stop", "tools_named", "tools_auto"}
    assert document["passed"] is False
    page = browser.open(out / "acceptance.html", language="zh")
    assert "流没有以 [DONE] 结束" in page.text
    assert '"celsius' in page.text or "cels" in page.text  # evidence stands open under a failure


def test_every_sentence_of_a_check_is_in_the_table() -> None:
    """Keys that the checks raise, found in their source, against the table."""
    import re
    from importlib import resources

    folder = Path(str(resources.files("quantkit.acceptance")))
    source = "\n".join(path.read_text() for path in folder.glob("*.py"))
    keys = set(re.findall(r'(?:failed|skipped|Found)\(\s*"([a-z_]+)"', source))
    keys |= set(re.findall(r'(?:key=|_above\()"([a-z_]+)"', source))
    assert len(keys) > 50
    assert keys - load_strings("acceptance").keys() == set()


# ------------------------------------------------------------------------------------------------------ bad input


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--endpoint", "localhost:1"), 2, "is no address"),
        (("--endpoint", "http://127.0.0.1:9/v1"), 3, "does not answer"),
        (("--model", "other"), 2, "choices: stub"),
        (("--pid", "99999999"), 2, "no process"),
        (("--baseline", "nowhere"), 3, "no finished baseline"),
        (("--tasks", "nowhere"), 3, "No such file"),
        (("--thresholds", "nowhere"), 2, "No such file"),
    ],
)
def test_what_is_given_is_checked_first(
    arguments: tuple[str, ...], code: int, said: str, stub: Stub, tmp_path: Path
) -> None:
    done = run("--endpoint", stub.url, "-o", tmp_path / "out", *arguments)
    assert done.exit_code == code, done.output
    assert said in done.output
    assert "next: " in done.output
    assert stub.requests == 0


def test_address_without_version_path(stub: Stub, thresholds: Path, tmp_path: Path) -> None:
    wrong = run("--endpoint", f"{stub.url}/v2", "-o", tmp_path / "out")
    assert wrong.exit_code == 3
    assert "http://HOST:PORT/v1" in wrong.output
    bare = stub.url.removesuffix("/v1")
    done = run("--endpoint", bare, "-o", tmp_path / "bare", "--thresholds", thresholds, "--only", "capability")
    assert done.exit_code == 0, done.output


def test_unknown_keys_of_thresholds_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("accuracy: {min_agreement: 2}\nspeed: fast\n")
    with pytest.raises(UsageError) as caught:
        load_settings(path)
    assert [item.split(":")[0] for item in caught.value.items] == ["accuracy.min_agreement", "speed"]
    path.write_text("stability: {noise_mib: 1}\n")
    assert load_settings(path).stability.noise_mib == 1
    assert load_settings(path).accuracy == load_settings(None).accuracy
