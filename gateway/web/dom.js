// Small helpers for building elements and showing numbers.

export const byId = (id) => document.getElementById(id);

/** An element with attributes (null and false are left out) and children (text or nodes; null is left out). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export const DASH = "–";

export function whole(value) {
  return value === null || value === undefined ? DASH : Math.round(value).toLocaleString("en");
}

export function percent(share) {
  return share === null || share === undefined ? DASH : `${(share * 100).toFixed(share < 0.1 ? 1 : 0)}%`;
}

export function millis(value) {
  if (value === null || value === undefined) return DASH;
  if (value >= 10000) return `${(value / 1000).toFixed(1)} s`;
  return `${value.toFixed(value < 10 ? 1 : 0)} ms`;
}

export function bytes(value) {
  if (value === null || value === undefined) return DASH;
  return value >= 1e9 ? `${(value / 1e9).toFixed(2)} GB` : `${Math.round(value / 1e6)} MB`;
}

export function clock(unixMs) {
  return new Date(unixMs).toLocaleTimeString("en-GB");
}

/** engine-0 for a socket of that name; other addresses stay as they are. */
export function shortName(address) {
  return address?.startsWith("unix:") ? address.split("/").at(-1).replace(/\.sock$/, "") : address;
}

/** A meter from 0 to 1 with its number; a dash where nothing was measured. */
export function gauge(share, label) {
  if (share === null || share === undefined) return DASH;
  const meter = el("meter", { min: 0, max: 1, value: share, "aria-label": label });
  const box = el("span", {}, meter, ` ${percent(share)}`);
  return box;
}

/** A wide row under another one, with whatever explains it. */
export function moreRow(columns, ...content) {
  return el("tr", { class: "more" }, el("td", { colspan: columns }, ...content));
}

/** A list of names and values. */
export function facts(entries) {
  const list = el("dl", { class: "receipt" });
  for (const [name, value] of entries) {
    if (value === null || value === undefined || value === "") continue;
    list.append(el("div", {}, el("dt", {}, name), el("dd", {}, value instanceof Node ? value : String(value))));
  }
  return list;
}

/** Calls `draw` at most once per frame, however often it is asked. */
export function eachFrame(draw) {
  let asked = false;
  return () => {
    if (asked) return;
    asked = true;
    requestAnimationFrame(() => {
      asked = false;
      draw();
    });
  };
}
