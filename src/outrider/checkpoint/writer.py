"""Write a checkpoint folder shard by shard: all of it or nothing.

Contract: everything goes into a hidden folder beside `out`, which is renamed to `out` when it is complete and removed
on any failure, so `out` never holds half a checkpoint (this holds against failures of the process, not of the
machine: nothing is fsynced). Memory is bounded by one shard plus one tensor; views of mapped files cost none.
"""

import errno
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from outrider.checkpoint.shards import INDEX, SINGLE
from outrider.config import format_bytes
from outrider.core import Progress, no_progress
from outrider.errors import CheckpointError

SHARD_NBYTES = 2_000_000_000
_DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


class CheckpointWriter:
    """A context manager that makes the checkpoint folder `out` of about `nbytes` bytes of tensors.

    `progress` is called as (what, bytes added, nbytes). Leaving the block without an error gives the folder its name.

    Raises: CheckpointError if `out` exists and is not an empty folder, if its parent does not exist, if the disk has
        less than `nbytes` free or fills up, if a file cannot be written, and on Ctrl-C. Other exceptions of the block
        pass through; the unfinished folder is removed all the same.
    """

    def __init__(
        self,
        out: Path,
        nbytes: int,
        progress: Progress = no_progress,
        what: str = "writing",
        shard_nbytes: int = SHARD_NBYTES,
    ) -> None:
        self.out = out.absolute()
        self.folder = self.out.with_name(f".{self.out.name}.{os.getpid()}.partial")
        self._nbytes, self._shard_nbytes = nbytes, shard_nbytes
        self._progress, self._what = progress, what
        self._added = 0
        self._pending: dict[str, Tensor] = {}
        self._pending_nbytes = 0
        self._shard = 1
        self._shard_of: dict[str, int] = {}

    def __enter__(self) -> Self:
        refuse_occupied(self.out)
        parent = self.out.parent
        if not parent.is_dir():
            raise CheckpointError(f"{self.out} cannot be made: {parent} is not a folder")
        free = shutil.disk_usage(parent).free
        if free < self._nbytes:
            raise CheckpointError(
                f"{self.out} needs {format_bytes(self._nbytes)}, but only {format_bytes(free)} are free in {parent}"
            )
        try:
            self.folder.mkdir()
        except OSError as error:
            raise CheckpointError(f"{self.out} cannot be written: {error.strerror}") from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self._finish()
        except (OSError, SafetensorError, KeyboardInterrupt) as late:
            error = late
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)  # after a successful rename there is none
        if isinstance(error, OSError | SafetensorError | KeyboardInterrupt):
            raise self._explain(error) from error

    def add(self, name: str, tensor: Tensor) -> None:
        """Add tensor `name` (any shape, float32, bfloat16, float16 or uint8); a full shard is written out.

        Raises: ValueError if `name` was added before.
        """
        if name in self._shard_of:
            raise ValueError(f"tensor '{name}' was added twice")
        if self._pending and self._pending_nbytes + tensor.nbytes > self._shard_nbytes:
            self._flush()
        self._pending[name] = tensor.contiguous()
        self._pending_nbytes += tensor.nbytes
        self._shard_of[name] = self._shard
        self._added += tensor.nbytes
        self._progress(self._what, self._added, max(self._nbytes, self._added))

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Write `value` as the JSON file `name`."""
        (self.folder / name).write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")

    def copy(self, path: Path) -> None:
        """Copy the file `path` under its own name, byte for byte."""
        shutil.copyfile(path, self.folder / path.name)

    def _flush(self) -> None:
        save_file(self._pending, self._numbered(self._shard), metadata={"format": "pt"})
        self._pending, self._pending_nbytes = {}, 0
        self._shard += 1

    def _numbered(self, shard: int) -> Path:
        return self.folder / f"model-{shard:05d}.safetensors"

    def _finish(self) -> None:
        if self._pending:
            self._flush()
        count = self._shard - 1
        if count == 1:
            self._numbered(1).rename(self.folder / SINGLE)
        else:
            files = {shard: f"model-{shard:05d}-of-{count:05d}.safetensors" for shard in range(1, count + 1)}
            for shard, file in files.items():
                self._numbered(shard).rename(self.folder / file)
            weight_map = {name: files[shard] for name, shard in self._shard_of.items()}
            self.write_json(INDEX, {"metadata": {"total_size": self._added}, "weight_map": weight_map})
        self.folder.replace(self.out)

    def _explain(self, error: OSError | SafetensorError | KeyboardInterrupt) -> CheckpointError:
        if isinstance(error, KeyboardInterrupt):
            return CheckpointError(f"writing {self.out} was interrupted; nothing of it was kept")
        if _disk_full(error):
            free = format_bytes(shutil.disk_usage(self.out.parent).free)
            return CheckpointError(
                f"the disk filled up while writing {self.out}, which needs {format_bytes(self._nbytes)} where "
                f"{free} are free; nothing of it was kept"
            )
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        return CheckpointError(f"writing {self.out} failed ({reason}); nothing of it was kept")


def refuse_occupied(out: Path) -> None:
    """Refuse an `out` that is a file or a folder with something in it.

    Raises: CheckpointError naming `out`.
    """
    if out.is_dir() and not any(out.iterdir()):
        return
    if out.exists() or out.is_symlink():
        raise CheckpointError(f"{out} already exists; name a folder that does not")


def _disk_full(error: OSError | SafetensorError) -> bool:
    if isinstance(error, OSError):
        return error.errno in _DISK_FULL
    return any(f"(os error {code})" in str(error) for code in _DISK_FULL)  # safetensors keeps the code in its text
