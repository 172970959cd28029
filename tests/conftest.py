"""One compute thread a test process, and the tiny checkpoints that several files use.

The runs are parallel already: two teams of threads on two cores would wait for each other. Where there is no GPU,
Triton's kernels run in its interpreter; it has to be told before anything imports Triton.
"""

import os
from glob import glob
from pathlib import Path

if not glob("/dev/nvidia[0-9]*"):
    os.environ["TRITON_INTERPRET"] = "1"

import pytest
import torch

from tiny import MAKERS

torch.set_num_threads(1)


@pytest.fixture(scope="module", params=["gpt_oss-mxfp4", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path: Path = tmp_path_factory.mktemp("tiny")
    MAKERS[request.param](path)
    return path
