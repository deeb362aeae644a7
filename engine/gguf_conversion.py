"""GGUF files, turned once into a folder in transformers' layout.

transformers reads a GGUF file itself, at half a minute per start; the converted folder loads in seconds. Quantised
weights become bfloat16; a file that keeps its matrices in float16 or float32 keeps that precision.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from gguf import GGMLQuantizationType, GGUFReader
from tokenizers import pre_tokenizers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedTokenizerFast,
    modeling_gguf_pytorch_utils,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

from engine.errors import IncompleteModel, UnsupportedModel
from engine.model_cache import cached_model
from engine.progress import Progress
from engine.quiet import quiet_transformers

_VERSION = 1
"""Part of an entry's name: raised when the conversion changes, so that old entries are left alone."""
_SAMPLES = 64
_SAMPLE_BYTES = 1 << 16
_PROBE_TEXT = "Café 123 😊\n  x = [1,2]"
_WARNINGS = "conversion_warnings.txt"

_DIGIT_SPLITTING = frozenset({"smollm", "starcoder", "refact", "command-r"})
"""Pre-tokenizers that cut every digit off before GPT-2's pattern (llama.cpp, `llm_tokenizer_bpe`)."""
_PLAIN_BYTE_LEVEL = frozenset({"gpt-2", "phi-2", "olmo", "mpt", "jais", "dbrx"})
"""Pre-tokenizers that are GPT-2's pattern alone, which is what transformers assumes of one it doesn't know."""

logger = logging.getLogger(__name__)


def converted_gguf(file: Path, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """The folder made from `file`, converting it if it isn't there yet. Raises a `ModelError`."""
    name = f"{file.stem}-{_content_hash(file)}-v{_VERSION}"
    # Four bits become sixteen, and the tokenizer is small.
    needed_bytes = 4 * file.stat().st_size + (64 << 20)
    folder = cached_model(name, cache, needed_bytes, lambda folder: convert_gguf(file, folder, progress))
    if (folder / _WARNINGS).exists():  # not only to the one who converted it
        logger.warning((folder / _WARNINGS).read_text(encoding="utf-8").strip())
    return folder


def convert_gguf(file: Path, folder: Path, progress: Progress | None = None) -> None:
    """Write config, weights, tokenizer, chat template and generation settings of `file` to `folder`."""
    report = progress or (lambda text, share: None)
    report(f"reading {file.name}", 0.0)
    header = _read_header(file)
    report(f"unpacking {file.name}", 0.05)
    try:
        with quiet_transformers(), _tensors_reported(report):
            model = AutoModelForCausalLM.from_pretrained(
                file.parent,
                gguf_file=file.name,
                quantization_config=GgufConfig(gguf_file=file.name, dequantize=True),
                dtype=header.dtype,
                local_files_only=True,
            )
            report(f"reading the tokenizer of {file.name}", 0.7)
            tokenizer: Any = AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name, local_files_only=True)
    except Exception as error:  # transformers and gguf raise anything here; the file is what is wrong
        raise UnsupportedModel(f"{file} can't be converted: {error}") from error
    report("writing the converted model", 0.8)
    if header.eos_token_ids:
        eos = header.eos_token_ids
        model.generation_config.eos_token_id = eos if len(eos) > 1 else eos[0]
    model.config.name_or_path = file.stem
    warning = _set_pre_tokenizer(tokenizer, header, file)
    with quiet_transformers():
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    _name_fast_tokenizer(folder / "tokenizer_config.json")
    if warning:
        (folder / _WARNINGS).write_text(warning + "\n", encoding="utf-8")
    report("converted", 1.0)


@contextmanager
def _tensors_reported(report: Callable[[str, float | None], None]) -> Iterator[None]:
    """Have transformers' bar over the tensors, which obeys no switch, tell `report` instead."""

    def counted(tensors: list[Any], **kwargs: Any) -> Iterator[Any]:
        for index, tensor in enumerate(tensors):
            if index % 16 == 0:
                report("unpacking the weights", 0.1 + 0.5 * index / len(tensors))
            yield tensor

    own = modeling_gguf_pytorch_utils.tqdm
    modeling_gguf_pytorch_utils.tqdm = counted
    try:
        yield
    finally:
        modeling_gguf_pytorch_utils.tqdm = own


@dataclass(frozen=True, slots=True)
class _Header:
    """What of a GGUF file's metadata transformers doesn't take over, or not rightly."""

    dtype: torch.dtype
    """to keep the weights in"""
    eos_token_ids: list[int]
    """ends of a text and of a turn"""
    tokenizer_model: str
    pre_tokenizer: str


def _read_header(file: Path) -> _Header:
    """Raises IncompleteModel for a damaged file."""
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

    def read(key: str) -> Any:
        field = reader.get_field(f"tokenizer.ggml.{key}")
        return None if field is None else field.contents()

    ends = [read("eos_token_id"), read("eot_token_id")]
    return _Header(
        dtype=dtype,
        eos_token_ids=list(dict.fromkeys(int(token_id) for token_id in ends if token_id is not None)),
        tokenizer_model=str(read("model")),
        pre_tokenizer=str(read("pre") or "default"),
    )


def _set_pre_tokenizer(tokenizer: PreTrainedTokenizerFast, header: _Header, file: Path) -> str | None:
    """Cut text where the original tokenizer does; returns a warning if that isn't known.

    A GGUF file only names the pattern. transformers knows some names and takes GPT-2's pattern for all others, which
    gives other ids where digits follow spaces.
    """
    if header.tokenizer_model == "gpt2":
        if header.pre_tokenizer in _DIGIT_SPLITTING:
            tokenizer.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
                [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
            )
        elif header.pre_tokenizer not in _PLAIN_BYTE_LEVEL and header.pre_tokenizer not in GGUF_PRE_TOKENIZER_SPLITS:
            return (
                f"{file.name} cuts text by the pattern {header.pre_tokenizer!r}, which isn't known here; "
                "token ids may differ from the original tokenizer's"
            )
    spelled = str(tokenizer.decode(tokenizer(_PROBE_TEXT, add_special_tokens=False).input_ids))
    if spelled.strip() != _PROBE_TEXT:
        return (
            f"the tokenizer in {file.name} spells {_PROBE_TEXT!r} as {spelled!r}; "
            "token ids may differ from the original tokenizer's"
        )
    return None


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
