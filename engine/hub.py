"""Models from the Hugging Face hub, kept in its own cache."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from engine.errors import ModelNotFound, OutOfMemory
from engine.progress import Progress

_WANTED = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_UNWANTED = ["consolidated*", "*/*"]
"""second copies of the weights in other layouts"""


def download_from_hub(hub_id: str, progress: Progress | None = None) -> Path:
    """The folder of a hub model, downloaded at first. Raises ModelNotFound, with what to do about it."""
    if progress:
        progress(f"fetching {hub_id} from the hub", None)
    try:
        return Path(snapshot_download(hub_id, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
    except GatedRepoError as error:
        raise ModelNotFound(
            f"{hub_id} is gated on the hub; accept its terms there and log in with `hf auth login`"
        ) from error
    except (RepositoryNotFoundError, HFValidationError) as error:
        raise ModelNotFound(f"there is neither a folder {hub_id} nor a (public) hub model of that name") from error
    except (LocalEntryNotFoundError, OfflineModeIsEnabled, HfHubHTTPError, HTTPError, ConnectionError) as error:
        raise ModelNotFound(
            f"there is no folder {hub_id}, and the hub can't be reached to look for a model of that name; "
            "without a network, name a local folder or .gguf file"
        ) from error
    except OSError as error:
        raise OutOfMemory(f"{hub_id} couldn't be stored: {error}") from error
