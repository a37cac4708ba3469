"""What must stay readable: the runtime in an afternoon, any file at one sitting.

A line of code is one with a token other than a comment or a string that stands alone (docstrings); blank lines do not
count. Of the runtime its kernels and what measures it (`quantkit_instruments`) count apart.
"""

from __future__ import annotations

import ast
import tokenize
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
RUNTIME = ROOT / "runtime" / "quantkit_runtime"
RUNTIME_CODE, FILE_LINES = 3000, 400
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def code_lines(path: Path) -> int:
    with path.open("rb") as file:
        tokens = [
            token for token in tokenize.tokenize(file.readline) if token.type not in {*NO_CODE, tokenize.ENCODING}
        ]
    lines = {line for token in tokens for line in range(token.start[0], token.end[0] + 1)}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            lines -= set(range(node.lineno, (node.end_lineno or 0) + 1))
    return len(lines)


def test_lines_of_code_are_counted_as_said(tmp_path: Path) -> None:
    file = tmp_path / "example.py"
    code = ["x = [", "    1,  # one", "]", "def f():", '    return """a', 'b"""']
    other = ['"""Two', 'lines."""', "", "# comment"]
    file.write_text("\n".join([*other, *code[:4], '    """No code."""', *code[4:]]))
    assert code_lines(file) == len(code)


def test_the_runtime_without_kernels_is_small() -> None:
    counted = {path.name: code_lines(path) for path in sorted(RUNTIME.glob("*.py"))}
    assert {path.name for path in RUNTIME.iterdir() if path.is_dir() and path.name != "__pycache__"} == {"kernels"}
    assert sum(counted.values()) < RUNTIME_CODE, counted


@pytest.mark.parametrize("folder", ["quantkit", "runtime"])
def test_no_file_is_long(folder: str) -> None:
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in (ROOT / folder).rglob("*.py")}
    assert len(lengths) > 30
    assert not {str(path): length for path, length in lengths.items() if length > FILE_LINES}
