"""What several tests of runtimes start from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from tests.servers import ROOT, leave_out
from tests.workers.runtime.formats import opened

if TYPE_CHECKING:
    from penstock.workers.runtime.transformers import EncoderRuntime


@pytest.fixture
def packing_operators() -> None:
    """These tests need the operators for packed weights; another build of torch may lack them."""
    from torch import nn

    from penstock.workers.runtime.prepacked import can_prepack

    if not can_prepack(nn.Linear(2, 2).eval()):
        leave_out("this build of torch has no operators for packed weights")


@pytest.fixture(scope="module")
def minilm() -> Iterator[EncoderRuntime]:
    """The sample, loaded."""
    from penstock.workers.runtime.transformers import EncoderRuntime

    runtime = opened(ROOT / "models" / "minilm" / "1")
    assert isinstance(runtime, EncoderRuntime)
    yield runtime
    runtime.close()
