"""What the features of a CPU decide."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.workers.runtime import cpu


@pytest.fixture(autouse=True)
def _forgets_this_machine() -> Iterator[None]:
    cpu._features.cache_clear()
    yield
    cpu._features.cache_clear()


@pytest.mark.parametrize(
    ("features", "saturates"),
    [
        ("flags : sse2 avx2 fma", True),
        ("flags : avx2 avx512f", True),
        ("flags : avx2 avx512f avx512_vnni", False),
        ("flags : avx2 avx_vnni", False),
        ("Features : asimd asimddp i8mm", False),
        ("", False),
    ],
)
def test_only_old_x86_units_saturate(features: str, saturates: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """AVX2 and AVX-512 without VNNI add pairs of 8-bit products in 16 bits; then int8 forms use 7 bits."""
    (tmp_path / "cpuinfo").write_text(features)
    monkeypatch.setattr(cpu, "_CPUINFO", tmp_path / "cpuinfo")
    assert cpu.saturates_int8() is saturates
