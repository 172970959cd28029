"""The safetensors files of one folder as one name -> tensor map.

Contract: opening checks that every file that the index names is there, whole, inside the folder, and holds the tensors
that the index promises. Tensors are zero-copy views of the mapped files: reading them costs page cache, which the
kernel takes back at will, not memory of the process.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from outrider.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

DTYPES = {
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "float16",
    "U8": "uint8",
}
"""safetensors dtype -> torch dtype name, for the dtypes that a checkpoint may use."""


class Shards:
    """Every tensor of the checkpoint folder `folder`, by name.

    Raises: CheckpointError naming the file for a missing, truncated or corrupt file, an index entry that leaves the
        folder, and a tensor that its file does not hold.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._file_of = _weight_map(folder)
        self._open: dict[str, Any] = {}
        for file in sorted(set(self._file_of.values())):
            self._open[file] = _open(folder / file)
        for file, handle in self._open.items():
            held = set(handle.keys())
            if lacking := sorted(n for n, f in self._file_of.items() if f == file and n not in held):
                raise CheckpointError(f"{folder / INDEX} says that {file} holds {lacking[0]!r}, but it does not")
        if not self._file_of:
            (self._open[SINGLE],) = [_open(folder / SINGLE)]
            self._file_of = dict.fromkeys(self._open[SINGLE].keys(), SINGLE)

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def path(self, name: str) -> Path:
        """The file that holds tensor `name`."""
        return self.folder / self._file_of[name]

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of tensor `name`, from the header."""
        return tuple(self._open[self._file_of[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> str:
        """Torch dtype name of tensor `name` from the header, or the format's own name if torch has none here."""
        stored: str = self._open[self._file_of[name]].get_slice(name).get_dtype()
        return DTYPES.get(stored, stored)

    def tensor(self, name: str) -> Tensor:
        """Tensor `name` as a read-only view of the mapped file."""
        return torch.as_tensor(self._open[self._file_of[name]].get_tensor(name))


def _weight_map(folder: Path) -> dict[str, str]:
    """Tensor -> file from the index; empty when the checkpoint is a single file."""
    path = folder / INDEX
    if not path.exists():
        if not (folder / SINGLE).exists():
            raise CheckpointError(f"{folder} holds neither {SINGLE} nor {INDEX}; is it a safetensors checkpoint?")
        return {}
    weight_map = read_json(path).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path} has no 'weight_map'; download the file again")
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file or file in ("", ".", "..") or not file.isprintable():
            raise CheckpointError(f"{path} sends {name!r} to {file!r}, which is not a file of the folder")
    return weight_map


def _open(path: Path) -> Any:
    try:
        if not path.is_file():
            raise CheckpointError(f"{path} is missing; the checkpoint is incomplete, download it again")
        return safe_open(str(path), framework="pt")
    except (SafetensorError, OSError) as error:
        reason = " ".join(str(error).split())  # it may quote names that hold line breaks
        raise CheckpointError(f"{path} is truncated or corrupt ({reason}); download it again") from error


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in `path`.

    Raises: CheckpointError if the file is missing or does not hold one.
    """
    try:
        value = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} is missing; is this a checkpoint folder?") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds no JSON object")
    return value
