"""From what a user types (`demo`, a folder, a hub id) to a local checkpoint folder."""

import re
from pathlib import Path

from outrider.checkpoint.hf_config import read_config
from outrider.errors import CheckpointError

DEMO = Path(__file__).parent.parent / "demo" / "target"
_HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")
_CONFIG = ["config.json", "generation_config.json"]
_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt"]


def locate(model: str, *, config_only: bool = False) -> Path:
    """The folder of `model`: `demo`, a local folder, or a hub id (looked up at the hub, else in the local cache).

    Of a hub model the config is fetched and checked before any weight; `config_only` stops there. Only data files are
    ever downloaded; a checkpoint's code is never executed.

    Raises: CheckpointError if there is no such folder, the hub has no such model or cannot be reached, or the model
        is none that can be served.
    """
    if model == "demo":
        return DEMO
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a home that is unknown
        raise CheckpointError(f"'{model}' cannot be looked up ({error})") from error
    if not _HUB_ID.fullmatch(model) or exists:
        raise CheckpointError(f"'{model}' is neither 'demo', a folder, nor a hub id such as openai/gpt-oss-20b")
    folder = _snapshot(model, _CONFIG)
    if config_only:
        return folder
    read_config(folder)
    return _snapshot(model, _FILES)


def _snapshot(model: str, files: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    try:
        # gpt-oss repositories carry two further copies of the weights in folders of their own.
        return Path(snapshot_download(model, allow_patterns=files, ignore_patterns=["*/*"]))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"'{model}' is not in the local cache and the hub cannot be reached; download it first, or name a folder"
        ) from error
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise CheckpointError(f"'{model}' cannot be had from the hub: {reason}") from error
