"""Corrections to Triton's CPU interpreter, so that kernels run there as written.

The interpreter of Triton 3.9 keeps bf16 as uint16 and fp8 as uint8 and multiplies those integers in `tl.dot`; it
truncates where a device rounds to nearest even, and its round-to-nearest loses the carry into the exponent. The
kernels stay free of work-arounds: the interpreter's builder is corrected instead, only when TRITON_INTERPRET=1 is
set.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

_applied = False


def interpreting() -> bool:
    """Whether kernels defined from now on run in the interpreter (TRITON_INTERPRET=1)."""
    import triton

    return bool(triton.knobs.runtime.interpret)


def correct_interpreter() -> None:
    """Corrects casts and dots of 16- and 8-bit floats in the interpreter. Does nothing without TRITON_INTERPRET=1."""
    global _applied
    if _applied or not interpreting():
        return
    import triton.language as tl
    from triton.runtime import interpreter

    builder = interpreter.InterpreterBuilder
    torch_dtypes = {
        tl.bfloat16: torch.bfloat16,
        tl.float8e4nv: torch.float8_e4m3fn,
        tl.float8e4b8: torch.float8_e4m3fnuz,
        tl.float8e5: torch.float8_e5m2,
    }

    def widen(handle: Any) -> np.ndarray:
        """The handle's values as an array that numpy can compute with: 16- and 8-bit floats become fp32."""
        dtype = torch_dtypes.get(handle.dtype.scalar)
        if dtype is None:
            return handle.data
        raw = torch.from_numpy(np.array(handle.data, order="C"))
        return raw.view(dtype).to(torch.float32).numpy()

    def cast(src: Any, dst_type: Any) -> Any:
        """Value cast with round to nearest even, as devices do."""
        dst = dst_type.scalar
        values = widen(src)
        dtype = torch_dtypes.get(dst)
        if dtype is None:
            return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(dst_type)), dst)
        raw = np.uint16 if dtype is torch.bfloat16 else np.uint8
        floats = torch.from_numpy(np.array(values, dtype=np.float32, order="C"))
        rounded = floats.to(dtype).view(torch.int16 if raw is np.uint16 else torch.uint8)
        return interpreter.TensorHandle(rounded.numpy().view(raw), dst)

    original_cast = builder.cast_impl

    def cast_impl(self: Any, src: Any, dst_type: Any) -> Any:
        if src.dtype.scalar in torch_dtypes or dst_type.scalar in torch_dtypes:
            return cast(src, dst_type)
        return original_cast(self, src, dst_type)

    def create_fp_to_fp(self: Any, src: Any, dst_type: Any, rounding_mode: Any) -> Any:
        return cast(src, dst_type)

    def create_dot(self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
        left, right = widen(a).astype(d.data.dtype), widen(b).astype(d.data.dtype)
        total = d.data.copy()
        # One k after another: a BLAS would sum a row in an order that depends on where in the tile it stands.
        for k in range(left.shape[1]):
            total += left[:, k : k + 1] * right[k : k + 1, :]
        return interpreter.TensorHandle(total, d.dtype.scalar)

    builder.cast_impl = cast_impl
    builder.create_fp_to_fp = create_fp_to_fp
    builder.create_dot = create_dot
    _patch_once_per_launch(interpreter)
    _applied = True


def _patch_once_per_launch(interpreter: Any) -> None:
    """Makes nested calls cheap: triton.language is patched once per launch and set of modules, not at every call."""
    import triton.language as tl

    patched: set[frozenset[str]] = set()
    modules_of: dict[Any, frozenset[str]] = {}
    launch = interpreter.GridExecutor.__call__

    def call_grid(self: Any, *args: Any, **kwargs: Any) -> Any:
        patched.clear()
        return launch(self, *args, **kwargs)

    def call_function(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules = modules_of.get(self.fn)
        if modules is None:
            found = (value for value in self.fn.__globals__.values() if value is tl or value is tl.core)
            modules = modules_of[self.fn] = frozenset(module.__name__ for module in found)
        if modules not in patched:
            interpreter._patch_lang(self.fn)
            patched.add(modules)
        return self.rewrite()(*args, **kwargs)

    interpreter.GridExecutor.__call__ = call_grid
    interpreter.InterpretedFunction.__call__ = call_function
