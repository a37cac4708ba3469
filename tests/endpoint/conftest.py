"""A stub server for every test, and settings that take a second."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import pytest

from quantkit.acceptance.endpoint import connect
from quantkit.acceptance.outcome import Check
from quantkit.acceptance.run import CHECKS
from quantkit.acceptance.session import Session, run_check
from quantkit.acceptance.settings import Settings, load_settings
from tests.endpoint.stub import Stub, running_stub

Run = Callable[..., Check]


@pytest.fixture
def stub() -> Iterator[Stub]:
    with running_stub() as running:
        yield running


@pytest.fixture(scope="session")
def quick() -> Settings:
    values = load_settings(None).model_dump()
    values["timeout_s"] = 5
    values["function"] = {"max_tokens": 24, "structured_tokens": 64}
    load = {"concurrency": 4, "requests": 12, "max_error_rate": 0.0, "max_ttft_p99_s": 2.0}
    values["performance"] = {
        "warm_up": 1,
        "loads": {
            "short": {**load, "shapes": [[8, 8]]},
            "long": {**load, "shapes": [[64, 8]], "concurrency": 2, "requests": 4},
            "mixed": {**load, "shapes": [[8, 8], [32, 16]]},
        },
    }
    values["stability"] |= {"max_recovery_s": 5, "max_slowdown": 1000}  # a busy machine slows down as well
    return Settings.model_validate(values)


@pytest.fixture
def check(stub: Stub, quick: Settings) -> Run:
    """Runs one check against the stub with these faults."""

    def run(name: str, *faults: str, stability: Mapping[str, float] = {}, **session: object) -> Check:
        stub.faults = set(faults)
        settings = quick.model_copy(update={"stability": quick.stability.model_copy(update=dict(stability))})
        endpoint = connect(stub.url, "", timeout_s=quick.timeout_s, context=None)
        spec = next(spec for spec in CHECKS if spec.name == name)
        return run_check(spec, Session(endpoint, settings, **session))  # type: ignore[arg-type]

    return run
