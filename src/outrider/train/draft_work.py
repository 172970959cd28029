"""A folder that a run works in: locked while it does, and refused to any run but the one that began it."""

import fcntl
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from outrider.console import write_json
from outrider.errors import ConfigError

_PIECES, _PIECE = 256, 1 << 16


class WorkFolder:
    """`run.json` in it says which run began there: its *identity*, names with values of JSON types."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._run = folder / "run.json"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other runs out. Raises: ConfigError if one is inside, or the folder cannot be made."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = (self.folder / "lock").open("a")
        except OSError as error:
            raise ConfigError(f"{self.folder} cannot be written: {error.strerror}") from error
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise ConfigError(
                    f"another run is at work in {self.folder}; wait for it, or name another folder"
                ) from error
            yield

    def identity(self) -> dict[str, Any]:
        """Of the run that began here; empty if none did. Raises: ConfigError if the file is damaged."""
        if not self._run.exists():
            return {}
        try:
            found: dict[str, Any] = json.loads(self._run.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ConfigError(f"{self._run} is damaged; remove {self.folder} to start over") from error
        return found

    def check(self, identity: dict[str, Any]) -> None:
        """Raises: ConfigError naming the first difference if another run began here."""
        found, wanted = self.identity(), json.loads(json.dumps(identity))
        for key in {**found, **wanted} if found else ():
            if found.get(key) != wanted.get(key):
                raise ConfigError(
                    f"{self.folder} holds a run with {key} {found.get(key)}, now it is {wanted.get(key)}; "
                    "name another folder, or remove this one to start over"
                )

    def claim(self, identity: dict[str, Any]) -> None:
        """Say that this run began here. Raises: as `check`."""
        self.check(identity)
        write_json(self._run, identity)


def fingerprint(folder: Path) -> str:
    """Tells the checkpoint in `folder` from others: of its config, and of 256 pieces of 64 KiB of each weight file."""
    seen = hashlib.sha256()
    for file in (folder / "config.json", *sorted(folder.glob("*.safetensors"))):
        size = file.stat().st_size
        seen.update(f"{file.name} {size}".encode())
        with file.open("rb") as data:
            for place in range(_PIECES):
                data.seek(place * size // _PIECES)
                seen.update(data.read(_PIECE))
    return seen.hexdigest()[:16]
