"""Dimension "function": does the API do what its reference says, with sentences that any model can complete."""

from __future__ import annotations

import openai

from quantkit.acceptance.endpoint import message_of, said
from quantkit.acceptance.outcome import failed, skipped
from quantkit.acceptance.session import Found, Session
from quantkit.acceptance.talk import ask, ask_streamed, user

ENGLISH = "Write a short text about the sea and the ships that sail on it."
CHINESE = "请用中文写一段关于大海和船的短文，并用一个表情符号结尾。"
COUNTING = "Count from 1 to 200, separated by commas."
REPLACEMENT = "\ufffd"
_BOUND = 8
_OVER = 1.2
"""An over-long prompt has at least so many times the context in words."""
_LEAST_STOP = 3
"""Characters of a stop string: shorter ones may begin the text."""


def single_turn(session: Session) -> Found:
    answer = ask(session.endpoint, user(ENGLISH), max_tokens=session.settings.function.max_tokens)
    if not answer.everything.strip():
        raise failed("empty_answer", ENGLISH)
    if answer.prompt_tokens <= 0 or answer.completion_tokens <= 0:
        raise failed("usage_missing", prompt=answer.prompt_tokens, completion=answer.completion_tokens)
    return Found("answered", {"tokens": answer.completion_tokens}, evidence=(ENGLISH, answer.everything))


def multi_turn(session: Session) -> Found:
    most = session.settings.function.max_tokens
    first = ask(session.endpoint, user(ENGLISH), max_tokens=most)
    history = [
        *user(ENGLISH),
        {"role": "assistant", "content": first.text or "..."},
        *user("Now say it in one sentence."),
    ]
    second = ask(session.endpoint, history, max_tokens=most)
    if not second.everything.strip():
        raise failed("empty_answer", *map(str, history))
    if second.prompt_tokens <= first.prompt_tokens:
        raise failed("history_dropped", first=first.prompt_tokens, second=second.prompt_tokens)
    return Found("history_counts", {"first": first.prompt_tokens, "second": second.prompt_tokens}, (second.everything,))


def finish_reason(session: Session) -> Found:
    """A bound on the tokens is kept and said: an answer that goes on under a wider bound was cut by the first."""
    answer, longer = (ask(session.endpoint, user(COUNTING), max_tokens=most) for most in (_BOUND, 2 * _BOUND))
    if longer.completion_tokens > _BOUND and answer.finish != "length":
        raise failed(
            "finish_wrong", answer.everything, got=answer.finish, tokens=answer.completion_tokens, wanted=_BOUND
        )
    return Found("finish_right", {"reason": answer.finish, "tokens": answer.completion_tokens}, (answer.everything,))


def streaming(session: Session) -> Found:
    """Events keep the protocol, and together they are the answer that comes without a stream."""
    most, repeatable = session.settings.function.max_tokens, True
    for prompt in (ENGLISH, CHINESE):
        whole = [ask(session.endpoint, user(prompt), max_tokens=most) for _ in range(2)]
        streamed = ask_streamed(session.endpoint, user(prompt), max_tokens=most)
        if REPLACEMENT in streamed.everything and REPLACEMENT not in whole[0].everything:
            raise failed("stream_broken_characters", streamed.everything)
        texts = [(answer.reasoning, answer.text) for answer in (*whole, streamed)]
        if texts[0] != texts[1]:
            repeatable = False
        elif texts[2] != texts[0]:
            raise failed("stream_differs", whole[0].everything, streamed.everything)
        elif streamed.finish != whole[0].finish:
            raise failed("stream_finish_differs", whole=whole[0].finish, streamed=streamed.finish)
        elif streamed.completion_tokens not in (-1, whole[0].completion_tokens):
            raise failed("stream_usage", whole=whole[0].completion_tokens, streamed=streamed.completion_tokens)
    return Found("stream_equal" if repeatable else "stream_unrepeatable", {"n": 2})


def stop(session: Session) -> Found:
    """The answer ends before a string that it is known to hold."""
    most = session.settings.function.max_tokens
    plain = ask(session.endpoint, user(ENGLISH), max_tokens=most)
    words = [word for word in plain.everything.split()[2:] if len(word) >= _LEAST_STOP]
    if not words:
        raise failed("empty_answer", plain.everything)
    word = words[len(words) // 2]
    answer = ask(session.endpoint, user(ENGLISH), max_tokens=most, stop=[word])
    evidence = (f"stop: {word!r}", plain.everything, answer.everything)
    if word in answer.everything:
        raise failed("stop_ignored", *evidence, word=word)
    if answer.finish != "stop":
        raise failed("stop_reason", *evidence, got=answer.finish)
    wanted = plain.everything.partition(word)[0]
    if answer.everything.rstrip() != wanted.rstrip() and _repeatable(session, plain.everything, most):
        raise failed("stop_text", *evidence)
    return Found("stop_kept", {"word": word}, evidence)


def _repeatable(session: Session, text: str, most: int) -> bool:
    return ask(session.endpoint, user(ENGLISH), max_tokens=most).everything == text


def long_input(session: Session) -> Found:
    """A prompt beyond the context is refused with a message, and the server lives on."""
    context = session.endpoint.context
    if context is None:
        raise skipped("context_unknown")
    prompt = "one two three four five six seven eight " * (int(context * _OVER) // 8 + 1)
    try:
        answer = ask(session.endpoint, user(prompt), max_tokens=8)
    except openai.APIStatusError as error:
        _readable_refusal(error)
        after = ask(session.endpoint, user(ENGLISH), max_tokens=8)
        return Found("refused_readably", {"status": error.status_code}, (said(error), after.text))
    raise failed("long_accepted", answer.text, tokens=answer.prompt_tokens, context=context)


def bad_request(session: Session) -> Found:
    """A value out of range is the client's error (4xx) with a message, not the server's (5xx)."""
    try:
        answer = ask(session.endpoint, user(ENGLISH), max_tokens=8, top_p=7.5)
    except openai.APIStatusError as error:
        _readable_refusal(error)
        return Found("refused_readably", {"status": error.status_code}, (said(error),))
    raise failed("bad_accepted", answer.text)


def _readable_refusal(error: openai.APIStatusError) -> None:
    if error.status_code >= 500:
        raise failed("server_error", said(error), status=error.status_code) from error
    message = message_of(error.body)
    if not isinstance(message, str) or not message.strip():
        raise failed("unreadable_error", str(error.body), status=error.status_code) from error
