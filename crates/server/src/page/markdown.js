// The Markdown that models write, as elements. Text of the model is only ever text of a node: it cannot become HTML.
// Images are not loaded, and links lead only to the web.

import { make } from "./dom.js";

const FENCE = /^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)/;
const HEADING = /^ {0,3}(#{1,6})\s+(.*?)\s*#*$/;
const ITEM = /^(\s*)(?:[-*+]|(\d{1,9})[.)])\s+(.*)$/;
const QUOTE = /^ {0,3}> ?(.*)$/;
const RULE = /^ {0,3}([-*_])(?:\s*\1){2,}\s*$/;
const INLINE = new RegExp(
  [
    /(`+)([^`]|[^`].*?[^`])\1(?!`)/, // code
    /\*\*(?=\S)(.+?)(?<=\S)\*\*/, // strong
    /(?<![\w*])[*_](?=[^\s*_])([^*_]*?[^\s*_])[*_](?!\w)/, // emphasis
    /!?\[([^\[\]]*)\]\(([^()\s]+(?:\([^()\s]*\))?)\)/, // link
  ]
    .map((part) => part.source)
    .join("|"),
  "s",
);

/** Splits text into blocks: what kind, and their lines. A block depends on no later line but those of its own. */
function blocksOf(text) {
  const blocks = [];
  let open = null;
  const begin = (kind, ...lines) => blocks.push((open = { kind, lines }));
  for (const line of text.split("\n")) {
    if (open?.kind === "code" && !open.closed) {
      open.lines.push(line);
      open.closed = line.trim().startsWith(open.fence) && /^[`~]+$/.test(line.trim());
      continue;
    }
    const fence = FENCE.exec(line);
    const item = ITEM.exec(line);
    if (fence) {
      begin("code", line);
      open.fence = fence[1];
    } else if (line.trim() === "") {
      if (open?.kind === "list") open.lines.push(line);
      else open = null;
    } else if (HEADING.test(line)) {
      begin("heading", line);
      open = null;
    } else if (RULE.test(line)) {
      begin("rule", line);
      open = null;
    } else if (item) {
      if (open?.kind === "list") open.lines.push(line);
      else begin("list", line);
    } else if (QUOTE.test(line)) {
      if (open?.kind === "quote") open.lines.push(line);
      else begin("quote", line);
    } else if (open?.kind === "list" && (/^\s{2,}/.test(line) || open.lines.at(-1).trim() !== "")) {
      open.lines.push(line);
    } else if (open?.kind === "text") {
      open.lines.push(line);
    } else {
      begin("text", line);
    }
  }
  return blocks;
}

function elementOf({ kind, lines, closed }, depth = 0) {
  switch (kind) {
    case "code": {
      const language = FENCE.exec(lines[0])[2];
      const body = closed ? lines.slice(1, -1) : lines.slice(1);
      const pre = make("pre", "code", make("code", "", body.join("\n")));
      pre.tabIndex = 0;
      pre.setAttribute("role", "region");
      pre.setAttribute("aria-label", language ? `Code, ${language}` : "Code");
      return pre;
    }
    case "heading": {
      const [, marks, text] = HEADING.exec(lines[0]);
      // The page has headings down to the third level above an answer.
      return make(marks.length <= 2 ? "h4" : "h5", "", ...inline(text));
    }
    case "rule":
      return make("hr");
    case "quote": {
      const text = lines.map((line) => QUOTE.exec(line)?.[1] ?? line).join("\n");
      if (depth >= 4) return make("blockquote", "", text);
      return make("blockquote", "", ...blocksOf(text).map((block) => elementOf(block, depth + 1)));
    }
    case "list":
      return list(lines);
    default:
      return make("p", "", ...inline(lines.join("\n")));
  }
}

/** A list, whose deeper items are lists in their items. */
function list(lines) {
  const top = { indent: -1, element: null, item: null };
  const open = [top];
  let root = null;
  for (const line of lines) {
    const match = ITEM.exec(line);
    if (!match) {
      if (line.trim() !== "" && open.at(-1).item) open.at(-1).item.append("\n", ...inline(line.trim()));
      continue;
    }
    const indent = match[1].replaceAll("\t", "    ").length;
    while (open.length > 2 && indent < open.at(-1).indent) open.pop();
    if (open.length < 2 || (indent > open.at(-1).indent + 1 && open.length < 6)) {
      const element = make(match[2] ? "ol" : "ul");
      if (match[2]) element.start = Number(match[2]);
      if (open.at(-1).item) open.at(-1).item.append(element);
      else root = element;
      open.push({ indent, element, item: null });
    }
    const level = open.at(-1);
    level.item = make("li", "", ...inline(match[3]));
    level.element.append(level.item);
  }
  return root ?? make("p", "", lines.join("\n"));
}

/** Text with code, emphasis and links. */
function inline(text, depth = 0) {
  const parts = [];
  let rest = text;
  while (rest) {
    const match = depth < 4 ? INLINE.exec(rest) : null;
    if (!match) {
      parts.push(rest);
      break;
    }
    if (match.index) parts.push(rest.slice(0, match.index));
    const [whole, ticks, code, strong, emphasis, label, target] = match;
    if (ticks) parts.push(make("code", "", code.trim() || code));
    else if (strong !== undefined) parts.push(make("strong", "", ...inline(strong, depth + 1)));
    else if (emphasis !== undefined) parts.push(make("em", "", ...inline(emphasis, depth + 1)));
    else parts.push(link(label, target, whole));
    rest = rest.slice(match.index + whole.length);
  }
  return parts;
}

function link(label, target, whole) {
  let url;
  try {
    url = new URL(target);
  } catch {
    return whole;
  }
  if (url.protocol !== "https:" && url.protocol !== "http:") return whole;
  const anchor = make("a", "", label || url.href);
  anchor.href = url.href;
  anchor.title = url.href;
  anchor.target = "_blank";
  anchor.rel = "noopener noreferrer nofollow";
  return anchor;
}

/** Shows text that grows in an element. What has not changed keeps its nodes. */
export class Markdown {
  #element;
  #shown = [];

  constructor(element) {
    this.#element = element;
  }

  show(text) {
    const blocks = blocksOf(text);
    const sources = blocks.map((block) => `${block.kind}\n${block.closed}\n${block.lines.join("\n")}`);
    let same = 0;
    while (same < sources.length && sources[same] === this.#shown[same]) same++;
    while (this.#element.childNodes.length > same) this.#element.lastChild.remove();
    this.#element.append(...blocks.slice(same).map((block) => elementOf(block)));
    this.#shown = sources;
  }
}
