"""The server under test: clients that never retry, what it says of itself, its metrics."""

from __future__ import annotations

import os
import re
import urllib.request
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from http.client import HTTPException
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit, urlunsplit

from quantkit.acceptance.bounds import Endless, bounded, bounded_async, read_bounded
from quantkit.errors import InputError, UsageError, first_line

if TYPE_CHECKING:
    from openai import AsyncOpenAI, OpenAI

BAD_FORM = (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RecursionError)
"""What taking an answer apart raises when it has not the form of the API: a key, a type or a value is another."""

KEY_VARIABLE = "OPENAI_API_KEY"
MAX_CONTEXT = 2**24
"""Tokens; prompts are made as long as a server says that it takes, and no model takes more."""

_METRIC = re.compile(r"^([A-Za-z_:][\w:]*)(?:{[^}]*})? ([^ ]+)")
_METRICS_TIMEOUT_S = 10


@dataclass(frozen=True)
class Endpoint:
    """An OpenAI-compatible server.

    Attributes:
        url: base address with its version path, `http://HOST:PORT/v1`.
        model: name that requests carry.
        timeout_s: of a request.
        context: tokens of prompt and answer, None when neither the server nor the user says.
        extra_body: put into every chat request.
    """

    url: str
    model: str
    timeout_s: float
    context: int | None = None
    extra_body: Mapping[str, Any] = field(default_factory=dict)

    @cached_property
    def client(self) -> OpenAI:
        openai = _openai()
        hooks = {"response": [partial(bounded, timeout_s=self.timeout_s)]}
        client: OpenAI = openai.OpenAI(**self._arguments(), http_client=openai.DefaultHttpxClient(event_hooks=hooks))
        return client

    def async_client(self) -> AsyncOpenAI:
        openai = _openai()
        http = openai.DefaultAsyncHttpxClient(
            event_hooks={"response": [partial(bounded_async, timeout_s=self.timeout_s)]}
        )
        client: AsyncOpenAI = openai.AsyncOpenAI(**self._arguments(), http_client=http)
        return client

    def _arguments(self) -> dict[str, Any]:
        # A retry would hide the fault that the checks look for. Servers without a key take any.
        key = os.environ.get(KEY_VARIABLE) or "none"
        return {"base_url": self.url, "api_key": key, "timeout": self.timeout_s, "max_retries": 0}

    @property
    def shown(self) -> str:
        """Address without user and password."""
        parts = urlsplit(self.url)
        return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))

    def metrics(self) -> dict[str, float]:
        """The server's Prometheus metrics by name, summed over labels; empty when it has none."""
        parts = urlsplit(self.url)
        address = urlunsplit((parts.scheme, parts.netloc, "/metrics", "", ""))
        try:
            with urllib.request.urlopen(address, timeout=_METRICS_TIMEOUT_S) as answer:
                text = read_bounded(answer, _METRICS_TIMEOUT_S).decode("utf-8", "replace")
        except (OSError, ValueError, HTTPException, Endless):
            return {}
        found: defaultdict[str, float] = defaultdict(float)
        for line in text.splitlines():
            if match := _METRIC.match(line):
                try:
                    found[match[1]] += float(match[2])
                except ValueError:
                    continue
        return dict(found)


def connect(
    url: str, model: str, *, timeout_s: float, context: int | None, extra_body: Mapping[str, Any] | None = None
) -> Endpoint:
    """Look at the server and find the model.

    Args:
        model: "" for the only one that is served.
        context: overrides what the server says (`max_model_len` of vLLM and SGLang).

    Raises:
        UsageError: no such model, or several and none was named.
        InputError: nobody answers, or not as an OpenAI-compatible server does.
    """
    openai = _openai()
    if urlsplit(url).scheme not in ("http", "https"):
        raise UsageError(f"{url!r} is no address of a server", "give --endpoint http://HOST:PORT/v1")
    if urlsplit(url).path in ("", "/"):
        url = url.rstrip("/") + "/v1"
    probe = Endpoint(url, model, timeout_s)
    try:
        rows: list[Any] = list(probe.client.models.list().data)  # the client does not check their form
        served = {row.id: row for row in rows if isinstance(row.id, str)}
    except openai.APIConnectionError as error:
        raise InputError(
            f"{probe.shown} does not answer: {error.__cause__ or error}",
            "start the server (`vllm serve OUT`), wait until it is ready, and check host and port",
        ) from error
    except openai.APIError as error:
        raise InputError(
            f"{probe.shown}/models: {said(error)}",
            f"give the address with the API's version, http://HOST:PORT/v1, and the key in {KEY_VARIABLE}",
        ) from error
    except (Endless, *BAD_FORM) as error:
        raise InputError(
            f"{probe.shown}/models does not answer as an OpenAI-compatible server does: {first_line(error)}",
            "give the address with the API's version, http://HOST:PORT/v1",
        ) from error
    if not model and len(served) == 1:
        model = next(iter(served))
    if model not in served:
        what = f"the server has no model {model!r}" if model else "the server has several models"
        raise UsageError(what, "name one with --model", choices=sorted(served))
    stated = getattr(served[model], "max_model_len", None)
    if context is None and isinstance(stated, int) and 0 < stated <= MAX_CONTEXT:
        context = stated
    return replace(probe, model=model, context=context, extra_body=extra_body or {})


def said(error: Exception) -> str:
    """What the server wrote in its refusal: status and message."""
    status = getattr(error, "status_code", None)
    return f"{status} {message_of(getattr(error, 'body', None)) or error}" if status else str(error)


def message_of(body: object) -> object:
    """What stands where the body of a refusal has its message."""
    inner = body.get("error", body) if isinstance(body, dict) else body
    return inner.get("message") if isinstance(inner, dict) else inner


def _openai() -> Any:
    try:
        import openai
    except ImportError as error:
        raise UsageError(
            "acceptance needs the openai client, which is not installed", "pip install 'quantkit[acceptance]'"
        ) from error
    return openai
