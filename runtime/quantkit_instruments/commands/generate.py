"""`quantkit-runtime generate`: continue texts, many at once, greedy or sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from quantkit.console import console, json_option, print_json
from quantkit_instruments.commands.common import open_session, print_session, session_options, session_report


@click.command("generate")
@click.argument("folder", type=click.Path(path_type=Path))
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; give it more than once for a batch.")
@click.option("--prompts", "file", type=click.Path(path_type=Path), help="File with one prompt a line.")
@click.option("--max-new-tokens", type=click.IntRange(1), default=64, show_default=True, help="Of each text.")
@click.option("--batch", type=click.IntRange(1), help="Most texts at once; default: all.")
@click.option("--temperature", default=0.0, show_default=True, help="0 takes the likeliest token.")
@click.option("--top-k", default=0, show_default=True, help="Keep the k likeliest tokens; 0: all.")
@click.option("--top-p", default=1.0, show_default=True, help="Keep the likeliest tokens up to this probability.")
@click.option("--repetition-penalty", default=1.0, show_default=True, help="Above 1 against repetition.")
@click.option("--seed", default=0, show_default=True, help="Of the draws; the n-th text draws with seed + n.")
@session_options
@json_option
def command(
    folder: Path,
    prompts: tuple[str, ...],
    file: Path | None,
    max_new_tokens: int,
    batch: int | None,
    temperature: float,
    top_k: int,
    top_p: float,
    repetition_penalty: float,
    seed: int,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue texts with a converted FOLDER of either form, or a plain checkpoint.

    \b
    Examples:
      quantkit-runtime generate OUT --prompt "The sea" --prompt "Once"
      quantkit-runtime generate OUT --prompts texts.txt --temperature 0.7 --top-p 0.9
    """
    from quantkit.archs.modeling import load_tokenizer, text_of
    from quantkit_instruments.tokenizer import encode, read_prompts, require_positions, stop_tokens, vocab_size
    from quantkit_runtime.loader import require_folder
    from quantkit_runtime.parallel import leave
    from quantkit_runtime.sampling import Sampling

    require_folder(folder)
    tokenizer = load_tokenizer(folder)
    texts = [*prompts, *(read_prompts(file) if file else ())] or ["The"]
    vocab = vocab_size(folder)
    ids = [encode(tokenizer, text, vocab) for text in texts]
    sampling = Sampling(temperature, top_k, top_p, repetition_penalty, seed)
    context, at_once = require_positions(folder, max(map(len, ids)), max_new_tokens), min(batch or len(ids), len(ids))
    loaded, engine, table = open_session(
        folder, context, at_once, sampling=sampling, stop=stop_tokens(folder), **options
    )
    out = console(as_json)
    print_session(out, loaded, engine, table)
    found = engine.generate(ids, max_new_tokens)
    whole = [text_of(tokenizer, [*prompt, *one.tokens], special=False) for prompt, one in zip(ids, found, strict=True)]
    for text, one in zip(whole, found, strict=True):
        out.print(f"{len(one.tokens)} new tokens{' up to a stop token' if one.stopped else ''}: {text!r}", markup=False)
    counts = vars(engine.counts)
    out.print(
        f"forwards: {counts['prefills']} of prefill, {counts['decodes']} of decode, "
        f"of which {engine.runner.replays['prefill']} and {engine.runner.replays['decode']} were graphs; "
        f"sequences that gave their KV blocks back and were computed again: {counts['preemptions']}"
    )
    leave()
    if as_json:
        texts_json = [
            {"text": text, "tokens": list(one.tokens), "stopped": one.stopped, "prompt_tokens": len(prompt)}
            for text, one, prompt in zip(whole, found, ids, strict=True)
        ]
        print_json({**session_report(loaded, engine, table), "generated": texts_json, "counts": counts})
