"use strict";

// Tables: a click on a heading sorts by its column, numbers from large to small first.
for (const table of document.querySelectorAll("table.sortable")) {
  const headings = [...table.tHead.rows[0].cells];
  headings.forEach((heading, column) => {
    heading.querySelector("button").addEventListener("click", () => {
      const numbers = heading.classList.contains("number");
      const before = heading.getAttribute("aria-sort");
      const first = numbers ? "descending" : "ascending";
      const now = before === first ? (numbers ? "ascending" : "descending") : first;
      headings.forEach(other => other.removeAttribute("aria-sort"));
      heading.setAttribute("aria-sort", now);
      const key = row => {
        const cell = row.cells[column];
        return numbers ? Number(cell.dataset.value) : cell.textContent;
      };
      const compare = numbers ? (a, b) => a - b : (a, b) => a.localeCompare(b);
      const sign = now === "ascending" ? 1 : -1;
      const body = table.tBodies[0];
      const rows = [...body.rows].map(row => [key(row), row]);
      rows.sort((a, b) => sign * compare(a[0], b[0]));
      body.append(...rows.map(row => row[1]));
    });
  });
}

// Timelines, drawn on canvases. A view is a start and a length in microseconds.
const ROW = 18, TITLE = 18, AXIS = 22, COLORS = 8;
const data = JSON.parse(document.querySelector("#data").textContent);

function inUnits(us) {
  if (us >= 1e6) return `${(us / 1e6).toFixed(3)} s`;
  if (us >= 1e3) return `${(us / 1e3).toFixed(3)} ms`;
  return `${us.toFixed(3)} us`;
}

class Timeline {
  constructor(figure) {
    this.phase = data.phases[Number(figure.dataset.phase)];
    this.canvas = figure.querySelector("canvas");
    this.told = figure.querySelector("figcaption");
    this.view = [0, Math.max(this.phase.us, 0.001)];
    figure.hidden = this.phase.tracks.length === 0;
    if (figure.hidden) return;
    if (this.phase.cut) this.told.textContent = "The first part: a trace has all. " + this.told.textContent;
    let y = AXIS;
    for (const track of this.phase.tracks) {
      track.y = y;
      track.rows = 1 + track.slices.reduce((most, slice) => Math.max(most, slice[3]), 0);
      y += TITLE + track.rows * ROW + 6;
    }
    this.height = y;
    const acts = {
      in: () => this.zoom(0.5), out: () => this.zoom(2), left: () => this.move(-0.3), right: () => this.move(0.3),
      all: () => this.look(0, this.phase.us),
    };
    for (const button of figure.querySelectorAll("[data-do]")) button.addEventListener("click", acts[button.dataset.do]);
    this.listen(acts);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.draw());
  }

  listen(acts) {
    const keys = {
      "+": acts.in, "=": acts.in, "-": acts.out, "−": acts.out, ArrowLeft: acts.left, ArrowRight: acts.right, Home: acts.all,
    };
    this.canvas.addEventListener("keydown", event => {
      if (keys[event.key]) { keys[event.key](); event.preventDefault(); }
    });
    this.canvas.addEventListener("wheel", event => {
      if (!event.ctrlKey) return;
      event.preventDefault();
      this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.at(event));
    }, { passive: false });
    const fingers = new Map();
    this.canvas.addEventListener("pointerdown", event => {
      fingers.set(event.pointerId, event.offsetX);
      this.canvas.setPointerCapture(event.pointerId);
    });
    for (const end of ["pointerup", "pointercancel"]) {
      this.canvas.addEventListener(end, event => fingers.delete(event.pointerId));
    }
    this.canvas.addEventListener("pointermove", event => {
      if (!fingers.has(event.pointerId)) return this.tell(event);
      const before = [...fingers.values()];
      fingers.set(event.pointerId, event.offsetX);
      const after = [...fingers.values()];
      if (after.length === 1) return this.move((before[0] - after[0]) / this.canvas.clientWidth);
      const apart = list => Math.max(Math.abs(list[0] - list[1]), 10);
      this.zoom(apart(before) / apart(after), this.at(event));
    });
  }

  at(event) { return this.view[0] + event.offsetX / this.canvas.clientWidth * this.view[1]; }

  look(start, length) {
    length = Math.min(Math.max(length, 0.05), this.phase.us);
    this.view = [Math.min(Math.max(start, 0), this.phase.us - length), length];
    this.draw();
  }

  zoom(factor, around = this.view[0] + this.view[1] / 2) {
    const length = Math.min(Math.max(this.view[1] * factor, 0.05), this.phase.us);
    this.look(around - (around - this.view[0]) * length / this.view[1], length);
  }

  move(part) { this.look(this.view[0] + part * this.view[1], this.view[1]); }

  // Names the slice under the pointer.
  tell(event) {
    const at = this.at(event), y = event.offsetY;
    for (const track of this.phase.tracks) {
      const row = Math.floor((y - track.y - TITLE) / ROW);
      if (row < 0 || row >= track.rows) continue;
      const slice = track.slices.find(([start, length, , depth]) => depth === row && start <= at && at <= start + length);
      if (slice) {
        const [from, time, name] = slice;
        this.told.textContent = `${this.phase.names[name]}: ${inUnits(time)}, from ${inUnits(from)} on (${track.title})`;
      }
    }
  }

  draw() {
    const width = this.canvas.clientWidth, scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = this.height * scale;
    this.canvas.style.height = `${this.height}px`;
    const style = getComputedStyle(document.documentElement), color = name => style.getPropertyValue(`--${name}`).trim();
    const pen = this.canvas.getContext("2d");
    pen.scale(scale, scale);
    pen.font = "12px system-ui, sans-serif";
    pen.textBaseline = "middle";
    const [start, length] = this.view, x = us => (us - start) / length * width;
    pen.fillStyle = color("quiet");
    const step = 10 ** Math.ceil(Math.log10(length / Math.max(width / 110, 1)));
    for (let tick = Math.ceil(start / step) * step; tick <= start + length; tick += step) {
      pen.fillText(inUnits(tick), x(tick) + 3, AXIS / 2);
      pen.fillRect(x(tick), 0, 1, AXIS);
    }
    for (const track of this.phase.tracks) {
      pen.fillStyle = color("quiet");
      pen.fillText(track.title, 2, track.y + TITLE / 2);
      // What is thinner than a pixel is drawn once for each pixel.
      const drawn = new Array(track.rows).fill(-1);
      for (const [from, time, name, depth] of track.slices) {
        const left = Math.max(x(from), 0), right = Math.min(x(from + time), width);
        if (right < 0 || left > width || right <= drawn[depth] + 0.5) continue;
        const y = track.y + TITLE + depth * ROW;
        pen.fillStyle = color(`c${name % COLORS}`);
        pen.fillRect(left, y, Math.max(right - left - (right - left > 3 ? 1 : 0), 1), ROW - 2);
        drawn[depth] = right;
        if (right - left > 30) {
          pen.save();
          pen.beginPath();
          pen.rect(left, y, right - left - 2, ROW);
          pen.clip();
          pen.fillStyle = color("ground");
          pen.fillText(this.phase.names[name], left + 4, y + ROW / 2 - 1);
          pen.restore();
        }
      }
    }
  }
}

for (const figure of document.querySelectorAll(".timeline")) new Timeline(figure);
document.documentElement.dataset.ready = "yes";
