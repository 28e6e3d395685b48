"""How a processor is named after its instruction sets."""

from __future__ import annotations

import pytest

from mooncake_hal_cpu import cpu_info


@pytest.mark.parametrize(
    ("machine", "flags", "generation"),
    [
        ("x86_64", "fpu sse2", "x86_64"),
        ("x86_64", "sse2 avx2", "x86_64+avx2"),
        ("x86_64", "avx2 avx512f avx512_bf16", "x86_64+avx512_bf16"),
        ("x86_64", "avx2 avx512f avx512_bf16 amx_bf16", "x86_64+avx512_bf16+amx_bf16"),
        ("aarch64", "fp asimd bf16", "aarch64+asimd+bf16"),
    ],
)
def test_generation_follows_from_the_cpu_flags(machine: str, flags: str, generation: str) -> None:
    assert cpu_info.generation(machine, flags) == generation
