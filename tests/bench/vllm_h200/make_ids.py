"""Token windows for `perplexity_vllm.py`, by kind of text.

The windows are those of quantkit_runtime's perplexity (its definition stands there), cut with the model's own
tokenizer, so that the figures of a serving engine can be laid beside the runtime's own. The engine then needs neither
the tokenizer nor the texts.

usage: make_ids.py MODEL IDS.json
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import transformers

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT), str(ROOT / "runtime")]

from quantkit_instruments.perplexity import windows

TEXTS = ROOT / "tests" / "models" / "texts"
KINDS = ("code", "english", "math", "chinese")
LENGTH = 512


def read_texts(kind: str) -> list[str]:
    """The documents of one kind, in the file's order."""
    lines = (TEXTS / f"{kind}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line)["text"] for line in lines]


def main() -> None:
    """Write `{kind: [[token id, ...], ...]}`, each inner list one window of 512 tokens."""
    model, output = sys.argv[1:]
    tokenizer = transformers.AutoTokenizer.from_pretrained(model)
    ids = {kind: windows(tokenizer, read_texts(kind), LENGTH).tolist() for kind in KINDS}
    Path(output).write_text(json.dumps(ids), encoding="utf-8")
    print({kind: len(rows) for kind, rows in ids.items()})


if __name__ == "__main__":
    main()
