"""The arithmetic of a draft head on the target's hidden states: recurrent, without attention or KV, small.

Of the kind of EAGLE (Li et al., 2024) and of Hydra (Ankner et al., 2024): the state begins as the hidden state whose
logits gave the last token; each drafted token adds one gated MLP of state and token embedding to it. The engine runs it
itself, because it needs what only the engine has: hidden states and embeddings of the target.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np

from tandem.lm.proposers.head_file import HeadFile, Matrix

if TYPE_CHECKING:
    from kernels.cpu.draft_head import HeadWeights
    from kernels.cpu.tiles import TileWeight


class HeadNet(Protocol):
    """The arithmetic of a head for a few rows at a time."""

    def start(self, hidden: np.ndarray) -> np.ndarray:
        """States fp32 [rows, hidden] from the target's hidden states fp32 [rows, hidden]."""
        ...

    def step(self, state: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
        """Moves `state` on in place by one token each; logits fp32 [rows, vocab of the head], valid until the next
        call."""
        ...


class TorchNet:
    """In plain fp32 on the CPU."""

    def __init__(self, head: HeadFile) -> None:
        import torch

        self._torch = torch
        self._eps = head.eps
        matrices = {name: torch.from_numpy(getattr(head, name).dequantize()) for name in ("w_in", "w_down", "w_out")}
        self._in, self._down, self._out = matrices["w_in"], matrices["w_down"], matrices["w_out"]
        self._gate_up = torch.cat([torch.from_numpy(part.dequantize()) for part in (head.w_gate, head.w_up)])
        self._gains = [torch.from_numpy(gain) for gain in (head.g_s, head.g_e, head.g_o)]

    def start(self, hidden: np.ndarray) -> np.ndarray:
        with self._torch.inference_mode():
            return self._torch.nn.functional.linear(self._torch.from_numpy(hidden), self._in).numpy()

    def step(self, state: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
        torch, linear = self._torch, self._torch.nn.functional.linear
        with torch.inference_mode():
            s, e = torch.from_numpy(state), torch.from_numpy(embeddings)
            of_state, of_token, of_output = self._gains
            z = torch.cat((self._rms(s) * of_state, self._rms(e) * of_token), dim=1)
            gate, up = linear(z, self._gate_up).chunk(2, dim=1)
            s += linear(torch.nn.functional.silu(gate) * up, self._down)
            return linear(self._rms(s) * of_output, self._out).numpy()

    def _rms(self, x: Any) -> Any:
        return x * (x.square().mean(dim=1, keepdim=True) + self._eps).rsqrt()


class CompiledNet:
    """On the compiled CPU kernels: weights in tiles as the file has them, int8 activations where those are blocks."""

    def __init__(self, head: HeadFile) -> None:
        from kernels import cpu
        from kernels.cpu.linear import Linear

        library = cpu.library()
        self._rmsnorm, self._gate = library.td_rmsnorm, library.td_gated
        self._eps, self._hidden, self._inner = head.eps, head.hidden, head.intermediate
        # What chains of drafts in one native call read too.
        self.weights = parts = _packed(head)
        self._in, self._down, self._out = (Linear(tiles) for tiles in (parts.enter, parts.down, parts.out))
        self._gate_up = [Linear(tiles) for tiles in (parts.gate, parts.up) if tiles is not None]
        self._of_state, self._of_token, self._of_output = (int(gain.ctypes.data) for gain in parts.gains)
        self._buffers: dict[int, list[np.ndarray]] = {}

    def _room(self, rows: int) -> list[np.ndarray]:
        """Buffers for so many rows: input, gates and ups, gated, added, normed, logits."""
        if rows not in self._buffers:
            hidden, inner = self._hidden, self._inner
            widths = (2 * hidden, inner, inner, hidden, hidden, self._out.n)
            self._buffers[rows] = [np.empty((rows, width), np.float32) for width in widths]
            if len(self._gate_up) == 1:
                self._buffers[rows][1] = np.empty((rows, 2 * inner), np.float32)
        return self._buffers[rows]

    def start(self, hidden: np.ndarray) -> np.ndarray:
        out = np.empty((len(hidden), self._hidden), np.float32)
        self._in(np.ascontiguousarray(hidden), out)
        return out

    def step(self, state: np.ndarray, embeddings: np.ndarray) -> np.ndarray:
        rows, hidden, inner, eps = len(state), self._hidden, self._inner, self._eps
        z, first, second, added, normed, logits = self._room(rows)
        of, to = int(state.ctypes.data), int(z.ctypes.data)
        token = int(embeddings.ctypes.data)
        for row in range(rows):
            at, target = of + 4 * row * hidden, to + 8 * row * hidden
            self._rmsnorm(at, self._of_state, eps, hidden, target)
            self._rmsnorm(token + 4 * row * hidden, self._of_token, eps, hidden, target + 4 * hidden)
        self._gate_up[0](z, first)
        gates, stride = int(first.ctypes.data), first.shape[1]
        ups = gates + 4 * inner
        if len(self._gate_up) == 2:
            self._gate_up[1](z, second)
            ups = int(second.ctypes.data)
        for row in range(rows):
            self._gate(gates + 4 * row * stride, ups + 4 * row * stride, inner, _SILU)
        gated = first if stride == inner else np.ascontiguousarray(first[:, :inner])
        self._down(gated, added)
        state += added
        out = int(normed.ctypes.data)
        for row in range(rows):
            self._rmsnorm(of + 4 * row * hidden, self._of_output, eps, hidden, out + 4 * row * hidden)
        self._out(normed, logits)
        return logits


# td_gated's number of the activation.
_SILU = 0


def _packed(head: HeadFile) -> HeadWeights:
    """The head in tiles. Gate and up are one matrix where they have one form: one phase of work instead of two."""
    from kernels.cpu.draft_head import HeadWeights

    stacked = head.w_gate.kind == head.w_up.kind
    gains = tuple(np.ascontiguousarray(gain) for gain in (head.g_s, head.g_e, head.g_o))
    return HeadWeights(
        enter=_tiles([head.w_in]),
        gate=_tiles([head.w_gate, head.w_up] if stacked else [head.w_gate]),
        up=None if stacked else _tiles([head.w_up]),
        down=_tiles([head.w_down]),
        out=_tiles([head.w_out]),
        gains=cast("tuple[np.ndarray, np.ndarray, np.ndarray]", gains),
        ids=np.ascontiguousarray(head.ids),
        eps=head.eps,
    )


def _tiles(matrices: list[Matrix]) -> TileWeight:
    """Matrices with the same inputs and form, one under the other, in tiles."""
    from kernels.cpu.tiles import Source, pack

    data = np.ascontiguousarray(np.concatenate([matrix.data for matrix in matrices]))
    return pack(Source[matrices[0].kind], data, len(data), matrices[0].k)


def head_net(head: HeadFile) -> HeadNet:
    """On the compiled kernels if this machine has them, else in plain torch."""
    try:
        from kernels import cpu
    except ImportError:
        return TorchNet(head)
    return CompiledNet(head) if cpu.available() else TorchNet(head)
