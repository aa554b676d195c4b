// One message as it is shown, and as it grows: each part is made once and then only added to, so that thoughts which
// a reader opened stay open and a long answer isn't drawn anew for each word.
import { Writer, el } from "./markdown.js";

function folded(word) {
  const text = document.createTextNode(""), title = document.createTextNode(word);
  const node = el("details", el("summary", title), el("pre", text));
  return { node, text, title };
}

const grow = (node, text) => { if (text.length > node.length) node.appendData(text.slice(node.length)); };

export class View {
  constructor(message, words) {
    this.message = message; this.words = words;
    this.body = el("div"); this.body.className = "body";
    this.calls = []; this.tools = el("div"); this.tools.className = "tools";
    this.node = el("article", this.body, this.tools);
    this.node.className = message.role; this.node.setAttribute("aria-label", words[message.role] || message.role);
    this.writer = new Writer(this.body, words.copy);
  }

  update(complete = false) {
    const { reasoning_content: thought, content, tool_calls: calls } = this.message;
    if (thought) {
      if (!this.thought) { this.thought = folded(this.words.thoughts); this.thought.node.className = "thought"; this.node.prepend(this.thought.node); }
      grow(this.thought.text, thought);
      this.thought.title.data = this.words.thoughts + (complete || content || calls ? "" : " …");
    }
    if (content) this.writer.update(content, complete);
    for (const [n, call] of (calls || []).entries()) {
      if (!call) continue;  // an endpoint that numbers from 1
      if (!this.calls[n]) { this.calls[n] = folded(""); this.calls[n].node.className = "call"; this.calls[n].node.open = true; this.tools.before(this.calls[n].node); }
      this.calls[n].title.data = `${this.words.tool}: ${call.function.name}`;
      grow(this.calls[n].text, call.function.arguments);
    }
    this.node.classList.toggle("growing", !complete);
  }
}

// The parts of a streamed chunk, put to the message that they belong to.
export function add(message, delta) {
  message.content += delta.content || "";
  const thought = delta.reasoning_content || delta.reasoning;
  if (thought) message.reasoning_content = (message.reasoning_content || "") + thought;
  for (const part of delta.tool_calls || []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index ?? 0] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name || ""; call.function.arguments += part.function?.arguments || "";
  }
}
