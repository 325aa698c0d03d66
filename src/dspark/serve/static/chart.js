// Two kinds of small SVG charts with labelled axes.

const WIDTH = 260; // CSS pixels at most widths
const HEIGHT = 150;
const BOX = { left: 42, right: WIDTH - 8, top: 12, bottom: HEIGHT - 34 };

/**
 * Values over the last `span` seconds. `points`: [seconds ago, value], oldest first; a value of null is a gap.
 */
export function lineChart(svg, points, { span, label, digits = 0 }) {
  const top = niceTop(Math.max(...points.map(([, value]) => value ?? 0), 0));
  const x = (ago) => BOX.right - (ago / span) * (BOX.right - BOX.left);
  const frame = axes(top, label, digits, "seconds ago");
  for (const [ago, anchor] of [[span, "start"], [span / 2, "middle"], [0, "end"]]) {
    frame.push(text(x(ago), BOX.bottom + 14, `${ago}`, anchor));
  }
  const line = shape("path", { class: "line", d: path(points, x, (value) => height(value, top)) });
  fill(svg, [...frame, line], `${label}: ${points.at(-1)?.[1] ?? "nothing now"}`);
}

/** Shares from 0 to 1, one bar each, counted from 1. */
export function barChart(svg, shares, { label, across }) {
  const frame = axes(100, label, 0, across);
  const room = (BOX.right - BOX.left) / Math.max(shares.length, 4);
  shares.forEach((share, i) => {
    const left = BOX.left + i * room;
    const top = height(share * 100, 100);
    const box = { x: left + room * 0.15, y: top, width: room * 0.7, height: BOX.bottom - top };
    frame.push(shape("rect", { class: "bar", ...box }));
    frame.push(text(left + room / 2, BOX.bottom + 14, `${i + 1}`, "middle"));
    frame.push(text(left + room / 2, top - 3, `${Math.round(share * 100)}`, "middle"));
  });
  const said = shares.map((share, i) => `${i + 1}: ${Math.round(share * 100)} %`).join(", ");
  fill(svg, frame, `${label} by ${across}: ${said || "nothing now"}`);
}

/** The smallest of 1, 2 and 5 times a power of ten that is not below the value. */
export function niceTop(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}

function height(value, top) {
  return BOX.bottom - (value / top) * (BOX.bottom - BOX.top);
}

function axes(top, label, digits, across) {
  const parts = [0, top / 2, top].flatMap((value) => {
    const y = height(value, top);
    const grid = shape("line", { class: "grid", x1: BOX.left, x2: BOX.right, y1: y, y2: y });
    return [grid, text(BOX.left - 5, y + 3, value.toFixed(Number.isInteger(value) ? 0 : Math.max(digits, 1)), "end")];
  });
  const middle = (BOX.top + BOX.bottom) / 2;
  const side = text(10, middle, label, "middle");
  side.setAttribute("transform", `rotate(-90 10 ${middle})`);
  return [...parts, side, text((BOX.left + BOX.right) / 2, HEIGHT - 4, across, "middle")];
}

function path(points, x, y) {
  let pen = "M"; // lifted over gaps
  return points
    .map(([ago, value]) => {
      if (value === null) {
        pen = "M";
        return "";
      }
      const [at, up] = [x(ago).toFixed(1), y(value).toFixed(1)];
      const part = pen === "M" ? `M${at} ${up}h0.01` : `L${at} ${up}`; // a lone point shows as a dot
      pen = "L";
      return part;
    })
    .join("");
}

function fill(svg, children, said) {
  svg.setAttribute("viewBox", `0 0 ${WIDTH} ${HEIGHT}`);
  svg.setAttribute("aria-label", said);
  svg.replaceChildren(...children);
}

function text(x, y, content, anchor) {
  const made = shape("text", { x, y, "text-anchor": anchor });
  made.textContent = content;
  return made;
}

function shape(name, attributes) {
  const made = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  return made;
}
