"""The report: a roofline line, tables of medians and ratios, and a plot."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.cpubench.roofline import Limits

# (workload, value, title, whether more is better)
COLUMNS = (
    ("w1", "decode_tok_s", "W1 decode tok/s", True),
    ("w1", "ttft_ms", "W1 TTFT ms", False),
    ("w2", "out_tok_s", "W2 tok/s", True),
    ("w2s", "out_tok_s", "W2 sampled tok/s", True),
    ("w3", "ttft_ms", "W3 warm TTFT ms", False),
    ("w4", "ttft_ms", "W4 TTFT ms", False),
    ("stack", "loaded_pss_mib", "memory MiB", False),
    ("stack", "ready_s", "ready s", False),
)


def roofline_line(limits: Limits, weight_bytes: int) -> str:
    floor = limits.memory_gb_s * 1e9 / weight_bytes
    return (
        f"This machine ({limits.isa}, {limits.threads} threads): {limits.memory_gb_s:.1f} GB/s of weights from memory, "
        f"in cache {limits.int4_gop_s:.0f} GOP/s on 4-bit, {limits.int8_gop_s:.0f} on 8-bit, {limits.fp32_gop_s:.0f} "
        f"on fp32 weights. {weight_bytes / 1e6:.1f} MB of weights per step allow {floor:.0f} tok/s for one stream."
    )


def turns(cells: dict[str, dict[str, list[float]]]) -> int:
    """How often the server ran its workloads."""
    return max((len(values) for name, cell in cells.items() if name != "stack" for values in cell.values()), default=0)


def markdown(found: dict[str, Any], weight_bytes: int, options: argparse.Namespace) -> str:
    """The page's text."""
    box, medians = found["machine"], found["medians"]
    lines = [
        "# Performance on CPUs",
        "",
        f"Written by `python -m benchmarks.cpu --write`: up to {options.rounds} rounds in turns, medians, workloads at "
        f"scale {options.scale:g}. {box['cpu']}, {box['cores']} cores, {box['system']}.",
        "",
        roofline_line(Limits(**found["limits"]), weight_bytes),
        "",
        "| server (turns) | " + " | ".join(title for _, _, title, _ in COLUMNS) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    for server, cells in medians.items():
        values = [cells.get(workload, {}).get(key) for workload, key, _, _ in COLUMNS]
        shown = " | ".join("–" if v is None else f"{v:.1f}" for v in values)
        lines.append(f"| {server} ({turns(found['runs'][server])}) | {shown} |")
    own = medians.get("tandem", {})
    for server, cells in medians.items():
        if server == "tandem":
            continue
        ratios = []
        for workload, key, _, more in COLUMNS:
            mine, theirs = own.get(workload, {}).get(key), cells.get(workload, {}).get(key)
            ratios.append("–" if not mine or not theirs else f"{mine / theirs if more else theirs / mine:.2f}×")
        lines.append(f"| better than {server} by | " + " | ".join(ratios) + " |")
    if decode := own.get("w1", {}).get("decode_tok_s"):
        floor = found["limits"]["memory_gb_s"] * 1e9 / weight_bytes
        lines += ["", f"W1 decode reaches {100 * decode / floor:.0f}% of what memory allows."]
    return "\n".join(lines) + "\n"


def plot(found: dict[str, Any]) -> str:
    """Bars per column, each scaled to its own greatest value, as SVG."""
    medians, width, left, bar, y = found["medians"], 760, 170, 16, 10
    colours = ("#2a6f97", "#c9ada7", "#9a8c98", "#4a4e69")
    parts: list[str] = []
    for workload, key, title, more in COLUMNS:
        rows = [(name, cells.get(workload, {}).get(key)) for name, cells in medians.items()]
        known = [(name, value) for name, value in rows if value is not None]
        if not known:
            continue
        top = max(value for _, value in known) or 1.0
        parts.append(
            f'<text x="8" y="{y + 12}" font-weight="bold">{title} ({"more" if more else "less"} is better)</text>'
        )
        y += 20
        for index, (name, value) in enumerate(known):
            size = (width - left - 90) * value / top
            colour = colours[index % len(colours)]
            parts.append(f'<text x="{left - 8}" y="{y + 12}" text-anchor="end">{name}</text>')
            parts.append(f'<rect x="{left}" y="{y}" width="{size:.1f}" height="{bar - 3}" fill="{colour}"/>')
            parts.append(f'<text x="{left + size + 6:.1f}" y="{y + 12}">{value:.1f}</text>')
            y += bar
        y += 10
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y}" font-family="sans-serif" font-size="12">'
        f'\n<rect width="100%" height="100%" fill="white"/>\n{body}\n</svg>\n'
    )


MARKS = ("<!-- performance -->", "<!-- /performance -->")


def linked(page: str, text: str) -> str:
    """The comparison page with the run's table between its marks. Raises ValueError if the marks are not there."""
    before, mark, rest = page.partition(MARKS[0])
    _, end, after = rest.partition(MARKS[1])
    if not (mark and end):
        raise ValueError(f"the page has no place between {MARKS[0]} and {MARKS[1]}")
    table = "\n".join(line for line in text.splitlines() if line.startswith("|"))
    source = "From [performance.md](performance.md), which says on what machine, how often, and what its limits are."
    return f"{before}{mark}\n{source}\n\n{table}\n{end}{after}"


def write(folder: Path, text: str, found: dict[str, Any]) -> None:
    comparison = folder / "comparison.md"
    comparison.write_text(linked(comparison.read_text(), text))
    (folder / "performance.md").write_text(text + "\n![The table as bars](performance.svg)\n")
    (folder / "performance.svg").write_text(plot(found))
