"""Plots as SVG, written by hand: no plotting library is needed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path

from benchmarks.simulation.world import SimResult, percentile

COLOURS = {
    "round_robin": "#999999",
    "least_load": "#4e79a7",
    "consistent_hash": "#f28e2b",
    "prefix_approx": "#59a14f",
    "prefix_exact": "#e15759",
}
WIDTH, HEIGHT = 720, 420
LEFT, RIGHT, TOP, BOTTOM = 70, 20, 46, 56


def _frame(title: str, body: Sequence[str]) -> str:
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" '
        f'font-size="12"><rect width="100%" height="100%" fill="white"/>'
        f'<text x="{WIDTH / 2}" y="22" text-anchor="middle" font-size="15">{escape(title)}</text>'
        + "".join(body)
        + "</svg>\n"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _line(x1: float, y1: float, x2: float, y2: float, colour: str = "#dddddd") -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def ttft_curves(results: Sequence[SimResult], title: str) -> str:
    """Share of requests whose first token came within a time (logarithmic axis), one curve per policy."""
    longest = max((result.ttfts[-1] for result in results if result.ttfts), default=1.0)
    low, high = -2.0, max(0.0, math.ceil(math.log10(max(longest, 1e-3))))
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM

    def x_of(seconds: float) -> float:
        return LEFT + inner_w * (math.log10(max(seconds, 10**low)) - low) / (high - low)

    def y_of(share: float) -> float:
        return TOP + inner_h * (1 - share)

    body = []
    for power in range(int(low), int(high) + 1):
        body += [_line(x_of(10.0**power), TOP, x_of(10.0**power), HEIGHT - BOTTOM)]
        body += [_text(x_of(10.0**power), HEIGHT - BOTTOM + 18, f"{10.0**power:g} s")]
    for tenth in range(0, 11, 2):
        body += [_line(LEFT, y_of(tenth / 10), WIDTH - RIGHT, y_of(tenth / 10))]
        body += [_text(LEFT - 8, y_of(tenth / 10) + 4, f"{10 * tenth}%", "end")]
    body.append(_text(WIDTH / 2, HEIGHT - 12, "time to first token"))
    for row, result in enumerate(results):
        colour = COLOURS.get(result.policy, "black")
        points = [(x_of(percentile(list(result.ttfts), n / 200)), y_of(n / 200)) for n in range(200)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        body.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        y = TOP + 16 + 18 * row
        body.append(f'<rect x="{LEFT + 10}" y="{y - 9}" width="14" height="10" fill="{colour}"/>')
        body.append(_text(LEFT + 30, y, result.policy, "start"))
    return _frame(title, body)


def bars(results: Sequence[SimResult], title: str, values: Sequence[float], form: str) -> str:
    """One bar per policy."""
    top = max([*values, 1e-9])
    inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
    body = [_line(LEFT, HEIGHT - BOTTOM, WIDTH - RIGHT, HEIGHT - BOTTOM, "#333333")]
    step = inner_w / max(1, len(results))
    for column, (result, value) in enumerate(zip(results, values, strict=True)):
        height = inner_h * value / top
        x, y = LEFT + step * (column + 0.15), HEIGHT - BOTTOM - height
        colour = COLOURS.get(result.policy, "black")
        body.append(f'<rect x="{x:.1f}" y="{y:.1f}" width="{0.7 * step:.1f}" height="{height:.1f}" fill="{colour}"/>')
        body.append(_text(x + 0.35 * step, y - 5, form.format(value)))
        body.append(_text(x + 0.35 * step, HEIGHT - BOTTOM + 18, result.policy))
    return _frame(title, body)


def write_all(folder: Path, results: Sequence[SimResult]) -> list[Path]:
    """Plots of one trace: TTFT curves, and bars of TTFT p99, hit rate, served share and imbalance."""
    folder.mkdir(parents=True, exist_ok=True)
    first = results[0]
    name = f"{first.trace}-{first.engines}x{first.routers}"
    where = f"{first.trace}, {first.engines} engines, {first.routers} router{'s' if first.routers > 1 else ''}"
    plots = {
        "ttft": ttft_curves(results, f"TTFT: {where}"),
        "p99": bars(results, f"TTFT p99, s: {where}", [r.ttft_p99_s for r in results], "{:.2f}"),
        "hits": bars(results, f"Prompt tokens from cache: {where}", [r.hit_rate for r in results], "{:.1%}"),
        "served": bars(results, f"Served in time: {where}", [r.served for r in results], "{:.2%}"),
        "imbalance": bars(results, f"Imbalance (CoV): {where}", [r.imbalance_cov for r in results], "{:.3f}"),
    }
    paths = []
    for kind, svg in plots.items():
        path = folder / f"{name}-{kind}.svg"
        path.write_text(svg)
        paths.append(path)
    return paths
