// The chat page: conversations in the browser's storage, answers streamed from /v1 of the server that sent the page.
import { render } from "./markdown.js";
import { WORDS } from "./words.js";

const $ = (id) => document.getElementById(id);
const KEY = "swift-chats", NUMBERS = ["temperature", "top_p", "max_tokens", "seed"];
let words = WORDS.en, talks = [], current = 0, running = null;

function load() {
  try { talks = JSON.parse(localStorage.getItem(KEY)) || []; } catch { talks = []; }
  if (!Array.isArray(talks) || !talks.length) talks = [{ messages: [] }];
}
function save() {
  try { localStorage.setItem(KEY, JSON.stringify(talks)); } catch { say(words.full, true); }
}
function say(text, bad = false) { $("status").textContent = text; $("status").className = bad ? "error" : ""; }
function button(word, act, pressed) {
  const b = document.createElement("button");
  b.textContent = word; b.type = "button"; b.onclick = act; b.disabled = !!running;
  if (pressed !== undefined) b.setAttribute("aria-pressed", pressed);
  return b;
}
function folded(word, text) {
  const d = document.createElement("details"), s = document.createElement("summary"), p = document.createElement("pre");
  s.textContent = word; p.textContent = text; d.append(s, p);
  return d;
}
function show(message, index) {
  const box = document.createElement("article");
  box.className = message.role;
  if (message.reasoning_content) box.append(folded(words.thoughts, message.reasoning_content));
  box.append(render(message.content || "", words.copy));
  for (const call of message.tool_calls || []) box.append(folded(`${words.tool}: ${call.function.name}`, call.function.arguments));
  const tools = document.createElement("div");
  tools.className = "tools";
  if (message.role === "user") tools.append(button(words.edit, () => branch(index, message.content)));
  if (message.role === "assistant") {
    const vote = (good) => () => { message.label = message.label === good ? undefined : good; save(); draw(); };
    tools.append(button(words.copy, () => navigator.clipboard.writeText(message.content)), button(words.again, () => again(index)),
      button(words.good, vote(true), message.label === true), button(words.bad, vote(false), message.label === false));
  }
  box.append(tools);
  return box;
}
function draw() {
  $("messages").replaceChildren(...talks[current].messages.map(show));
  $("system").value = talks[current].system || "";
  $("talk").replaceChildren(...talks.map((talk, n) => new Option(talk.messages[0]?.content?.slice(0, 40) || words.fresh, n, false, n === current)));
  $("stop").hidden = !running; $("send").hidden = !!running;
  for (const id of ["talk", "fresh", "drop", "import", "system"]) $(id).disabled = !!running;
  $("messages").scrollTop = $("messages").scrollHeight;
}
// the conversation up to a message becomes one of its own; the old one stays
function fork(index) {
  talks.push({ system: talks[current].system, messages: structuredClone(talks[current].messages.slice(0, index)) });
  current = talks.length - 1;
}
function branch(index, text) { fork(index); $("input").value = text; save(); draw(); $("input").focus(); }
function again(index) { fork(index); answer(); }
function conversation(talk, end) {
  const plain = talk.messages.slice(0, end).map(({ role, content, tool_calls }) => tool_calls ? { role, content, tool_calls } : { role, content });
  return talk.system ? [{ role: "system", content: talk.system }, ...plain] : plain;
}
async function readable(response) {
  if (response.status === 429) return `${words.busy} (429)`;
  const text = await response.text();
  try { return JSON.parse(text).error.message; } catch { return `HTTP ${response.status} ${text.slice(0, 200)}`; }
}
function add(message, delta) {
  message.content += delta.content || "";
  const thought = delta.reasoning_content || delta.reasoning;
  if (thought) message.reasoning_content = (message.reasoning_content || "") + thought;
  for (const part of delta.tool_calls || []) {
    message.tool_calls ??= [];
    const call = (message.tool_calls[part.index ?? 0] ??= { id: part.id, type: "function", function: { name: "", arguments: "" } });
    call.function.name += part.function?.name || ""; call.function.arguments += part.function?.arguments || "";
  }
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
async function answer() {
  const talk = talks[current], body = { model: $("model").value, messages: conversation(talk), stream: true, stream_options: { include_usage: true } };
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  const message = { role: "assistant", content: "" };
  running = new AbortController(); say("…"); draw();
  let tokens = 0, first = 0, finished = false, fault = "";
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(body), signal: running.signal });
    if (!response.ok) fault = await readable(response);
    else {
      talk.messages.push(message); draw();
      for await (const data of events(response.body)) {
        if (data === "[DONE]") { finished = true; break; }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.choices?.[0]) { add(message, chunk.choices[0].delta || {}); first ||= performance.now(); tokens++; }
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
        $("messages").lastChild.replaceWith(show(message, talk.messages.length - 1));
        $("messages").scrollTop = $("messages").scrollHeight;
      }
      if (!finished) fault = words.lost;
    }
  } catch (error) { if (error.name !== "AbortError") fault = error.message || words.lost; }
  running = null;
  if (!message.content && !message.tool_calls && !message.reasoning_content && talk.messages.at(-1) === message) talk.messages.pop();
  save(); draw();
  const seconds = (performance.now() - first) / 1000;
  say(fault || (first ? `${tokens} tokens, ${(tokens / seconds).toFixed(1)} tokens/s` : ""), !!fault);
}
function give(name, rows) {
  const a = document.createElement("a");
  a.href = URL.createObjectURL(new Blob(rows.map((row) => JSON.stringify(row) + "\n"), { type: "application/jsonl" }));
  a.download = name; a.click(); URL.revokeObjectURL(a.href);
}
async function take(file) {
  const found = [], lines = (await file.text()).split("\n");
  for (const [n, line] of lines.entries()) {
    if (!line.trim()) continue;
    try {
      const all = JSON.parse(line).messages;
      if (!all.length || !all.every((m) => typeof m.role === "string" && typeof (m.content ?? "") === "string")) throw 0;
      found.push({ system: all.find((m) => m.role === "system")?.content, messages: all.filter((m) => m.role !== "system") });
    } catch { return say(words.badfile + (n + 1), true); }
  }
  talks.push(...found); current = talks.length - 1; save(); draw();
}
function send(event) {
  event?.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  talks[current].messages.push({ role: "user", content: text });
  $("input").value = ""; save(); answer();
}
async function start() {
  const { title, lang } = await (await fetch("settings")).json();
  words = WORDS[lang]; document.documentElement.lang = lang; document.title = $("title").textContent = title;
  for (const node of document.querySelectorAll("[data-word]")) node.textContent = words[node.dataset.word];
  load(); current = talks.length - 1; draw();
  $("form").onsubmit = send; $("stop").onclick = () => running?.abort();
  $("input").onkeydown = (e) => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) send(e); };
  document.onkeydown = (e) => { if (e.key === "Escape") running?.abort(); };
  $("system").onchange = () => { talks[current].system = $("system").value; save(); };
  $("talk").onchange = () => { current = Number($("talk").value); draw(); };
  $("fresh").onclick = () => { talks.push({ messages: [] }); current = talks.length - 1; save(); draw(); };
  $("drop").onclick = () => { talks.splice(current, 1); save(); load(); current = talks.length - 1; draw(); };
  $("export").onclick = () => give("conversations.jsonl", talks.filter((t) => t.messages.length).map((t) => ({ messages: conversation(t) })));
  $("votes").onclick = () => give("ratings.jsonl", talks.flatMap((t) => t.messages.flatMap((m, n) => m.label === undefined ? [] : [{ messages: conversation(t, n + 1), label: m.label }])));
  $("import").onchange = () => { take($("import").files[0]); $("import").value = ""; };
  for (;;) {  // a model served here may still be loading
    try {
      const response = await fetch("v1/models");
      if (response.ok) { $("model").replaceChildren(...(await response.json()).data.map((m) => new Option(m.id))); return say(""); }
      say(await readable(response), true);
      if (response.status < 500) return;
    } catch { say(words.lost, true); }
    await new Promise((done) => setTimeout(done, 1000));
  }
}
start();
