"""Checkpoints in the Hugging Face layout: find, check and map them; nothing here owns memory or executes their code.

`locate` turns a name into a folder, `open_checkpoint` checks `config.json` and every tensor's name, shape and dtype
against the family's list before anything is read. Tensors are views of memory-mapped files.
"""

from outrider.checkpoint.checkpoint import Checkpoint, open_checkpoint
from outrider.checkpoint.hf_config import read_config
from outrider.checkpoint.locate import locate

__all__ = ["Checkpoint", "locate", "open_checkpoint", "read_config"]
