"""The commands: thin shells around library calls, assembled in `cli.py`."""
