"""The parsers under test: what each one's case damages, and which of quantkit's functions and commands then read it.

A case is prepared here, outside the watch; what it returns is run under it.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
from click.testing import CliRunner
from pydantic import ValidationError

from quantkit.acceptance.capability import read_tasks
from quantkit.acceptance.settings import load_settings
from quantkit.archs.modeling import load_tokenizer
from quantkit.checkpoint.reader import Source
from quantkit.cli import main as quantkit
from quantkit.compare.companions import tokenizer_record
from quantkit.compare.limits import load_limits
from quantkit.compare.saved import Saved, read_saved
from quantkit.errors import QuantkitError
from quantkit.ladder.rungs import load_rungs
from quantkit.outdir import WORK_NAME
from quantkit.recipe import load_recipe
from quantkit.spec.baseline import read_baseline, sequences_digest
from quantkit.spec.calibration import read_summary
from quantkit.spec.manifest import COMPARISON_NAME, Manifest, manifest_bytes, manifest_path, read_manifest
from quantkit.spec.tensorfile import read_header, read_tensors
from quantkit_instruments.cli import main as runtime
from quantkit_instruments.tokenizer import read_prompts
from quantkit_runtime.kernels import tuning
from tests import stopped
from tests.convert.helpers import tree
from tests.fuzz import corpus as files
from tests.fuzz import mutate
from tests.fuzz.guard import Limits

ROOT = Path(__file__).parents[2]
EXIT_CODES = frozenset({0, 2, 3, 4})
"""Of every command but `doctor`, whose code names what it found."""
MAX_OUTPUT = 4 * 2**20


@dataclass(frozen=True)
class Case:
    """One case: its generator, its own empty folder, and the sound files."""

    rng: Random
    folder: Path
    corpus: Path

    def copy(self, name: str) -> Path:
        """A folder of the corpus, to be changed."""
        return files.copy(self.corpus / name, self.folder / name)


Prepare = Callable[[Case], Callable[[], object]]


@dataclass(frozen=True)
class Parser:
    """Attributes:
    prepare: makes a case.
    limits: of one case.
    may_spawn: libraries ask the system for its name.
    share: of the time of a long run, relative to the others'.
    """

    prepare: Prepare
    limits: Limits = field(default_factory=Limits)
    may_spawn: bool = False
    share: int = 2


def run(program: click.Command, *arguments: object) -> None:
    """A command line in this process.

    Raises:
        Exception: what it let through; AssertionError: another exit code, a traceback or a flood of output.
    """
    result = CliRunner().invoke(program, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in EXIT_CODES or arguments[0] == "doctor", (
        f"exit code {result.exit_code}: {result.output[-300:]}"
    )
    assert "Traceback" not in result.output, result.output[-2000:]
    assert len(result.output) <= MAX_OUTPUT, f"{len(result.output)} characters of output"


def change(case: Case, path: Path, how: Callable[[Random, bytes], bytes]) -> None:
    files.replace(path, how(case.rng, path.read_bytes()))


def choose(case: Case, *runs: Callable[[], object]) -> Callable[[], object]:
    return case.rng.choice(runs)


# -------------------------------------------------------------------------------------------- checkpoints


def safetensors(case: Case) -> Callable[[], object]:
    source = case.rng.choice(sorted(case.corpus.glob("*/*.safetensors")))
    path = case.folder / "model.safetensors"
    path.write_bytes(mutate.safetensors_bytes(case.rng, source.read_bytes()))

    def read() -> None:
        read_header(path)
        read_tensors(path)

    return read


def index(case: Case) -> Callable[[], object]:
    model = case.copy("model")
    change(case, model / files.INDEX, mutate.json_bytes)
    if case.rng.random() < 0.2:
        victim = model / "model-00001-of-00002.safetensors"
        victim.unlink()
        victim.symlink_to(case.rng.choice(("model-00001-of-00002.safetensors", "/dev/zero", "config.json", "..")))
    out = case.folder / "out"
    return choose(
        case,
        lambda: Source(model).close(),
        lambda: run(quantkit, "inspect", model),
        lambda: run(quantkit, "plan", model, "--device", "K100_AI"),
        lambda: run(quantkit, "convert", model, "-o", out, "--jobs", "1"),
        lambda: run(runtime, "smoke-load", model),
    )


def checkpoint(case: Case) -> Callable[[], object]:
    """Headers that are sound safetensors but not this model's: names, shapes, dtypes, values."""
    name = case.rng.choice(
        (*(f"family-{name}" for name in files.FAMILIES), "model", "int8", "fp8-block", "fp8-channel")
    )
    model = case.copy(name)
    change(case, case.rng.choice(sorted(model.glob("*.safetensors"))), mutate.safetensors_bytes)
    if case.rng.random() < 0.5:
        (model / files.INDEX).unlink(missing_ok=True)
    out = case.folder / "out"

    def read_all() -> None:
        source = Source(model)
        for key, entry in list(source.entries.items())[:400]:
            if entry.shape and entry.nbytes < 2**24:
                source.fetch(key)
        source.close()

    return choose(
        case,
        read_all,
        lambda: run(quantkit, "inspect", model),
        lambda: run(quantkit, "plan", model, "--card-memory", "64"),
        lambda: run(quantkit, "convert", model, "-o", out, "--jobs", "1"),
        lambda: run(quantkit, "convert", model, "-o", out, "--format", "sharded", "--tp", "2", "--jobs", "1"),
        lambda: run(quantkit, "verify", model),
    )


def config_change(rng: Random, raw: bytes) -> bytes:
    """Any change, or one that keeps the types."""
    if rng.random() < 0.5:
        return mutate.json_bytes(rng, raw)
    return json.dumps(mutate.same_types(rng, json.loads(raw))).encode()


def config(case: Case) -> Callable[[], object]:
    names = (*(f"family-{name}" for name in files.FAMILIES), "model", "model", "int8", "fp8-block")
    model = case.copy(case.rng.choice(names))
    path, out = model / "config.json", case.folder / "out"
    change(case, path, config_change)
    return choose(
        case,
        lambda: run(quantkit, "inspect", model),
        lambda: run(quantkit, "inspect", path),
        lambda: run(quantkit, "plan", model, "--device", "K100_AI", "--cards", "8"),
        lambda: run(quantkit, "plan", path, "--device", "K100_AI"),
        lambda: run(quantkit, "convert", model, "-o", out, "--dry-run"),
        lambda: run(quantkit, "convert", model, "-o", out, "--format", "sharded", "--tp", "2", "--jobs", "1"),
        lambda: run(quantkit, "verify", model),
    )


def config_of_a_run(case: Case) -> Callable[[], object]:
    """The config where transformers' own classes are built from it."""
    name = case.rng.choice(("model", "int8", "one"))
    model, out = case.copy(name), case.folder / "out"
    change(case, model / "config.json", config_change)
    if name != "model":
        return lambda: run(runtime, "smoke-load", model, "--no-verify")
    return choose(
        case,
        lambda: run(quantkit, "calibrate", model, "-o", out, "--samples", "6", "--seq-len", "16", "--dry-run"),
        lambda: run(quantkit, "baseline", model, "-o", out, "--texts", "1", "--tokens", "16", "--dry-run"),
        lambda: run(runtime, "smoke-load", model),
    )


# ----------------------------------------------------------------------------------------------- settings


def recipe(case: Case) -> Callable[[], object]:
    path, out = case.folder / "recipe.yaml", case.folder / "out"
    source = case.rng.choice(sorted((ROOT / "recipes").glob("*.yaml")))
    path.write_bytes(mutate.yaml_bytes(case.rng, source.read_bytes()))
    model = case.corpus / case.rng.choice(("model", "family-llama", "family-deepseek_v3"))
    return choose(
        case,
        lambda: load_recipe(str(path)),
        lambda: load_recipe(str(path)),
        lambda: run(quantkit, "inspect", model, "--recipe", path),
        lambda: run(quantkit, "plan", model, "--device", "K100_AI", "--recipe", path),
        lambda: run(quantkit, "convert", model, "-o", out, "--recipe", path, "--dry-run"),
        lambda: run(quantkit, "calibrate", case.corpus / "model", "-o", out, "--recipe", path, "--samples", "8",
                    "--seq-len", "16", "--dry-run"),
    )  # fmt: skip


def settings(case: Case) -> Callable[[], object]:
    path = case.folder / "settings.yaml"
    shipped, read = case.rng.choice(
        (
            ("quantkit/compare/limits.yaml", lambda: load_limits("int8", path)),
            ("quantkit/acceptance/default.yaml", lambda: load_settings(path)),
            ("quantkit/ladder/default.yaml", lambda: load_rungs(path)),
        )
    )
    path.write_bytes(mutate.yaml_bytes(case.rng, (ROOT / shipped).read_bytes()))
    return read


def expert_map(case: Case) -> Callable[[], object]:
    path, out = case.folder / "map.json", case.folder / "out"
    experts = json.loads((case.corpus / "model" / "config.json").read_text())["num_local_experts"]
    path.write_bytes(mutate.json_bytes(case.rng, json.dumps([[*range(experts)], [0, *range(1, experts)]]).encode()))
    options = ("--format", "sharded", "--tp", "2", "--ep", "2", "--expert-map", path, "--dry-run")
    return lambda: run(quantkit, "convert", case.corpus / "model", "-o", out, *options)


def tuning_table(case: Case) -> Callable[[], object]:
    path = case.folder / "tuning.json"
    shipped = (ROOT / "runtime/quantkit_runtime/kernels/tuning.json").read_bytes()
    arch = case.rng.choice(sorted(json.loads(shipped)))
    path.write_bytes(mutate.json_bytes(case.rng, shipped))
    table = tuning.from_json({**json.loads(shipped)[tuning.DEFAULT], **json.loads(shipped)[arch]})

    def read() -> None:
        before, tuning.user_file = tuning.user_file, lambda: path
        try:
            tuning.table(arch)
        finally:
            tuning.user_file = before

    return choose(case, read, lambda: tuning.write(path, arch, table))


# ---------------------------------------------------------------------------------------- own artifacts


def manifest(case: Case) -> Callable[[], object]:
    folder = case.copy(case.rng.choice(("int8", "shards", "shards", "one")))
    path, out = manifest_path(folder), case.folder / "out"
    assert path is not None
    raw = path.read_bytes()
    if case.rng.random() < 0.25:
        files.replace(path, mutate.json_bytes(case.rng, raw))
    else:
        how = mutate.same_types if case.rng.random() < 0.8 else mutate.json_value
        files.replace(path, _sealed(how(case.rng, json.loads(raw))))
    source = case.corpus / "model"
    return choose(
        case,
        lambda: read_manifest(path),
        lambda: run(quantkit, "verify", folder),
        lambda: run(quantkit, "verify", folder, "--quick", "--source", source),
        lambda: run(quantkit, "verify", folder, "--source", source),
        lambda: run(quantkit, "convert", folder, "-o", out, "--format", "sharded", "--tp", "2", "--jobs", "1"),
        lambda: run(quantkit, "merge", folder, "-o", out, "--jobs", "1"),
        lambda: run(runtime, "smoke-load", folder),
        lambda: run(runtime, "doctor", folder),
    )


def _sealed(value: Any) -> bytes:
    """The manifest with its digest, where the model takes it: the checks behind the seal are wanted."""
    try:
        return manifest_bytes(Manifest.model_validate_json(json.dumps(value)))
    except (QuantkitError, ValidationError, ValueError):
        return json.dumps(value).encode()


def calibration(case: Case) -> Callable[[], object]:
    folder, out = case.copy("calibration"), case.folder / "out"
    summary = folder / "calibration.json"
    kind = case.rng.random()
    if kind < 0.3:
        change(case, summary, mutate.json_bytes)
    elif kind < 0.6:
        change(case, summary, lambda rng, raw: json.dumps(mutate.same_types(rng, json.loads(raw))).encode())
    else:  # the tensor files, with checksums that fit
        victim = folder / case.rng.choice(("scales.safetensors", "activations.safetensors"))
        change(case, victim, mutate.safetensors_bytes)
        value = json.loads(summary.read_text())
        value["files"][victim.name] = hashlib.sha256(victim.read_bytes()).hexdigest()
        files.replace(summary, json.dumps(value).encode())
    model, options = case.corpus / "model", ("--calibration", folder)
    return choose(
        case,
        lambda: read_summary(folder),
        lambda: run(quantkit, "convert", model, "-o", out, *options, "--jobs", "1"),
        lambda: run(quantkit, "convert", model, "-o", out, *options, "--format", "sharded", "--tp", "2", "--jobs", "1"),
        lambda: run(quantkit, "verify", case.corpus / "int8", "--source", model, *options),
        lambda: run(quantkit, "ladder", model, "-o", out, *options, "--dry-run"),
    )


def baseline(case: Case) -> Callable[[], object]:
    folder = case.copy("baseline")
    path = folder / "baseline.json"
    value = json.loads(path.read_text())
    if case.rng.random() < 0.5:
        victim = case.rng.choice(sorted(folder.rglob("*.safetensors")))
        change(case, victim, mutate.safetensors_bytes)
        value["files"][victim.relative_to(folder).as_posix()] = hashlib.sha256(victim.read_bytes()).hexdigest()
        files.replace(path, json.dumps(value).encode())
    elif case.rng.random() < 0.5:
        change(case, path, mutate.json_bytes)
    else:  # other sequences, sealed again
        value = mutate.same_types(case.rng, value)
        files.replace(path, _with_sequences_sealed(value))
    candidate = case.corpus / case.rng.choice(("int8", "one", "model"))
    compare = lambda: run(runtime, "compare", folder, candidate)  # noqa: E731
    return choose(case, lambda: read_baseline(folder), compare, compare)


def comparison(case: Case) -> Callable[[], object]:
    """What `compare --save` keeps and `regress` reads."""
    folder = case.copy("compared")
    path = folder / COMPARISON_NAME
    if case.rng.random() < 0.4:
        change(case, path, mutate.json_bytes)
    else:
        value = mutate.same_types(case.rng, json.loads(path.read_text()))
        try:
            files.replace(path, Saved.model_validate_json(json.dumps(value)).sealed())
        except (ValidationError, ValueError):
            files.replace(path, json.dumps(value).encode())
    regress = lambda: run(runtime, "regress", folder, "--baseline", case.corpus / "baseline")  # noqa: E731
    return choose(case, lambda: read_saved(folder), lambda: run(runtime, "regress", folder), regress)


def _with_sequences_sealed(value: Any) -> bytes:
    from quantkit.spec.baseline import Baseline

    try:
        found = Baseline.model_validate_json(json.dumps(value))
        value["sequences_sha256"] = sequences_digest(found.sequences)
    except (ValidationError, ValueError, TypeError):
        pass
    return json.dumps(value).encode()


def work(case: Case) -> Callable[[], object]:
    """A finished run without its last file, its work folder damaged; `unfinished` has what a killed one leaves."""
    model = case.corpus / "model"
    out = case.copy(case.rng.choice(("int8", "calibration", "baseline")))
    entries = [path for path in (out / WORK_NAME).rglob("*") if path.is_file() and path.name != "lock"]
    for path in case.rng.sample(entries, min(len(entries), 2)):
        _damage(case, path)
    last = {"int8": "quantkit_manifest.json", "calibration": "calibration.json", "baseline": "baseline.json"}[out.name]
    (out / last).unlink()
    if out.name == "int8":
        arguments = ("--calibration", case.corpus / "calibration", "--jobs", "1")
        merge = lambda: run(quantkit, "merge-manifest", out, "--source", model, *arguments[:2])  # noqa: E731
        return choose(case, lambda: run(quantkit, "convert", model, "-o", out, *arguments), merge)
    if out.name == "calibration":
        options = ("--samples", "18", "--seq-len", "48", "--jobs", "1")
        return lambda: run(quantkit, "calibrate", model, "-o", out, *options)
    return lambda: run(quantkit, "baseline", model, "-o", out, "--texts", "1", "--tokens", "40", "--prompts", "0")


def _damage(case: Case, path: Path) -> None:
    how = mutate.safetensors_bytes if path.suffix == ".safetensors" else mutate.json_bytes
    try:
        change(case, path, how)
    except (ValueError, struct.error, IndexError):  # neither of both
        change(case, path, mutate.damaged)


def unfinished(case: Case) -> Callable[[], object]:
    """A run that was stopped: it goes on to what it would have made, or is refused."""
    name = case.rng.choice(sorted(stopped.COMMANDS))
    out, whole = case.copy(f"stopped-{name}"), case.corpus / f"whole-{name}"
    (out / WORK_NAME / "lock").unlink()  # the copies' are one file
    notes = stopped.notes_of(name, out)
    for path in case.rng.sample(notes, case.rng.choice((1, 1, 2, 4))):
        if case.rng.random() < 0.2:  # a sound one of something else
            change(case, path, lambda rng, _: rng.choice(notes).read_bytes())
        elif case.rng.random() < 0.2:
            change(case, path, mutate.damaged)
        else:
            _damage(case, path)
    if case.rng.random() < 0.05:
        _damage(case, out / WORK_NAME / "options.json")

    def go_on() -> None:
        stopped.to_the_end(name, case.corpus / "small", out)
        assert tree(out) == tree(whole), "another result than without the damage"

    return go_on


def signature(case: Case) -> Callable[[], object]:
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    private = ec.generate_private_key(ec.SECP256R1())
    pem = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    public = private.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    key, lock, folder = case.folder / "key.pem", case.folder / "key.pub", case.copy("int8")
    key.write_bytes(pem)
    lock.write_bytes(public)
    if case.rng.random() < 0.3:
        change(case, case.rng.choice((key, lock)), mutate.damaged)
        out = case.folder / "out"
        return choose(
            case,
            lambda: run(quantkit, "convert", case.corpus / "model", "-o", out, "--sign-key", key),
            lambda: run(quantkit, "verify", folder, "--quick", "--public-key", lock),
        )
    from quantkit.convert.signing import signer

    signed = signer(key)(folder)
    change(case, signed, mutate.json_bytes)
    return lambda: run(quantkit, "verify", folder, "--quick", "--public-key", lock)


# -------------------------------------------------------------------------------------- texts, tokenizers


def texts(case: Case) -> Callable[[], object]:
    path, out, model = case.folder / "texts.jsonl", case.folder / "out", case.corpus / "model"
    rows: list[dict[str, object]] = [{"text": "The sea is grey. " * 9, "kind": kind} for kind in "abcd"] * 3
    turns = [{"role": "user", "content": "What is the sea?"}, {"role": "assistant", "content": "Salt water. " * 9}]
    rows += [{"messages": turns, "kind": "chat", "source": "x"}] * 3
    path.write_bytes(mutate.lines_bytes(case.rng, "\n".join(map(json.dumps, rows)).encode()))
    if case.rng.random() < 0.3:
        path = path.rename(case.folder / case.rng.choice(("texts.json", "texts.txt", "texts.parquet")))
    small = ("--samples", "6", "--seq-len", "32", "--force-sources", "--dry-run")
    return choose(
        case,
        lambda: run(quantkit, "calibrate", model, "-o", out, "--data", path, *small),
        lambda: run(quantkit, "calibrate", model, "-o", out, "--evaluation", path, *small),
        lambda: run(quantkit, "baseline", model, "-o", out, "--data", path, "--tokens", "32", "--dry-run"),
        lambda: read_prompts(path),
    )


def tasks(case: Case) -> Callable[[], object]:
    path = case.folder / "tasks.jsonl"
    rows = [{"prompt": "2+2=", "contains": ["4"]}, {"messages": [{"role": "user", "content": "x"}], "regex": "a|b"}]
    rows += [{"prompt": "x", "equals": "y", "max_tokens": 3, "kind": "k"}]
    path.write_bytes(mutate.lines_bytes(case.rng, "\n".join(map(json.dumps, rows)).encode()))
    return lambda: read_tasks(path)


def tokenizer(case: Case) -> Callable[[], object]:
    name = case.rng.choice(
        ("tokenizer.json", "tokenizer_config.json", "tokenizer_config.json", "generation_config.json")
    )
    model, out = case.copy("model"), case.folder / "out"
    if not (model / name).is_file():
        (model / name).write_text('{"eos_token_id": [2], "temperature": 0.5}')
    change(case, model / name, mutate.json_bytes)

    def load() -> None:
        tokenizer_record(model, load_tokenizer(model))

    return choose(
        case,
        lambda: run(quantkit, "inspect", model),
        load,
        lambda: run(quantkit, "calibrate", model, "-o", out, "--samples", "6", "--seq-len", "16", "--dry-run"),
        lambda: run(runtime, "smoke-load", model, "--max-new-tokens", "2"),
    )


def template(case: Case) -> Callable[[], object]:
    model, out = case.copy("model"), case.folder / "out"
    sound = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}{{ '>' if add_generation_prompt }}"
    found = mutate.template_text(case.rng, sound)
    tokens = json.loads((model / "tokenizer_config.json").read_text())
    tokens.pop("chat_template", None)
    where = case.rng.randrange(4)
    if where == 0:
        (model / "chat_template.jinja").write_text(found, encoding="utf-8", errors="surrogatepass")
    elif where == 1:
        (model / "chat_template.json").write_bytes(
            mutate.json_bytes(case.rng, json.dumps({"chat_template": found}).encode())
        )
    else:
        tokens["chat_template"] = found if where == 2 else [{"name": "default", "template": found}]
    files.replace(model / "tokenizer_config.json", json.dumps(tokens).encode())
    chats = case.folder / "chats.jsonl"
    turns = [{"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because of the sea. " * 6}]
    chats.write_text("\n".join(json.dumps({"messages": turns, "kind": kind}) for kind in "abc"))
    small = ("--samples", "3", "--seq-len", "32", "--data", chats, "--dry-run")
    return choose(
        case,
        lambda: run(quantkit, "inspect", model),
        lambda: tokenizer_record(model, load_tokenizer(model)),
        lambda: run(quantkit, "calibrate", model, "-o", out, *small),
    )


_SLOW = Limits(cpu_s=40, wall_s=240)

PARSERS: dict[str, Parser] = {
    "safetensors": Parser(safetensors),
    "index": Parser(index),
    "checkpoint": Parser(checkpoint, _SLOW, share=4),
    "config": Parser(config, _SLOW, share=4),
    "config_of_a_run": Parser(config_of_a_run, _SLOW, share=4),
    "recipe": Parser(recipe),
    "settings": Parser(settings),
    "expert_map": Parser(expert_map),
    "tuning_table": Parser(tuning_table, share=1),
    "manifest": Parser(manifest, _SLOW, share=4),
    "calibration": Parser(calibration, _SLOW),
    "baseline": Parser(baseline, _SLOW),
    "comparison": Parser(comparison, _SLOW, share=1),
    "work": Parser(work, _SLOW),
    "unfinished": Parser(unfinished, _SLOW),
    "signature": Parser(signature, share=1),
    "texts": Parser(texts, _SLOW),
    "tasks": Parser(tasks, share=1),
    "tokenizer": Parser(tokenizer, _SLOW),
    "template": Parser(template, _SLOW),
}
