"""The public command line is frozen: commands, arguments, options, defaults and exit codes stand in command_line.txt.

Scripts of users depend on each line of it. When one is meant to change, say so in CHANGES.md and write the table anew:

    python tests/test_command_line.py > tests/command_line.txt
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from pathlib import Path

import click
from click.testing import CliRunner

from quantkit import console, errors
from quantkit.cli import main as toolkit
from quantkit_instruments import doctor
from quantkit_instruments.cli import main as runtime

TABLE = Path(__file__).with_name("command_line.txt")
PROGRAMS = {"quantkit": toolkit, "quantkit-runtime": runtime}


def lines() -> Iterator[str]:
    """The table as the code has it."""
    for program, group in PROGRAMS.items():
        context = click.Context(group, info_name=program)
        yield from (f"{program} {_parameter(parameter)}" for parameter in group.get_params(context))
        for name in group.list_commands(context):
            command = group.get_command(context, name)
            assert command is not None
            yield f"{program} {name}"
            inside = click.Context(command, parent=context, info_name=name)
            yield from sorted(f"{program} {name} {_parameter(parameter)}" for parameter in command.get_params(inside))
    yield from (f"exit code {code}: {what}" for code, what in sorted(_exit_codes()))


def _parameter(parameter: click.Parameter) -> str:
    """Names, what it takes, whether it must be given, how often, and its default."""
    kind = parameter.type
    if isinstance(parameter, click.Argument):
        words = [parameter.human_readable_name, _type(kind)]
    else:
        assert isinstance(parameter, click.Option)
        names = [*parameter.opts, *parameter.secondary_opts]
        words = [" ".join(sorted(names, key=lambda name: (-len(name), name)))]
        words += [] if parameter.is_flag else [_type(kind)]
        default = parameter.to_info_dict()["default"]
        shown = None if callable(default) or parameter.is_flag or default in (None, ()) else default
        words += [] if shown is None else [f"default {shown if shown != '' else repr(shown)}"]
    words += ["required"] if parameter.required else []
    words += ["repeatable"] if parameter.multiple or parameter.nargs == -1 else []
    return " ".join(words)


def _type(kind: click.ParamType) -> str:
    if isinstance(kind, click.Choice):
        return "|".join(map(str, kind.choices))
    if isinstance(kind, click.IntRange | click.FloatRange):
        low, high = ("" if bound is None else f"{bound:g}" for bound in (kind.min, kind.max))
        open_ = (">" if kind.min_open else ""), ("<" if kind.max_open else "")
        return f"{kind.name.partition(' ')[0].upper()} {open_[0]}{low}..{open_[1]}{high}"
    return kind.name.upper()


def _exit_codes() -> Iterator[tuple[int, str]]:
    found = [errors.QuantkitError]
    for each in found:
        found += each.__subclasses__()
        if each.__module__ == errors.__name__:
            yield each.exit_code, each.__name__
    yield from ((code, f"doctor, {check}") for check, code in doctor.CODES.items())
    yield console.INTERRUPTED, "ended by SIGINT; other signals 128 and their number alike"


def test_command_line_is_the_table() -> None:
    now, frozen = [line + "\n" for line in lines()], TABLE.read_text(encoding="utf-8").splitlines(keepends=True)
    changed = "".join(difflib.unified_diff(frozen, now, TABLE.name, "the code"))
    assert not changed, f"{changed}\n{__doc__}"


def test_both_programs_exit_with_the_codes_of_the_table(tmp_path: Path) -> None:
    """Exit codes as processes see them, of the two families that every command has."""
    for group, arguments in ((toolkit, ["inspect"]), (runtime, ["smoke-load"])):
        run = CliRunner().invoke
        assert run(group, ["no-such-command"]).exit_code == errors.UsageError.exit_code
        assert run(group, [*arguments, "--no-such-option"]).exit_code == errors.UsageError.exit_code
        assert run(group, [*arguments, str(tmp_path / "nothing")]).exit_code == errors.InputError.exit_code
        assert run(group, ["--help"]).exit_code == 0


if __name__ == "__main__":
    print("\n".join(lines()))
