"""One compute thread a test process, and the tiny checkpoints that several files use.

The runs are parallel already: two teams of threads on two cores would wait for each other.
"""

from pathlib import Path

import pytest
import torch

from tiny import MAKERS

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["gpt_oss-mxfp4", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    MAKERS[request.param](path)
    return path
