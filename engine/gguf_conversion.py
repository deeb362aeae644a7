"""GGUF files, turned once into a folder in transformers' layout.

transformers reads a GGUF file itself, at half a minute per start; the converted folder loads in seconds. Quantised
weights become bfloat16; a file that keeps its matrices in float16 or float32 keeps that precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

from engine.errors import IncompleteModel, UnsupportedModel
from engine.model_cache import cached_model
from engine.progress import Progress
from engine.quiet import quiet_transformers

_VERSION = 1
"""Part of an entry's name: raised when the conversion changes, so that old entries are left alone."""
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_PROBE_TEXT = "Café 123 😊\n  x = [1,2]"

logger = logging.getLogger(__name__)


def converted_gguf(file: Path, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The folder made from `file`, converting it if it isn't there yet. Raises a `ModelError`."""
    name = f"{file.stem}-{_content_hash(file)}-v{_VERSION}"
    # Four bits become sixteen, and the tokenizer is small.
    needed_bytes = 4 * file.stat().st_size + (64 << 20)
    return cached_model(name, cache, needed_bytes, lambda folder: convert_gguf(file, folder, progress))


def convert_gguf(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write config, weights, tokenizer, chat template and generation settings of `file` to `folder`."""
    report = progress or (lambda text, share: None)
    report(f"reading {file.name}", 0.0)
    dtype, eos_token_ids = _inspect(file)
    report(f"unpacking {file.name}", 0.05)
    try:
        with quiet_transformers():
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
                dtype=dtype,
                local_files_only=True,
            )
            report(f"reading the tokenizer of {file.name}", 0.7)
            tokenizer = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # transformers and gguf raise anything here; the file is what is wrong
        raise UnsupportedModel(f"{file} can't be converted: {error}") from error
    report("writing the converted model", 0.8)
    if eos_token_ids:
        model.generation_config.eos_token_id = eos_token_ids if len(eos_token_ids) > 1 else eos_token_ids[0]
    model.config.name_or_path = file.stem
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _name_fast_tokenizer(folder / "tokenizer_config.json")
    # Generated text is decoded by these ids, so a vocabulary that can't spell a text is worth a warning at once.
    spelled = tokenizer.decode(tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids)
    if spelled != _PROBE_TEXT:
        logger.warning("the tokenizer of %s spells %r as %r; its ids may differ from the original's", file, _PROBE_TEXT, spelled)
    report("converted", 1.0)


def _inspect(file: Path) -> tuple[torch.dtype, list[int]]:
    """The dtype to keep, and the ids that end a text or a turn. Raises IncompleteModel for a damaged file."""
    try:
        reader = GGUFReader(file)
    except (OSError, ValueError, IndexError, KeyError) as error:
        raise IncompleteModel(f"{file} is damaged or no GGUF file: {error}") from error
    kinds = {tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1}
    if GGMLQuantizationType.F32 in kinds:
        dtype = torch.float32
    elif GGMLQuantizationType.F16 in kinds:
        dtype = torch.float16
    else:
        dtype = torch.bfloat16
    eos_token_ids: list[int] = []
    for key in ("eos", "eot"):
        field = reader.get_field(f"tokenizer.ggml.{key}_token_id")
        if field is not None and int(field.contents()) not in eos_token_ids:
            eos_token_ids.append(int(field.contents()))
    return dtype, eos_token_ids


def _name_fast_tokenizer(path: Path) -> None:
    """Name the tokenizer class that loads without torch, and drop what describes this machine."""
    settings: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    settings["tokenizer_class"] = "PreTrainedTokenizerFast"
    for key in ("is_local", "local_files_only", "backend"):
        settings.pop(key, None)
    path.write_text(json.dumps(settings, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def _content_hash(file: Path) -> str:
    """12 hex digits over the size and a sample of the bytes."""
    size = file.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with file.open("rb") as content:
        for sample in range(_SAMPLES):
            content.seek(sample * max(0, size - _SAMPLE_BYTES) // (_SAMPLES - 1))
            digest.update(content.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:12]
