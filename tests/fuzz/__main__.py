"""The fuzzer as a program: damaged files and answers for every parser of what others wrote.

python -m tests.fuzz                          200 cases of each parser
python -m tests.fuzz --minutes 60 --workers 2 for an hour, result in tests/bench/results/fuzz.json
python -m tests.fuzz config --seed 7          one case again, with its traceback
python -m tests.fuzz --add-up A.json B.json --result C.json    several sessions as one
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[2] / "runtime")]

from tests.fuzz.runs import add_up, one, session  # noqa: E402


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parsers", nargs="*", help="Names; default: all.")
    parser.add_argument("--minutes", type=float, default=0, help="How long; 0: `--cases` of each parser.")
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--seed", type=int, help="Run this case of the one parser that is named.")
    parser.add_argument("--folder", type=Path, help="For the sound files and the cases; default: build/fuzz.")
    parser.add_argument("--result", type=Path, help="JSON file for what was found.")
    parser.add_argument("--add-up", type=Path, nargs="+", help="Results of sessions to write as one to `--result`.")
    options = parser.parse_args()
    if options.add_up:
        add_up(options.add_up, options.result)
        return 0
    folder = options.folder or Path(__file__).parents[2] / "build" / "fuzz"
    if options.seed is not None:
        return one(options.parsers[0], options.seed, folder)
    return session(
        options.parsers,
        folder,
        minutes=options.minutes,
        cases=options.cases,
        workers=options.workers,
        first_seed=options.first_seed,
        result=options.result,
    )


if __name__ == "__main__":
    sys.exit(main())
