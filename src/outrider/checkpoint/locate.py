"""From what a user types (`demo`, a folder, a hub id) to a local checkpoint folder."""

import re
from pathlib import Path

from outrider.checkpoint.draft_config import is_draft, read_draft_config
from outrider.checkpoint.hf_config import read_config
from outrider.checkpoint.shards import read_json
from outrider.errors import CheckpointError

DEMO = Path(__file__).parent.parent / "demo" / "target"
DEMO_DRAFT = DEMO.with_name("draft")
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
    local = _local(model, DEMO, "openai/gpt-oss-20b")
    folder = local or _snapshot(model, _CONFIG)
    _refuse_draft(model, folder / "config.json")
    if local or config_only:
        return folder
    read_config(folder)
    return _snapshot(model, _FILES)


def locate_draft(model: str, target: str | None = None) -> Path:
    """As `locate`, for the draft called `model` of the target called `target` (if given, for errors only).

    Raises: CheckpointError as `locate` does, and if `model` is the target itself.
    """
    local = _local(model, DEMO_DRAFT, "z-lab/gpt-oss-20b-DFlash")
    if model == target != "demo":
        raise CheckpointError(f"'{model}' is given both as the model and as its draft; name a DFlash draft of it")
    if local:
        return local
    read_draft_config(_snapshot(model, _CONFIG))
    return _snapshot(model, _FILES)


def _local(model: str, demo: Path, example: str) -> Path | None:
    """The folder of `demo` or of a local checkpoint; None for what can only be a hub id, such as `example`."""
    if model == "demo":
        return demo
    try:
        folder = Path(model).expanduser()
        if model and folder.is_dir():
            return folder
        exists = folder.exists()
    except (OSError, RuntimeError) as error:  # a name too long, a home that is unknown
        raise CheckpointError(f"'{model}' cannot be looked up ({error})") from error
    if not _HUB_ID.fullmatch(model) or exists:
        raise CheckpointError(f"'{model}' is neither 'demo', a folder, nor a hub id such as {example}")
    return None


def _refuse_draft(model: str, config: Path) -> None:
    if config.is_file() and is_draft(read_json(config)):
        raise CheckpointError(f"'{model}' is a draft, which cannot be served alone; name its target as the model")


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
