"""Compilation targets: what each GPU can do, so that a configuration that cannot run is refused before it is compiled.

Shared-memory limits are per thread block, in bytes: CUDA programming guide, table of compute capabilities (opt-in
maximum); gfx942: 64 KiB of LDS.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

KIB = 1024


@dataclass(frozen=True, slots=True)
class Target:
    """One GPU architecture. `fp8` is Triton's name of the native e4m3 form, None without one."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int
    fp8: str | None
    fp8_max: float
    examples: str

    def gpu_target(self) -> Any:
        """The target as Triton's compiler takes it."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget(self.backend, self.arch, self.warp_size)

    @property
    def torch_fp8(self) -> str:
        """Name of the torch dtype that has the bits of this target's e4m3."""
        return "float8_e4m3fnuz" if self.fp8 == "fp8e4b8" else "float8_e4m3fn"


TARGETS: dict[str, Target] = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 * KIB, None, 0.0, "A100"),
        Target("sm_86", "cuda", 86, 32, 99 * KIB, None, 0.0, "RTX 3090, A10"),
        Target("sm_89", "cuda", 89, 32, 99 * KIB, "fp8e4nv", 448.0, "RTX 4090, L4, L40S"),
        Target("sm_90", "cuda", 90, 32, 227 * KIB, "fp8e4nv", 448.0, "H100, H200"),
        Target("sm_120", "cuda", 120, 32, 99 * KIB, "fp8e4nv", 448.0, "RTX 5090"),
        Target("sm_121", "cuda", 121, 32, 99 * KIB, "fp8e4nv", 448.0, "GB10"),
        Target("gfx942", "hip", "gfx942", 64, 64 * KIB, "fp8e4b8", 240.0, "MI300X"),
    )
}


def target_of_device(index: int = 0) -> Target | None:
    """The target of torch's CUDA or ROCm device `index`, or None when the table does not know it or there is none."""
    import torch

    if not torch.cuda.is_available():
        return None
    if torch.version.hip:
        arch = torch.cuda.get_device_properties(index).gcnArchName.split(":")[0]
        return TARGETS.get(arch)
    major, minor = torch.cuda.get_device_capability(index)
    return TARGETS.get(f"sm_{major}{minor}")
