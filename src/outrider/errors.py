"""Errors that a user can act on.

Contract: `str(error)` is one sentence that says what is wrong, where, and what to do. The command line prints it and
exits with code 2; nothing below `cli` prints or exits. Mistakes of the programmer (calls in the wrong order, say) are
ordinary `RuntimeError` / `ValueError`.
"""


class OutriderError(Exception):
    """Base of everything that the user's input, files or machine can cause."""


class CheckpointError(OutriderError):
    """A file or a tensor of a checkpoint is missing, damaged or not what its config announces."""


class ConfigError(OutriderError):
    """A setting, or a combination of settings and model, that cannot work."""


class DeviceError(OutriderError):
    """The GPU failed under a running engine."""


class RequestError(OutriderError):
    """A prompt or a sampling parameter that this model cannot serve."""
