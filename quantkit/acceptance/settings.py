"""Settings and thresholds of `quantkit acceptance`: one YAML file, an unknown key is an error.

The shipped file is `default.yaml` beside this module; a file of the user's replaces the keys that it names.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from quantkit.errors import UsageError
from quantkit.spec.document import Strict, problems_of, read_yaml

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1)]


class Function(Strict):
    """Attributes:
    max_tokens: of an answer.
    structured_tokens: of an answer in a given form, which cannot be cut.
    """

    max_tokens: Count
    structured_tokens: Count


class Accuracy(Strict):
    """Attributes:
    min_agreement: mean share of a greedy continuation's characters before the first difference to the baseline.
    max_perplexity_ratio: of the server's perplexity on the prompts to the baseline's, where the server can tell.
    """

    min_agreement: Share
    max_perplexity_ratio: Positive


class Capability(Strict):
    """Attributes:
    depths: places of the needle in the text, 0 the start.
    lengths: of the text, as shares of the context.
    answer_tokens: of an answer; a model that reasons needs many.
    min_needles: share of needles that must be found.
    min_tasks: share of the user's tasks that must be solved.
    """

    depths: tuple[Share, ...]
    lengths: tuple[Share, ...]
    answer_tokens: Count
    min_needles: Share
    min_tasks: Share


class Load(Strict):
    """Requests of one or several shapes, so many at a time; every prompt is unique.

    Attributes:
        shapes: (prompt tokens, output tokens), taken in turn.
        concurrency: requests at a time.
        requests: in all.
        max_error_rate: of the requests.
        max_ttft_p99_s: seconds to the first token; None: only recorded.
        max_token_p99_s: seconds for each further token; None: only recorded.
        min_tokens_per_s: output tokens of all requests together; None: only recorded.
    """

    shapes: Annotated[tuple[tuple[Count, Count], ...], Field(min_length=1)]
    concurrency: Count
    requests: Count
    max_error_rate: Share = 0.0
    max_ttft_p99_s: Positive | None = None
    max_token_p99_s: Positive | None = None
    min_tokens_per_s: Positive | None = None


class Performance(Strict):
    """Attributes:
    warm_up: requests of full length before each load.
    loads: by name; "mixed" is the one that the soak takes its rate from.
    """

    warm_up: Count
    loads: dict[str, Load]


class Stability(Strict):
    """Attributes:
    load_share: of the rate of requests that the mixed load reached.
    max_error_rate: of the requests of the soak.
    max_growth_mib_per_hour: of the server's memory after the first third; smaller than `noise_mib` in all never counts.
    noise_mib: growth that says nothing.
    max_slowdown: median latency per token in the last third over that of the first.
    max_recovery_s: from the restart command to the first answer.
    """

    load_share: Annotated[float, Field(gt=0, le=1)]
    max_error_rate: Share
    max_growth_mib_per_hour: Positive
    noise_mib: Positive
    max_slowdown: Positive
    max_recovery_s: Positive


class Settings(Strict):
    """All of it.

    Attributes:
        seed: of prompts and needles.
        timeout_s: until the next bytes of an answer; the whole of it may take ten times as long.
        extra_body: put into every chat request, as `chat_template_kwargs: {enable_thinking: false}` for a model that
            reasons before it answers and shall not.
    """

    seed: Annotated[int, Field(ge=0)]
    timeout_s: Positive
    extra_body: dict[str, Any]
    function: Function
    accuracy: Accuracy
    capability: Capability
    performance: Performance
    stability: Stability


def load_settings(path: Path | None) -> Settings:
    """The shipped settings, with the keys of a file in their place.

    Raises:
        UsageError: unreadable, not YAML, unknown keys or bad values (all listed).
    """
    file = resources.files("quantkit.acceptance") / "default.yaml"
    shipped = read_yaml(file, "the shipped settings", "an installation that is whole")
    if path is None:
        return Settings.model_validate(shipped)
    own = read_yaml(path, str(path), "a YAML file of thresholds") or {}
    if not isinstance(own, dict):
        raise UsageError(f"{path} is not a mapping of keys", "correct it", choices=sorted(Settings.model_fields))
    try:
        return Settings.model_validate(_merged(shipped, own))
    except ValidationError as error:
        raise UsageError(
            f"{path} has {error.error_count()} problems",
            "correct it; every key is described in quantkit/acceptance/settings.py",
            items=problems_of(error),
        ) from error


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in over.items():
        old = base.get(key)
        merged[key] = _merged(old, value) if isinstance(old, dict) and isinstance(value, dict) else value
    return merged
