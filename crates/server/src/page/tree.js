// The prefix tree as a diagram: to the right the position in the prompt, downwards the branches. A block is an edge; blocks to
// its right are what follows it. So a prefix that many requests share is a tall block on the left.

import { byId, count, draw, make, plural, setText } from "./dom.js";

/** Between blocks, in pixels. */
const GAP = 1.5;
/** The height of a row: where there are few, where there are many, and of all rows that fit without scrolling. */
const ROW = { most: 26, least: 7, all: 220 };
/** From this size on a block has a label. */
const LABEL = { width: 40, height: 14, users: 70 };

/** What is drawn, to leave the diagram alone while nothing changes. */
let drawn = "";
let roots = [];
new ResizeObserver(() => drawTree()).observe(byId("tree"));

export function showTree(tree, pageSize) {
  const { branches } = tree;
  const seen = JSON.stringify(tree);
  if (seen === drawn) return;
  drawn = seen;
  roots = linked(branches);
  const empty = roots.length === 0;
  for (const id of ["tree", "tree-legend", "tree-details"]) byId(id).hidden = empty;
  setText(byId("tree-text"), summary(tree, pageSize));
  drawTree();
  byId("branches").replaceChildren(...roots.map(listed));
}

/** The nodes with their children, largest first. */
function linked(branches) {
  const nodes = new Map(branches.map((branch) => [branch.id, { ...branch, children: [] }]));
  const roots = [];
  for (const node of nodes.values()) {
    const parent = nodes.get(node.parent);
    (parent ? parent.children : roots).push(node);
  }
  const measure = (node, start, depth) => {
    node.start = start;
    node.end = start + node.tokens;
    node.children.sort((a, b) => b.subtree_tokens - a.subtree_tokens);
    // What the server left out of a branch is a row of its own.
    node.rows = node.children.reduce((rows, child) => rows + measure(child, node.end, depth + 1), 0) || 1;
    return node.rows;
  };
  roots.forEach((root) => measure(root, 0, 0));
  return roots.sort((a, b) => b.subtree_tokens - a.subtree_tokens);
}

function summary({ branches, nodes, tokens, other_tokens: others }, pageSize) {
  if (!nodes && !others) return "Nothing is cached yet.";
  const shared = branches.filter((branch) => branch.users > 1);
  const parts = [`${plural(tokens, "token")} in ${plural(nodes, "branch", "branches")}`];
  if (shared.length) {
    const most = shared.reduce((a, b) => (b.users > a.users ? b : a));
    const saved = shared.reduce((sum, branch) => sum + branch.tokens * (branch.users - 1), 0);
    parts.push(`up to ${count(most.users)} requests share a branch, which saves ${plural(saved, "token")} now`);
  }
  if (branches.length < nodes) parts.push(`the ${count(branches.length)} largest are shown`);
  if (others) parts.push(`${plural(others, "token")} of other keys`);
  return `${parts.join("; ")}. A page holds ${plural(pageSize, "token")}.`;
}

const kindOf = (users) => (users > 1 ? "shared" : users === 1 ? "used" : "cached");

const usersOf = (users) => (users ? `used by ${plural(users, "request")}` : "kept for later");

function drawTree() {
  const rows = roots.reduce((sum, root) => sum + root.rows, 0);
  const row = Math.min(ROW.most, Math.max(ROW.least, ROW.all / Math.max(rows, 1)));
  let longest = 1;
  const all = [];
  const place = (node, top) => {
    node.top = top;
    longest = Math.max(longest, node.end);
    all.push(node);
    node.children.reduce((y, child) => (place(child, y), y + child.rows * row), top);
  };
  roots.reduce((y, root) => (place(root, y), y + root.rows * row), 0);
  // One unit of the drawing is a pixel, so that labels have the size of text.
  const room = Math.max(byId("tree").clientWidth, 100);
  const scale = room / longest;
  const blocks = all.filter((node) => node.tokens > 0).map((node) => {
    const width = Math.max(node.tokens * scale - GAP, 1);
    const height = Math.max(node.rows * row - GAP, 2);
    const words = `tokens ${count(node.start)} to ${count(node.end)}, ${usersOf(node.users)}`;
    const box = { x: node.start * scale, y: node.top, width, height };
    const parts = [draw("title", {}, words), draw("rect", { ...box, rx: Math.min(4, height / 3, width / 3), class: kindOf(node.users) })];
    if (width > LABEL.width && height > LABEL.height) {
      const at = { x: box.x + 8, y: box.y + height / 2, class: `label ${kindOf(node.users)}`, "dominant-baseline": "central" };
      parts.push(draw("text", at, count(node.tokens) + (width > LABEL.users && node.users > 1 ? ` ×${node.users}` : "")));
    }
    return draw("g", {}, ...parts);
  });
  const diagram = byId("tree-diagram");
  diagram.setAttribute("viewBox", `0 0 ${room} ${Math.max(rows * row, 1).toFixed(1)}`);
  diagram.replaceChildren(...blocks);
}

function listed(node) {
  const text = `${plural(node.tokens, "token")}, ${usersOf(node.users)}`;
  const item = make("li", kindOf(node.users), text);
  if (node.children.length) item.append(make("ul", "", ...node.children.map(listed)));
  return item;
}
