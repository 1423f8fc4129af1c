"""Weights of a checkpoint under one set of names, whatever its format.

Names: `embed`, `norm`, `head`, `rope_freqs`, and per layer `layers.N.` + `attn_norm`, `q`, `k`, `v`, `o`, `q_norm`,
`k_norm`, `post_attn_norm`, `mlp_norm`, `post_mlp_norm`, `gate`, `up`, `down`, `router`, `experts.E.gate|up|down`; each
with `.weight` or `.bias`. Matrices are [out, in].
"""

from tandem.lm.weights.source import RawTensor, WeightError, WeightSource, open_source

__all__ = ["RawTensor", "WeightError", "WeightSource", "open_source"]
