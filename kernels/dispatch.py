"""One table from (operation, device, dtype) to an implementation, each choice with its reason.

Implementations: "triton" (kernels.triton), "cpu" (the compiled decoder of kernels.cpu, which runs the operations of a
whole step in one call), "blas" (the vendor's library through torch), "reference" (plain torch). Nothing is loaded to
choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec

FLOATS = ("float32", "float16", "bfloat16")
FP8 = "float8_e4m3"


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation: dtypes that exist for it, and where its implementations are (module:function)."""

    name: str
    dtypes: tuple[str, ...]
    triton: str
    reference: str
    # Whether the compiled CPU decoder covers it, and in which dtypes.
    cpu: tuple[str, ...] = ()
    # Outside the deterministic mode the vendor's BLAS is preferred on a GPU.
    blas: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs an operation on a device for a dtype. implementation None: nothing does; the reason says why."""

    operation: str
    device: str
    dtype: str
    implementation: str | None
    entry: str
    reason: str


class NoKernel(ValueError):
    """No implementation runs this operation on this device for this dtype; the message says why."""


_T, _R = "kernels.triton", "kernels.reference"
OPERATIONS: dict[str, Operation] = {
    operation.name: operation
    for operation in (
        Operation(
            "attention", FLOATS, f"{_T}.attention:paged_attention", f"{_R}.attention:paged_attention", FLOATS[::2]
        ),
        Operation("attention_fp8_kv", (FP8,), f"{_T}.attention:paged_attention", f"{_R}.attention:paged_attention"),
        Operation("rope_write_kv", FLOATS, f"{_T}.kv_write:rope_write_kv", f"{_R}.attention:write_kv", FLOATS[::2]),
        Operation("rope_write_kv_fp8", (FP8,), f"{_T}.kv_write:rope_write_kv", f"{_R}.attention:write_kv"),
        Operation("rms_norm", FLOATS, f"{_T}.norm:rms_norm", f"{_R}.norm:rms_norm", FLOATS[::2]),
        Operation(
            "activation_and_mul", FLOATS, f"{_T}.norm:activation_and_mul", f"{_R}.norm:activation_and_mul", FLOATS[::2]
        ),
        Operation("linear", FLOATS, f"{_T}.linear:linear", f"{_R}.linear:linear", FLOATS[::2], blas=True),
        Operation("linear_w8a8", ("int8", FP8), f"{_T}.linear:linear_w8a8", f"{_R}.linear:linear_w8a8"),
        Operation(
            "quant_linear",
            ("Q4_0", "Q4_1", "Q8_0", "awq", "gptq"),
            f"{_T}.quant_linear:quant_linear",
            f"{_R}.linear:quant_linear",
            ("Q4_0", "Q4_1", "Q8_0"),
        ),
        Operation("logit_edits", ("float32",), f"{_T}.sampling:edit_logits", f"{_R}.sampling:edit_row"),
        Operation("sample", ("float32",), f"{_T}.sampling:sample", f"{_R}.sampling:sample_row"),
        Operation("token_scores", ("float32",), f"{_T}.sampling:token_scores", f"{_R}.sampling:token_score"),
        Operation("keep_while_equal", ("int32",), f"{_T}.verify:keep_while_equal", f"{_R}.sampling:keep_while_equal"),
        Operation("rejection_sample", ("float32",), f"{_T}.verify:rejection_sample", f"{_R}.sampling:residual"),
    )
}


def choose(operation: str, device: str, dtype: str, *, deterministic: bool = True, target: str | None = None) -> Choice:
    """What runs `operation` on `device` ("cpu", "cuda", or "interpreter") for `dtype`.

    target: name of the GPU target, None = that of the current device. deterministic: batch-invariant bits are wanted.
    Raises NoKernel for an unknown operation or dtype; a choice without implementation explains itself instead.
    """
    entry = OPERATIONS.get(operation)
    if entry is None:
        raise NoKernel(f"operation {operation!r} is not one of {', '.join(OPERATIONS)}")
    if dtype not in entry.dtypes:
        raise NoKernel(f"{operation} has no dtype {dtype!r}; it has {', '.join(entry.dtypes)}")
    if device == "cpu":
        return _on_cpu(entry, dtype)
    if device == "interpreter":
        return Choice(operation, device, dtype, "triton", entry.triton, "TRITON_INTERPRET=1: for tests, slow")
    if device == "cuda":
        return _on_gpu(entry, dtype, deterministic, target)
    raise NoKernel(f"device {device!r} is not one of cpu, cuda, interpreter")


def _on_cpu(entry: Operation, dtype: str) -> Choice:
    if dtype in entry.cpu:
        usable, why = _cpu_kernels()
        if usable:
            return Choice(entry.name, "cpu", dtype, "cpu", "kernels.cpu.decoder", "compiled for this CPU")
        return Choice(entry.name, "cpu", dtype, "reference", entry.reference, f"no compiled kernels: {why}")
    return Choice(entry.name, "cpu", dtype, "reference", entry.reference, f"no compiled kernel for {dtype}")


def _on_gpu(entry: Operation, dtype: str, deterministic: bool, target: str | None) -> Choice:
    if find_spec("triton") is None:
        return Choice(entry.name, "cuda", dtype, "reference", entry.reference, "triton is not installed")
    from kernels.triton.configs import current_target, names
    from kernels.triton.targets import TARGETS

    name = target or current_target()
    known = TARGETS.get(name)
    if dtype == FP8 and known is not None and known.fp8 is None:
        reason = f"{name} ({known.examples}) has no fp8 arithmetic: use bfloat16 or float16 KV, or int8 weights"
        return Choice(entry.name, "cuda", dtype, None, "", reason)
    if entry.blas and not deterministic:
        return Choice(
            entry.name, "cuda", dtype, "blas", "torch.nn.functional:linear", "batch invariance is not asked for"
        )
    tiles = f"tiles of {name}" if name in names() else f"default tiles: none are shipped for {name}"
    return Choice(entry.name, "cuda", dtype, "triton", entry.triton, tiles)


@cache
def _cpu_kernels() -> tuple[bool, str]:
    try:
        from kernels import cpu
    except ImportError as error:
        return False, str(error)
    return cpu.available(), cpu.reason()


def table(device: str, *, deterministic: bool = True, target: str | None = None) -> list[Choice]:
    """All operations and dtypes on a device."""
    return [
        choose(name, device, dtype, deterministic=deterministic, target=target)
        for name, operation in OPERATIONS.items()
        for dtype in operation.dtypes
    ]
