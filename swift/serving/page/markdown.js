// Markdown to DOM nodes, a line at a time: what stands in finished lines is never drawn again, however long the text.
// Text of a model only ever becomes text nodes; links are http(s) alone, images aren't loaded.
export const el = (tag, ...kids) => { const node = document.createElement(tag); node.append(...kids); return node; };

const INLINE = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
const FENCE = /^\s*(`{3,}|~{3,})\s*([\w+#.-]*)/, HEAD = /^(#{1,6})\s+(.*)/, ITEM = /^(\s*)([-*+]|\d+[.)])\s+(.*)/;
const RULE = /^\s*([-*_])(\s*\1){2,}\s*$/, ROW = /^\s*\|.*\|\s*$/, UNDER_HEADER = /^\s*\|(\s*:?-+:?\s*\|)+\s*$/;

export function inline(text) {
  const out = [];
  let at = 0;
  for (const m of text.matchAll(INLINE)) {
    if (m.index > at) out.push(text.slice(at, m.index));
    if (m[1]) out.push(el("code", m[1]));
    else if (m[2]) out.push(el("strong", m[2]));
    else if (m[3]) out.push(el("em", m[3]));
    else { const a = el("a", m[4]); a.href = m[5]; a.rel = "noopener noreferrer"; a.target = "_blank"; out.push(a); }
    at = m.index + m[0].length;
  }
  if (at < text.length) out.push(text.slice(at));
  return out;
}

// Works also where the page isn't at localhost or behind https, and the browser offers no clipboard.
export function copy(text) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text);
  const area = el("textarea"); area.value = text; area.className = "hidden";
  document.body.append(area); area.select(); document.execCommand("copy"); area.remove();
}

// Writes a text that grows into `root`. `update` takes the whole text so far and draws what is new.
export class Writer {
  constructor(root, copyWord) {
    this.root = root; this.copyWord = copyWord;
    this.seen = 0;  // characters in finished lines
    this.state = { kind: "", block: null, fence: "", lists: [] };
    this.undo = [];  // nodes of the unfinished line
  }

  update(text, complete = false) {
    this.#takeBack();
    for (let end; (end = text.indexOf("\n", this.seen)) >= 0; this.seen = end + 1) this.#line(text.slice(this.seen, end));
    this.undo = [];
    const rest = text.slice(this.seen);
    if (!rest) return;
    if (complete) { this.#line(rest); this.seen = text.length; this.undo = []; return; }
    this.before = { ...this.state, lists: [...this.state.lists] };
    if (this.state.kind === "fence" || !/^\s*([`~#]*|[-*+_=]+|\d+[.)]?|\|.*)\s*$/.test(rest)) this.#line(rest);  // what may become a mark waits
  }

  #takeBack() {
    for (const node of this.undo.reverse()) node.remove();
    if (this.before) this.state = this.before;
    this.undo = []; this.before = null;
  }

  #put(parent, ...kids) {
    for (const kid of kids) {
      const node = typeof kid === "string" ? document.createTextNode(kid) : kid;
      parent.append(node); this.undo.push(node);
    }
    return kids.at(-1);
  }

  #begin(kind, node) { this.state = { kind, block: node, fence: "", lists: [] }; if (node) this.#put(this.root, node); }

  #line(line) {
    const s = this.state;
    if (s.kind === "fence") {
      if (line.trim().startsWith(s.fence) && !line.trim().slice(s.fence.length).trim()) this.#begin("", null);
      else this.#put(s.block, line + "\n");
      return;
    }
    const fence = line.match(FENCE), head = line.match(HEAD), item = line.match(ITEM);
    if (fence) return this.#fence(fence[1], fence[2]);
    if (RULE.test(line)) return this.#begin("", el("hr"));
    if (head) return this.#begin("", el("h" + Math.min(6, head[1].length + 1), ...inline(head[2])));
    if (item) return this.#item(item);
    if (!line.trim()) { if (s.kind !== "list") this.#begin("", null); return; }
    if (ROW.test(line)) return this.#row(line);
    if (s.kind === "list" && /^\s/.test(line)) return this.#put(s.lists.at(-1).node.lastChild, el("br"), ...inline(line.trim()));
    const quote = line.match(/^\s*>\s?(.*)/), kind = quote ? "quote" : "text", words = inline(quote ? quote[1] : line);
    if (s.kind === kind) this.#put(s.block, el("br"), ...words);
    else this.#begin(kind, el(quote ? "blockquote" : "p", ...words));
  }

  #fence(mark, language) {
    const code = el("code"), button = el("button", this.copyWord), top = el("div", el("span", language), button);
    top.className = "codetop"; button.type = "button"; button.onclick = () => copy(code.textContent);
    const box = el("div", top, el("pre", code)); box.className = "code";
    this.#begin("fence", box);
    this.state.block = code; this.state.fence = mark;
  }

  #item([, space, mark, words]) {
    const indent = space.replace(/\t/g, "    ").length, tag = /\d/.test(mark) ? "ol" : "ul";
    if (this.state.kind !== "list") this.state = { kind: "list", block: null, fence: "", lists: [] };
    const lists = this.state.lists;
    while (lists.length && (lists.at(-1).indent > indent || (lists.at(-1).indent === indent && lists.at(-1).tag !== tag))) lists.pop();
    if (!lists.length || lists.at(-1).indent < indent) {
      const list = el(tag), parent = lists.length ? lists.at(-1).node.lastChild : this.root;
      if (tag === "ol") list.start = parseInt(mark, 10);
      lists.push({ indent, tag, node: this.#put(parent, list) });
    }
    this.#put(lists.at(-1).node, el("li", ...inline(words)));
  }

  #row(line) {
    const cells = (tag, text) => el("tr", ...text.trim().slice(1, -1).split("|").map((one) => el(tag, ...inline(one.trim()))));
    if (this.state.kind === "table") { if (!UNDER_HEADER.test(line)) this.#put(this.state.block, cells("td", line)); return; }
    const table = el("table", cells("th", line)), box = el("div", table); box.className = "wide-table";
    this.#begin("table", box);
    this.state.block = table;
  }
}
