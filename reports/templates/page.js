// Everything on the page is there without this program, except: sorting, downloads, and the drawings of workers over time.
"use strict";

async function unpacked(id) {
  const packed = Uint8Array.from(atob(document.getElementById(id).textContent.trim()), (c) => c.charCodeAt(0));
  const stream = new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).arrayBuffer();
}

function save(name, parts, type) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob(parts, { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

// ------------------------------------------------------------------------------------------------------------ downloads

for (const button of document.querySelectorAll("button[data-csv]")) {
  button.addEventListener("click", async () => save(button.dataset.csv + ".csv", [await unpacked("csv-" + button.dataset.csv)], "text/csv"));
}
for (const button of document.querySelectorAll("button[data-svg]")) {
  button.addEventListener("click", () => {
    const drawing = button.closest("figure").querySelector("svg").cloneNode(true);
    drawing.setAttribute("color", "#1b1f24");
    drawing.setAttribute("font-family", "Verdana, sans-serif");
    save(button.dataset.svg + ".svg", [new XMLSerializer().serializeToString(drawing)], "image/svg+xml");
  });
}

// -------------------------------------------------------------------------------------------------------------- sorting

for (const table of document.querySelectorAll("table.sortable")) {
  const heads = [...table.tHead.rows[0].cells];
  heads.forEach((head, column) => {
    const button = document.createElement("button");
    button.className = "sort";
    button.append(...head.childNodes);
    head.append(button);
    button.addEventListener("click", () => {
      const down = head.getAttribute("aria-sort") === "ascending";
      heads.forEach((h) => h.removeAttribute("aria-sort"));
      head.setAttribute("aria-sort", down ? "descending" : "ascending");
      const value = (row) => {
        const cell = row.cells[column];
        const number = parseFloat(cell.dataset.value ?? "nan");
        return Number.isNaN(number) ? cell.textContent.trim() : number;
      };
      const rows = [...table.tBodies[0].rows];
      const order = (a, b) => {
        const [x, y] = [value(a), value(b)];
        if (typeof x === "number" && typeof y === "number") return (down ? y - x : x - y);
        if (typeof x !== typeof y) return typeof x === "number" ? -1 : 1; // cells without a number come last
        return down ? y.localeCompare(x) : x.localeCompare(y);
      };
      table.tBodies[0].append(...rows.sort(order));
    });
  });
}

// ---------------------------------------------------------------------------------------------------- workers over time

const PARTS = 4000; // as in reports/figures/gantt.py
const STRIP = 26; // pixels of the strip that shows the whole run

function draw(place, run, numbers) {
  const style = getComputedStyle(document.documentElement);
  const color = (name) => style.getPropertyValue(name).trim();
  const row = 13, left = 44, width = place.clientWidth, height = STRIP + 26 + row * run.nodes.length + 24;
  const canvas = place.querySelector("canvas"), ratio = window.devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.height = height + "px";
  const pen = canvas.getContext("2d");
  pen.scale(ratio, ratio);
  pen.font = "11px system-ui, sans-serif";
  const span = width - left - 12;
  const whole = (s) => left + (s / run.whole) * span, part = (s) => left + (s / run.seconds) * span;
  const bar = (fill, x, y, wide, tall) => { pen.fillStyle = fill; pen.fillRect(x, y, Math.max(wide, 0.3), tall); };
  // The whole run, with its changes; a frame around what is drawn below.
  bar(color("--soft"), left, 4, span, STRIP - 10);
  for (const [from, to] of run.changes) bar(color("--change"), whole(Math.max(from, 0)), 4, Math.max(whole(to) - whole(from), 1.5), STRIP - 10);
  pen.strokeStyle = color("--muted");
  pen.strokeRect(left + 0.5, 4.5, Math.max(whole(run.seconds) - left, 2), STRIP - 11);
  pen.fillStyle = color("--muted");
  pen.textAlign = "right";
  pen.fillText("run", left - 6, 16);
  pen.fillText(Math.round(run.whole) + " s", width - 12, STRIP + 8);
  const top = STRIP + 16, n = run.pushes;
  for (const [from, to] of run.changes) {
    if (from > run.seconds) continue;
    const end = Math.min(to, run.seconds);
    pen.globalAlpha = 0.3;
    bar(color("--change"), part(Math.max(from, 0)), top, Math.max(part(end) - part(Math.max(from, 0)), 1.5), row * run.nodes.length);
    pen.globalAlpha = 1;
  }
  run.nodes.forEach((node, i) => { pen.fillStyle = color("--muted"); pen.fillText(node, left - 6, top + row * i + 10); });
  const rows = new Uint8Array(numbers, 0, n), values = new Uint16Array(numbers.slice(n));
  const scale = span / PARTS;
  run.held.forEach(([from, to], i) => { if (to > from) bar(color("--muted"), part(from), top + row * i + 5, part(to) - part(from), 3); });
  let end = 0;
  for (let i = 0; i < n; i++) {
    end += values[i];
    const push = values[n + i], compute = values[2 * n + i], pull = values[3 * n + i], wait = values[4 * n + i];
    const y = top + row * rows[i], x = (t) => left + t * scale;
    bar(color("--muted"), x(end - push - compute - pull - wait), y + 5, wait * scale, 3);
    bar(color("--move"), x(end - push - compute - pull), y + 4, pull * scale, 5);
    bar(color("--move"), x(end - push), y + 4, push * scale, 5);
    bar(color("--compute"), x(end - push - compute), y + 2, Math.max(compute * scale - 0.6, 0.3), 9);
  }
  pen.textAlign = "left";
  pen.fillStyle = color("--muted");
  const base = top + row * run.nodes.length + 14;
  pen.fillText("0", left, base);
  pen.textAlign = "right";
  pen.fillText(run.seconds < 10 ? run.seconds.toFixed(2) + " s" : Math.round(run.seconds) + " s", width - 12, base);
}

for (const details of document.querySelectorAll("details[data-gantt]")) {
  const runs = JSON.parse(details.querySelector("script").textContent);
  const place = details.querySelector("div.gantt"), choice = details.querySelector("select");
  const show = async () => {
    if (!details.open) return;
    const run = runs[choice.value];
    const share = run.pushes < run.all ? `The first ${run.pushes} of ${run.all} pushes` : `${run.all} pushes`;
    const count = run.changes.length;
    place.querySelector("p").textContent = `${share}; reconfigurations, forks and switches between branches: ${count}.`;
    draw(place, run, await unpacked(`${details.dataset.gantt}-${run.seed}`));
  };
  details.addEventListener("toggle", show);
  choice.addEventListener("change", show);
  window.addEventListener("resize", show);
  window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", show);
}
