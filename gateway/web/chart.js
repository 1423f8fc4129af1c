// Live curves: a ring of values per line, drawn on a canvas.

import { byId } from "./dom.js";

const POINTS = 180;

/** A colour of the theme as a canvas understands it: custom properties are not resolved by themselves. */
function colour(canvas, name) {
  canvas.style.color = `var(${name})`;
  return getComputedStyle(canvas).color;
}

export class Chart {
  /** `lines`: names of CSS colours, one per curve, such as "--a". */
  constructor(id, lines) {
    this.canvas = byId(id);
    this.colours = lines;
    this.values = lines.map(() => []);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  /** Adds one value per curve; null leaves a gap. */
  add(...values) {
    values.forEach((value, index) => {
      const line = this.values[index];
      line.push(value);
      if (line.length > POINTS) line.shift();
    });
    this.draw();
  }

  draw() {
    const { canvas } = this;
    const width = canvas.clientWidth;
    const height = canvas.clientHeight;
    if (!width) return;
    const scale = devicePixelRatio || 1;
    canvas.width = width * scale;
    canvas.height = height * scale;
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const top = Math.max(1e-9, ...this.values.flat().filter((value) => value !== null)) * 1.15;
    this.grid(context, width, height, top / 1.15);
    const y = (value) => height - 2 - (value / top) * (height - 6);
    this.values.forEach((line, index) => {
      context.strokeStyle = colour(canvas, this.colours[index]);
      context.lineWidth = 1.75;
      context.beginPath();
      let open = false;
      line.forEach((value, at) => {
        if (value === null) {
          open = false;
          return;
        }
        const x = width - ((line.length - 1 - at) / (POINTS - 1)) * width;
        if (open) context.lineTo(x, y(value));
        else context.moveTo(x, y(value));
        open = true;
      });
      context.stroke();
    });
  }

  grid(context, width, height, most) {
    context.strokeStyle = colour(this.canvas, "--line");
    context.beginPath();
    context.moveTo(0, height - 1.5);
    context.lineTo(width, height - 1.5);
    context.stroke();
    context.fillStyle = colour(this.canvas, "--soft");
    context.font = "11px system-ui, sans-serif";
    if (most > 1e-6) context.fillText(most >= 10 ? Math.round(most).toString() : most.toPrecision(2), 2, 11);
  }
}

/** The value under which a share `q` of the observations between two histograms lies; null without any. */
export function quantile(newer, older, q) {
  const counts = newer.counts.map((count, index) => count - (older?.counts[index] ?? 0));
  const total = counts.at(-1) ?? 0;
  if (total <= 0) return null;
  const wanted = q * total;
  const at = counts.findIndex((count) => count >= wanted);
  if (at >= newer.bounds.length) return newer.bounds.at(-1);
  const low = at ? newer.bounds[at - 1] : 0;
  const below = at ? counts[at - 1] : 0;
  const inside = counts[at] - below;
  return low + (newer.bounds[at] - low) * (inside ? (wanted - below) / inside : 1);
}
