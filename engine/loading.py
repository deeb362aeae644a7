"""What a model folder holds and whether it can run here, found out before any weight is read.

A model is named by a folder, a `.gguf` file or a hub id; `resolve_model` turns all three into a folder in
transformers' layout, and `check_supported` refuses by name what can't work.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig, PreTrainedConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from engine.errors import IncompleteModel, ModelNotFound, UnsupportedModel
from engine.families import FAMILIES
from engine.gguf_conversion import converted_gguf
from engine.hub import download_from_hub
from engine.progress import Progress
from engine.weight_files import WeightFiles, find_weight_files

_LAYER_TYPES = frozenset({"full_attention", "sliding_attention"})
_ROPE_TYPES = frozenset({"default", *ROPE_INIT_FUNCTIONS})
_LENGTH_DEPENDENT_ROPE_TYPES = frozenset({"dynamic", "longrope"})
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What the rest of the system wants to know about a model, without its weights."""

    folder: Path
    model_type: str
    architecture: str
    """the transformers class"""
    vocab_size: int
    """rows of the output embedding, padding included"""
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    dtype: str
    """as saved: float32, bfloat16 or float16"""
    num_layers: int
    kv_heads: int
    head_dim: int
    num_parameters: int
    content_id: str
    """16 hex digits: equal for equal configuration and weights, on any host"""
    rope_depends_on_length: bool
    """positions are encoded differently for another max_model_len"""

    def kv_bytes_per_token(self, element_bytes: int) -> int:
        """An estimate from the configuration; what the layers really store is seen once they are loaded."""
        return 2 * self.num_layers * self.kv_heads * self.head_dim * element_bytes


def resolve_model(name: str, progress: Progress | None = None, cache: Path | None = None) -> Path:
    """Folder, `.gguf` file, folder with one `.gguf` file, or hub id → folder.

    Converts a GGUF file, or downloads from the hub, once; later calls find the result. Raises ModelNotFound.
    """
    path = Path(name).expanduser()
    if path.is_file():
        if path.suffix.lower() != ".gguf":
            raise UnsupportedModel(f"{path} is a file, but only .gguf files are read; name the model's folder instead")
        return converted_gguf(path, progress, cache)
    if path.is_dir():
        ggufs = sorted(path.glob("*.gguf"))
        if (path / "config.json").exists() or not ggufs:
            return path
        if len(ggufs) > 1:
            raise UnsupportedModel(f"{path} holds {len(ggufs)} GGUF files; name one of them: {ggufs[0]}, …")
        return converted_gguf(ggufs[0], progress, cache)
    if path.is_absolute() or name.startswith((".", "~")) or not _HUB_ID.fullmatch(name):
        raise ModelNotFound(f"there is no folder or file {name}")
    return download_from_hub(name, progress)


def check_supported(folder: str | Path, *, needs_tokenizer: bool = True) -> ModelFacts:
    """Everything that can be seen without reading weights. Raises a `ModelError` naming what is wrong."""
    folder = Path(folder)
    if not folder.is_dir():
        raise ModelNotFound(f"there is no folder {folder}")
    raw = read_json(folder / "config.json")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise IncompleteModel(f"{folder / 'config.json'} names no model_type")
    _refuse_rope(raw, model_type)
    config = _read_config(folder, raw, model_type)
    _refuse_kind(config, raw, model_type)
    if needs_tokenizer and not (folder / "tokenizer.json").is_file():
        raise IncompleteModel(f"{folder} has no tokenizer.json")
    return _facts(folder, config, find_weight_files(folder))


def read_json(path: Path) -> dict[str, Any]:
    """Raises IncompleteModel if there is no such file or it isn't a JSON object."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise IncompleteModel(f"{path.parent} has no {path.name}") from None
    except (OSError, ValueError) as error:
        raise IncompleteModel(f"{path} can't be read: {error}") from error
    if not isinstance(content, dict):
        raise IncompleteModel(f"{path} holds no JSON object")
    return content


def _read_config(folder: Path, raw: dict[str, Any], model_type: str) -> PreTrainedConfig:
    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises anything from KeyError to its own validation errors here
        own_code = " (it brings code of its own, which isn't run)" if "auto_map" in raw else ""
        why = str(error).partition("\n")[0]  # further lines are advice for who calls transformers by hand
        raise UnsupportedModel(
            f"{folder}: transformers can't read model type {model_type!r}{own_code}: {why}"
        ) from error


def _rope_settings(raw: dict[str, Any]) -> list[dict[str, Any]]:
    """The rope dictionaries of a configuration: one, or one per layer type, under either of their two names."""
    found = []
    for name in ("rope_scaling", "rope_parameters"):
        value = raw.get(name)
        if not isinstance(value, dict):
            continue
        nested = [inner for inner in value.values() if isinstance(inner, dict)]
        found.extend(nested or [value])
    return found


def _rope_type(settings: dict[str, Any]) -> str:
    return str(settings.get("rope_type", settings.get("type", "default")))


def _refuse_rope(raw: dict[str, Any], model_type: str) -> None:
    # Older Phi-3 files call longrope "su"; transformers maps it.
    known = _ROPE_TYPES | ({"su"} if model_type.startswith("phi3") else set())
    for settings in _rope_settings(raw):
        if _rope_type(settings) not in known:
            raise UnsupportedModel(
                f"unknown rope type {_rope_type(settings)!r} in config.json; known are {', '.join(sorted(known))}"
            )


def _refuse_kind(config: PreTrainedConfig, raw: dict[str, Any], model_type: str) -> None:
    """Refuse, by name, models that aren't decoders of plain attention layers."""
    if config.is_encoder_decoder:
        raise UnsupportedModel(f"{model_type} is an encoder-decoder model; only decoder-only models are served")
    architectures = raw.get("architectures") or []
    if architectures and not any("CausalLM" in name or "LMHead" in name for name in architectures):
        raise UnsupportedModel(f"{architectures[0]} is no text generation model (…ForCausalLM)")
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise UnsupportedModel(f"transformers has no causal language model for model type {model_type!r}")
    other_types = sorted(set(getattr(config, "layer_types", None) or ()) - _LAYER_TYPES)
    # Families of our own are known to do without state and with attention like ours; asking the class of another one
    # imports transformers' modelling code, which takes a second and a hundred megabytes.
    model_class: Any = None if model_type in FAMILIES else MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
    if getattr(model_class, "_is_stateful", False) or "linear_attention" in other_types:
        kinds = f" ({', '.join(other_types)})" if other_types else ""
        raise UnsupportedModel(
            f"{model_type} has recurrent or hybrid state-space layers{kinds}; only attention is served"
        )
    if other_types:
        raise UnsupportedModel(f"{model_type} has layers of type {', '.join(other_types)}; known are full and sliding")
    if config.get_text_config(decoder=True) is not config:
        raise UnsupportedModel(f"{model_type} is a multimodal model; only text decoders are served")
    if model_class is not None and not getattr(model_class, "_supports_attention_backend", False):
        raise UnsupportedModel(f"{model_class.__name__} doesn't use transformers' attention interface")
    if getattr(config, "use_bidirectional_attention", None):
        raise UnsupportedModel(f"{model_type} attends in both directions; it can't generate")
    quantization = raw.get("quantization_config")
    if quantization:
        method = quantization.get("quant_method", "unnamed") if isinstance(quantization, dict) else "unnamed"
        raise UnsupportedModel(f"the weights are quantised ({method}); only plain float weights are served")


def _facts(folder: Path, config: PreTrainedConfig, weights: WeightFiles) -> ModelFacts:
    num_heads = config.num_attention_heads
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // num_heads
    return ModelFacts(
        folder=folder,
        model_type=config.model_type,
        architecture=MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type],
        vocab_size=config.vocab_size,
        max_model_len=_max_positions(config),
        eos_token_ids=_eos_token_ids(folder, config),
        bos_token_id=config.bos_token_id,
        dtype=str(config.dtype or "float32").removeprefix("torch."),
        num_layers=config.num_hidden_layers,
        kv_heads=getattr(config, "num_key_value_heads", None) or num_heads,
        head_dim=head_dim,
        num_parameters=weights.num_parameters,
        content_id=weights.content_id(folder / "config.json"),
        rope_depends_on_length=any(
            _rope_type(settings) in _LENGTH_DEPENDENT_ROPE_TYPES for settings in _rope_settings(config.to_dict())
        ),
    )


def _max_positions(config: PreTrainedConfig) -> int:
    length = getattr(config, "max_position_embeddings", None)
    if not length:
        raise UnsupportedModel(f"{config.model_type}: the configuration names no max_position_embeddings")
    return int(length)


def _eos_token_ids(folder: Path, config: PreTrainedConfig) -> tuple[int, ...]:
    """generation_config.json knows best (chat models end a turn with another token); then config.json."""
    eos = None
    if (folder / "generation_config.json").is_file():
        eos = read_json(folder / "generation_config.json").get("eos_token_id")
    if eos is None:
        eos = config.eos_token_id
    if eos is None:
        return ()
    return tuple(eos) if isinstance(eos, list) else (int(eos),)
