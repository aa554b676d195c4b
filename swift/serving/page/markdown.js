// Markdown to DOM nodes. Text of a model only ever becomes text nodes; links are http(s) alone, images aren't loaded.
const el = (tag, ...kids) => { const node = document.createElement(tag); node.append(...kids); return node; };

export function inline(text) {
  const out = [], rule = /`([^`]+)`|\*\*([^*]+)\*\*|\*([^*\s][^*]*)\*|\[([^\]]+)\]\((https?:\/\/[^\s)]+)\)/g;
  let at = 0;
  for (const m of text.matchAll(rule)) {
    out.push(text.slice(at, m.index));
    if (m[1]) out.push(el("code", m[1]));
    else if (m[2]) out.push(el("strong", m[2]));
    else if (m[3]) out.push(el("em", m[3]));
    else { const a = el("a", m[4]); a.href = m[5]; a.rel = "noopener noreferrer"; a.target = "_blank"; out.push(a); }
    at = m.index + m[0].length;
  }
  out.push(text.slice(at));
  return out;
}

export function render(text, copyWord) {
  const out = document.createDocumentFragment(), lines = text.split("\n");
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i], fence = line.match(/^\s*(```+|~~~+)/);
    if (fence) {
      const code = [];
      while (++i < lines.length && !lines[i].trim().startsWith(fence[1])) code.push(lines[i]);
      const button = el("button", copyWord);
      button.onclick = () => navigator.clipboard.writeText(code.join("\n"));
      out.append(button, el("pre", el("code", code.join("\n"))));
      continue;
    }
    const head = line.match(/^(#{1,6})\s+(.*)/), item = line.match(/^\s*([-*+]|\d+[.)])\s+(.*)/);
    if (head) out.append(el("h" + Math.min(6, head[1].length + 1), ...inline(head[2])));
    else if (item) {
      const tag = /\d/.test(item[1]) ? "ol" : "ul";
      if (out.lastChild?.localName !== tag) { const list = el(tag); if (tag === "ol") list.start = parseInt(item[1]); out.append(list); }
      out.lastChild.append(el("li", ...inline(item[2])));
    } else if (line.trim()) {
      const part = [line];
      while (i + 1 < lines.length && lines[i + 1].trim() && !/^\s*(```|~~~|#{1,6}\s|[-*+]\s|\d+[.)]\s)/.test(lines[i + 1])) part.push(lines[++i]);
      out.append(el("p", ...part.flatMap((one, n) => n ? [el("br"), ...inline(one)] : inline(one))));
    }
  }
  return out;
}
