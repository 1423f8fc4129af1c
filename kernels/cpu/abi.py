"""The structures of src/tandem_cpu.h as ctypes, and the loaded library with its argument types."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int32, c_int64, c_uint64, c_void_p
from pathlib import Path
from typing import Any

ABI_VERSION = 5


class Weight(Structure):
    """TdWeight: tiles of one linear layer."""

    _fields_ = [("data", c_void_p), ("n", c_int64), ("k", c_int64), ("kind", c_int32), ("reserved", c_int32)]


class Act(Structure):
    """TdAct: activations of M rows in the forms that weights need."""

    _fields_ = [("f", c_void_p), ("q", c_void_p), ("b", c_void_p), ("h", c_void_p), ("k", c_int64)]


_NORMS = ("attn_norm", "mlp_norm", "post_attn_norm", "post_mlp_norm", "q_norm", "k_norm")
_BIASES = ("q_bias", "k_bias", "v_bias", "o_bias", "gate_bias", "up_bias", "down_bias")
CACHE_POINTERS = ("k_cache", "v_cache", "k_scale", "v_scale")
LAYER_POINTERS = (*_NORMS, *_BIASES, "cos", "sin", *CACHE_POINTERS)
LAYER_WEIGHTS = ("q", "k", "v", "o", "gate", "up", "down")


class Layer(Structure):
    """TdLayer: one transformer layer."""

    _fields_ = [
        *[(name, c_void_p) for name in LAYER_POINTERS],
        *[(name, Weight) for name in LAYER_WEIGHTS],
        ("window", c_int64),
    ]


_SHAPE = ("n_layers", "hidden", "heads", "kv_heads", "head_dim", "rotary_dim", "intermediate", "vocab")
MODEL_INTS = (*_SHAPE, "kv_type", "block_size", "activation", "max_rows", "max_out", "max_positions")
_SCALES = ("embed_scale", "logit_scale", "residual_scale")
MODEL_FLOATS = ("eps", "attn_scale", "attn_softcap", "logit_softcap", *_SCALES, "reserved")


class Model(Structure):
    """TdModel: the whole decoder."""

    _fields_ = [
        *[(name, c_int32) for name in MODEL_INTS],
        ("num_blocks", c_int64),
        *[(name, c_float) for name in MODEL_FLOATS],
        ("embed", Weight),
        ("head", Weight),
        ("final_norm", c_void_p),
        ("head_bias", c_void_p),
        ("layers", POINTER(Layer)),
    ]


class Step(Structure):
    """TdStep: one step's rows."""

    _fields_ = [
        ("n_rows", c_int32),
        ("n_seqs", c_int32),
        ("n_out", c_int32),
        ("reserved", c_int32),
        ("tokens", c_void_p),
        ("row_start", c_void_p),
        ("start", c_void_p),
        ("block_tables", c_void_p),
        ("table_stride", c_int64),
        ("out_rows", c_void_p),
        ("logits", c_void_p),
        ("hidden", c_void_p),
        ("best", c_void_p),
    ]


class Attention(Structure):
    """TdAttn: one attention task."""

    _fields_ = [
        ("q", c_void_p),
        ("out", c_void_p),
        ("part", c_void_p),
        *[(n, c_int64) for n in ("ldq", "ldo", "row0", "row1", "first_pos", "split0", "split1")],
        *[(n, c_void_p) for n in ("table", "k_cache", "v_cache", "k_scale", "v_scale", "scratch")],
        ("window", c_int64),
        *[(n, c_int32) for n in ("head", "group", "kv_heads", "head_dim", "block_size", "kv_type")],
        ("scale", c_float),
        ("softcap", c_float),
        ("next_table", c_void_p),
        ("next_pos", c_int64),
        ("next_n", c_int32),
        ("next_head", c_int32),
    ]


class Sample(Structure):
    """TdSample: how to sample one row."""

    _fields_ = [
        ("temperature", c_float),
        ("top_p", c_float),
        ("min_p", c_float),
        ("top_k", c_int32),
        ("seed", c_uint64),
        ("position", c_int32),
        ("choice", c_int32),
        ("purpose", c_int32),
        ("reserved", c_int32),
    ]


HEAD_WEIGHTS = ("in", "gate", "up", "down", "out", "embed")
HEAD_POINTERS = ("g_s", "g_e", "g_o", "ids")
# Steps in which probabilities that a head claims are told apart: TD_CLAIMS.
CLAIMS = 10


class Head(Structure):
    """TdHead: a draft head."""

    _fields_ = [
        *[(name, Weight) for name in HEAD_WEIGHTS],
        *[(name, c_void_p) for name in HEAD_POINTERS],
        ("hidden", c_int32),
        ("inner", c_int32),
        ("eps", c_float),
        ("reserved", c_int32),
    ]


class Chain(Structure):
    """TdChain: what a head drafts for one sequence."""

    _fields_ = [
        *[(name, c_void_p) for name in ("hidden", "trust", "least", "ids", "claims")],
        ("sample", Sample),
        *[(name, c_int32) for name in ("token", "most", "count")],
        ("reach", c_float),
        ("ended", c_int32),
        ("reserved", c_int32),
    ]


_V, _I, _L, _F = c_void_p, c_int32, c_int64, c_float
_FUNCTIONS: dict[str, tuple[list[Any], Any]] = {
    "td_abi_version": ([], _I),
    "td_isa": ([], c_char_p),
    "td_isa_runs": ([c_char_p], _I),
    "td_select_isa": ([c_char_p], _I),
    "td_set_threads": ([_I], _I),
    "td_threads": ([], _I),
    "td_linear": ([POINTER(Weight), POINTER(Act), _V, _L, _V, _L, _V], None),
    "td_rmsnorm": ([_V, _V, _F, _L, _V], None),
    "td_rope": ([_V, _V, _V, _L], None),
    "td_gated": ([_V, _V, _L, _I], None),
    "td_attention": ([POINTER(Attention)], None),
    "td_merge": ([_V, _L, _L, _L, _V], None),
    "td_attention_scratch": ([_L, _L], _L),
    "td_unpack_row": ([POINTER(Weight), _L, _V], None),
    "td_column_bytes": ([_I, _L], _L),
    "td_exact_kind": ([_I], _I),
    "td_pack": ([_I, _I, _V, _L, _L, _L, _L, _V, _V], _I),
    "td_sample": ([_V, _L, _L, _L, _V, _V], None),
    "td_score": ([_V, _L, _L, _L, _V, _V, _V, _L, _V, _V, _V, _V], None),
    "td_noise": ([POINTER(Sample), _L, _V, _V], None),
    "td_head_new": ([POINTER(Head)], _V),
    "td_head_free": ([_V], None),
    "td_head_draft": ([_V, POINTER(Chain), _L], None),
    "td_decoder_new": ([POINTER(Model)], _V),
    "td_decoder_free": ([_V], None),
    "td_decoder_profile": ([_V, _V], None),
    "td_decoder_logits": ([_V, _V, _L, _V], _I),
    "td_decoder_forward": ([_V, POINTER(Step)], _I),
}


def load(path: Path) -> Any:
    """The library with typed functions; calls release the GIL, those through its attribute `held` keep it.

    A call of a few hundred microseconds should keep it: another thread that takes it meanwhile may give it back late.
    Raises OSError if it can't be loaded.
    """
    library = ctypes.CDLL(str(path))
    library.held = ctypes.PyDLL(str(path))  # type: ignore[attr-defined]
    for name, (arguments, result) in _FUNCTIONS.items():
        for functions in (library, library.held):
            function = getattr(functions, name)
            function.argtypes = arguments
            function.restype = result
    if library.td_abi_version() != ABI_VERSION:
        raise OSError(f"{path}: ABI {library.td_abi_version()}, this code speaks {ABI_VERSION}; rebuild the kernels")
    return library
