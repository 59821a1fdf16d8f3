"""From the name of a model in a config to a checked folder on this machine.

Knows nothing about what the weights mean, prompts or training.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import reprlib
import shutil
import tempfile
import zipfile
from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OfflineModeIsEnabled
from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer

import agent.tiny
import agent.tiny_tokenizer
from agent.families import family_of
from agent.shapes import RANDOM_WEIGHTS, build_shape
from agent.tiny import TinySpec, build_tiny
from configs.environment import RANDOM_PREFIX, TINY_PREFIX
from configs.errors import ConfigError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_FILES = ["*.json", "*.safetensors", "*.bin", "*.txt", "*.jinja"]
_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""What Hugging Face loads: one file, or the shards that NAME.index.json lists."""
_TOKENIZER_FILES = (("tokenizer.json",), ("vocab.json", "merges.txt"))
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json", "video_preprocessor_config.json")


def resolve_model(path: str, cache_dir: Path) -> Path:
    """Folder of a model: `tiny:NAME` is built into `cache_dir` once, a hub id is downloaded, a folder is checked.

    `random:NAME` is a real size whose weights are drawn at load (`agent.shapes`).

    Raises:
        ConfigError: the name means nothing, the hub does not answer, or the folder lacks something.
    """
    if path.startswith(TINY_PREFIX):
        folder = _tiny_folder(path.removeprefix(TINY_PREFIX), cache_dir)
    elif path.startswith(RANDOM_PREFIX):
        name = path.removeprefix(RANDOM_PREFIX)
        folder = cache_dir / "random" / name
        build_shape(name, folder)
    elif Path(path).expanduser().is_dir():
        folder = Path(path).expanduser()
    elif _HUB_ID.fullmatch(path):
        folder = _download(path)
    else:
        raise ConfigError(
            f"model path {path!r} is no folder, no hub id (owner/name) and no tiny:NAME. Correct model.path."
        )
    check_model_folder(folder)
    return folder


def check_model_folder(folder: Path) -> None:
    """Refuse a folder that could not be loaded, before anything is started.

    Raises:
        ConfigError: config, weights, tokenizer or processor are missing or damaged, or the architecture is unknown.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model folder {folder} has no config.json. Point model.path at a Hugging Face model folder.")
    config = _read_json(folder / "config.json")
    try:
        family_of(config)
    except ConfigError as error:
        raise ConfigError(f"model folder {folder}: {error}") from error
    _check_weights(folder)
    _check_tokenizer(folder)
    processors = [folder / name for name in _PROCESSOR_FILES if (folder / name).is_file()]
    if not processors:
        raise ConfigError(
            f"model folder {folder} has no processor: one of {', '.join(_PROCESSOR_FILES)}. "
            "Copy it from the model it was made from."
        )
    for file in processors:
        _read_json(file)


def _read_json(file: Path) -> dict[str, Any]:
    """A file of a model folder that holds one JSON object."""
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"model folder {file.parent}: {file.name} is not JSON ({error}). Fetch it again.") from error
    if not isinstance(value, dict):
        raise ConfigError(
            f"model folder {file.parent}: {file.name} holds {reprlib.repr(value)}, expected a JSON object. "
            "Fetch it again."
        )
    return value


def _check_tokenizer(folder: Path) -> None:
    names = next((names for names in _TOKENIZER_FILES if all((folder / name).is_file() for name in names)), None)
    if names is None:
        raise ConfigError(
            f"model folder {folder} has no tokenizer: tokenizer.json, or vocab.json and merges.txt. "
            "Copy them from the model it was made from."
        )
    _read_json(folder / names[0])
    if names[0] == "tokenizer.json":
        try:
            Tokenizer.from_file(str(folder / names[0]))
        except Exception as error:  # the library raises no narrower one
            raise ConfigError(
                f"model folder {folder}: tokenizer.json is no tokenizer ({error}). Fetch it again."
            ) from error


def _check_weights(folder: Path) -> None:
    """Refuse weights that are absent or cut short; which tensors a model needs is known when it loads."""
    if (folder / RANDOM_WEIGHTS).is_file():
        return
    indexes = [folder / f"{name}.index.json" for name in _WEIGHTS if (folder / f"{name}.index.json").is_file()]
    needed = {name for name in _WEIGHTS if (folder / name).is_file()}.union(*map(_shards, indexes))
    if not needed:
        raise ConfigError(
            f"model folder {folder} has no weights: no {' and no '.join(_WEIGHTS)}, nor an index of shards. "
            "Copy the weight files there, or point model.path at a complete folder."
        )
    missing = sorted(name for name in needed if not (folder / name).is_file())
    if missing:
        raise ConfigError(
            f"model folder {folder} lacks {len(missing)} of {len(needed)} weight files: {', '.join(missing)}. "
            "Finish the download or copy."
        )
    for name in sorted(needed):
        _check_weight_file(folder / name)


def _shards(index: Path) -> set[str]:
    """Names of the files that an index spreads the tensors over."""
    shards = _read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards or not all(isinstance(name, str) for name in shards.values()):
        raise ConfigError(
            f"model folder {index.parent}: {index.name} has no weight_map of tensor names to files. Fetch it again."
        )
    return set(shards.values())


def _check_weight_file(file: Path) -> None:
    try:
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):  # reads the header and compares it with the file's length
                return
        if not zipfile.is_zipfile(file):  # what torch.save writes, its table of contents at the end
            raise ValueError("no archive of torch.save")
    except (SafetensorError, ValueError) as error:
        raise ConfigError(
            f"model folder {file.parent}: {file.name} ({file.stat().st_size} bytes) is damaged or incomplete "
            f"({error}). Fetch it again."
        ) from error


def _download(hub_id: str) -> Path:
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_HUB_FILES))
    except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        raise ConfigError(
            f"model {hub_id!r} is no folder here, is not in the Hugging Face cache, and the hub cannot be reached. "
            "Download it first and set model.path to its folder, or unset HF_HUB_OFFLINE."
        ) from error
    except (HfHubHTTPError, HFValidationError) as error:
        raise ConfigError(
            f"model {hub_id!r}: the hub refused ({error}). Check model.path's spelling; log in if it is private."
        ) from error


def _tiny_folder(name: str, cache_dir: Path) -> Path:
    spec = TinySpec.parse(name)
    target = cache_dir / "tiny" / f"{spec.family}-{_tiny_digest(spec)}"
    if target.is_dir():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    building = Path(tempfile.mkdtemp(prefix=".building-", dir=target.parent))
    try:
        build_tiny(spec, building)
        building.chmod(0o755)
        try:
            os.rename(building, target)
        except OSError:
            if not target.is_dir():  # else another process finished first, with the same bytes
                raise
    finally:
        shutil.rmtree(building, ignore_errors=True)
    logger.info("built tiny:%s in %s", name, target)
    return target


def _tiny_digest(spec: TinySpec) -> str:
    """Digest of the options and of the code that builds: a change of either makes another folder."""
    digest = hashlib.sha256(spec.canonical_name.encode())
    for module in (agent.tiny, agent.tiny_tokenizer):
        assert module.__file__ is not None
        digest.update(Path(module.__file__).read_bytes())
    return digest.hexdigest()[:12]
