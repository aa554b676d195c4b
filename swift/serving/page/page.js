// The chat page: what its buttons do, and answers streamed from /v1 of the server that sent the page.
import { copy } from "./markdown.js";
import { View, add } from "./messages.js";
import * as store from "./talks.js";
import { WORDS } from "./words.js";

const $ = (id) => document.getElementById(id);
const NUMBERS = ["temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed"];
let words = WORDS.en, talks = [], talk = null, running = null, start = {}, follow = true;

// Only what a listener wants to hear is spoken: answers once they are whole, and errors, not each word or number.
function say(text, bad = false) {
  $("status").textContent = text; $("status").className = bad ? "error" : "";
  if (bad) $("spoken").textContent = text;
}
function save() { if (!store.save(talk)) say(words.full, true); }
function button(word, act, pressed) {
  const b = document.createElement("button");
  b.textContent = word; b.type = "button"; b.onclick = () => act(b); b.disabled = !!running;
  if (pressed !== undefined) b.setAttribute("aria-pressed", pressed);
  return b;
}
function tools(view, index) {
  const message = view.message, made = [];
  const rate = (good) => () => {
    message.label = message.label === good ? undefined : good;
    save(); tools(view, index);
  };
  if (message.content) made.push(button(words.copy, () => copy(message.content)));
  if (message.role === "user") made.push(button(words.edit, () => branch(index, message.content)));
  if (message.role === "user" && index === talk.messages.length - 1) made.push(button(words.again, () => answer()));
  if (message.role === "assistant") {
    made.push(button(words.again, () => { fork(index); draw(); answer(); }),
      button(words.good, rate(true), message.label === true), button(words.bad, rate(false), message.label === false));
  }
  view.tools.replaceChildren(...made);
}
function show(message, index) {
  const view = new View(message, words);
  view.update(true); tools(view, index);
  return view;
}
function list() {
  const seen = {};
  $("talk").replaceChildren(...talks.map((one) => {
    const name = one.messages[0]?.content?.slice(0, 40) || words.fresh, count = seen[name] = (seen[name] || 0) + 1;
    return new Option(count > 1 ? `${name} (${count})` : name, one.id, false, one === talk);
  }).reverse());
}
function draw() {
  $("messages").replaceChildren(...talk.messages.map((one, n) => show(one, n).node));
  $("empty").hidden = talk.messages.length > 0; $("spoken").textContent = "";
  $("system").value = talk.system;
  list(); down(true);
}
function down(always) {
  if (always) follow = true;
  if (follow) $("scroll").scrollTop = $("scroll").scrollHeight;
}
function busy(controller) {
  running = controller;
  $("stop").hidden = !running; $("send").hidden = !!running;
  for (const node of document.querySelectorAll("[data-idle], .tools button")) node.disabled = !!running;
}
function open(one) { talk = one; draw(); }
function begin() { talk = store.make({ system: start.system || "" }); talks.push(talk); draw(); $("input").focus(); }
// the conversation up to a message becomes one of its own; the old one stays
function fork(index) {
  talk = store.make({ system: talk.system, messages: structuredClone(talk.messages.slice(0, index)) });
  talks.push(talk);
}
function branch(index, text) { fork(index); draw(); $("input").value = text; fit(); $("input").focus(); }

async function readable(response) {
  if (response.status === 429) {
    const wait = response.headers.get("Retry-After");
    return words.busy + (wait ? ` (${wait} s)` : "");
  }
  const text = await response.text();
  let said = text.slice(0, 300);
  try { const body = JSON.parse(text); said = body.error?.message || body.message || body.detail || said; } catch { /* no JSON */ }
  if (typeof said !== "string") said = JSON.stringify(said);
  if (response.status === 401 || response.status === 403) return `${words.key} ${said}`;
  return said.trim() || `HTTP ${response.status}`;
}
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ;) {
    const { value, done } = await reader.read();
    if (done) { if (rest.startsWith("data:")) yield rest.slice(5).trim(); return; }
    const lines = (rest + value).split(/\r?\n/);
    rest = lines.pop();
    for (const line of lines) if (line.startsWith("data:")) yield line.slice(5).trim();
  }
}
function question() {
  const body = { messages: store.conversation(talk), stream: true, stream_options: { include_usage: true } };
  if ($("model").value) body.model = $("model").value;
  for (const name of NUMBERS) if ($(name).value !== "") body[name] = Number($(name).value);
  const stops = $("stop_words").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  return body;
}
async function answer() {
  const own = talk, message = { role: "assistant", content: "" }, view = new View(message, words), controller = new AbortController();
  busy(controller); say(words.waiting);
  let tokens = 0, first = 0, last = 0, fault = "", frame = 0;
  const paint = () => { frame = 0; view.update(); down(); say(`${tokens} tokens`); };
  try {
    const response = await fetch("v1/chat/completions", { method: "POST", headers: { "Content-Type": "application/json" }, body: JSON.stringify(question()), signal: controller.signal });
    if (!response.ok) fault = await readable(response);
    else {
      $("messages").append(view.node); own.messages.push(message);
      let finished = false;
      for await (const data of events(response.body)) {
        if (data === "[DONE]") { finished = true; break; }
        const chunk = JSON.parse(data);
        if (chunk.error) throw new Error(chunk.error.message);
        if (chunk.choices?.[0]) {
          add(message, chunk.choices[0].delta || {});
          last = performance.now(); first ||= last; tokens++;
          frame ||= requestAnimationFrame(paint);
        }
        if (chunk.usage) tokens = chunk.usage.completion_tokens;
      }
      if (!finished) fault = words.lost;
    }
  } catch (error) { if (error.name !== "AbortError") fault = error.name === "TypeError" ? words.lost : error.message || words.lost; }
  cancelAnimationFrame(frame);
  end(view, own, controller.signal.aborted);
  const rate = last > first + 50 && tokens > 1 ? `, ${((tokens - 1) * 1000 / (last - first)).toFixed(1)} tokens/s` : "";
  if (fault) say(fault, true); else if (controller.signal.aborted) say(words.stopped); else say(`${tokens} tokens${rate}`);
}
function end(view, own, stopped) {
  const message = view.message;
  if (message.tool_calls) message.tool_calls = message.tool_calls.filter(Boolean);
  if (!message.content && !message.tool_calls && !message.reasoning_content) { own.messages = own.messages.filter((one) => one !== message); view.node.remove(); }
  else view.update(true);
  busy(null); save(); list();
  if (own.messages.at(-1) === message) { tools(view, own.messages.length - 1); $("spoken").textContent = stopped ? "" : view.body.textContent; }
  for (const [n, node] of [...$("messages").children].entries()) if (own.messages[n]?.role === "user") node.replaceWith(show(own.messages[n], n).node);
  down();
}
function give(name, rows) {
  const a = document.createElement("a"), url = URL.createObjectURL(new Blob(rows.map((row) => JSON.stringify(row) + "\n"), { type: "application/jsonl" }));
  a.href = url; a.download = name; a.click(); setTimeout(() => URL.revokeObjectURL(url), 60000);
}
async function take(file) {
  let found;
  try { found = store.read(await file.text()); } catch (line) { return say(words.badfile + line, true); }
  if (!found.length) return say(words.badfile + 1, true);
  talks.push(...found);
  const kept = found.every(store.save);
  open(found.at(-1));
  say(kept ? `${words.import}: ${found.length}` : words.full, !kept);
}
function send(event) {
  event?.preventDefault();
  const text = $("input").value.trim();
  if (!text || running) return;
  talk.messages.push({ role: "user", content: text });
  $("input").value = ""; fit(); save(); draw(); answer();
}
function fit() { const box = $("input"); box.rows = Math.min(10, Math.max(2, box.value.split("\n").length)); }
async function models() {
  for (;;) {  // a model served here may still be loading
    try {
      const response = await fetch("v1/models");
      if (response.ok) {
        $("model").replaceChildren(...(await response.json()).data.map((m) => new Option(m.id)));
        return say("");
      }
      const loading = response.status === 503;
      say(loading ? words.loading : await readable(response), !loading);
      if (response.status < 500) return;
    } catch { say(words.lost, true); }
    await new Promise((done) => setTimeout(done, 1000));
  }
}
function fill() {
  for (const node of document.querySelectorAll("[data-word]")) node.textContent = words[node.dataset.word];
  for (const node of document.querySelectorAll("[data-hint]")) node.placeholder = words[node.dataset.hint];
  for (const node of document.querySelectorAll("[data-label]")) node.setAttribute("aria-label", words[node.dataset.label]);
  for (const name of NUMBERS) $(name).value = start[name] ?? "";
  $("stop_words").value = (start.stop || []).join("\n");
}
async function main() {
  const settings = await (await fetch("settings")).json();
  words = WORDS[settings.lang]; start = settings.start;
  document.documentElement.lang = settings.lang; document.title = $("title").textContent = settings.title;
  fill();
  talks = store.load();
  if (talks.length) open(talks.at(-1)); else begin();
  $("form").onsubmit = send; $("stop").onclick = () => running?.abort();
  $("input").oninput = fit;
  $("scroll").onscroll = () => { const s = $("scroll"); follow = s.scrollHeight - s.scrollTop - s.clientHeight < 60; };  // not for who reads further up
  $("input").onkeydown = (e) => { if (e.key === "Enter" && !e.shiftKey && !e.isComposing) send(e); };
  document.onkeydown = (e) => { if (e.key === "Escape") running?.abort(); };
  window.onpagehide = () => { if (running) store.save(talk); };
  $("system").onchange = () => { talk.system = $("system").value; save(); };
  $("talk").onchange = () => open(talks.find((one) => one.id === $("talk").value));
  $("fresh").onclick = begin;
  $("drop").onclick = () => {
    if (talk.messages.length && !confirm(words.sure)) return;
    store.drop(talk); talks = talks.filter((one) => one !== talk);
    if (talks.length) open(talks.at(-1)); else begin();
  };
  $("export").onclick = () => give("conversations.jsonl", store.rows(talks, $("with_thoughts").checked));
  $("votes").onclick = () => give("ratings.jsonl", store.rated(talks, $("with_thoughts").checked));
  $("import").onchange = () => { take($("import").files[0]); $("import").value = ""; };
  models();
}
main();
