// Conversations in the browser's storage, each under a key of its own so that two windows don't overwrite each other's;
// and as JSON lines, which training reads.
const PREFIX = "swift-chat/";

export function make(parts = {}) {
  return { id: `${Date.now().toString(36).padStart(9, "0")}-${Math.random().toString(36).slice(2)}`, system: "", messages: [], ...parts };
}
export function load() {
  const found = [];
  for (const key of Object.keys(localStorage).filter((one) => one.startsWith(PREFIX)).sort()) {
    try {
      const talk = JSON.parse(localStorage.getItem(key));
      if (Array.isArray(talk.messages)) found.push({ ...make(), ...talk });
    } catch { /* written by something else */ }
  }
  return found;
}
// false: there is no room, or the browser allows no storage
export function save(talk) {
  try {
    if (talk.messages.length) localStorage.setItem(PREFIX + talk.id, JSON.stringify(talk));
    return true;
  } catch { return false; }
}
export function drop(talk) { localStorage.removeItem(PREFIX + talk.id); }

export function conversation(talk, end = talk.messages.length) {
  const plain = talk.messages.slice(0, end).map(({ role, content, tool_calls, tool_call_id }) => {
    const one = { role, content };
    if (tool_calls?.length) one.tool_calls = tool_calls.filter(Boolean);
    if (tool_call_id) one.tool_call_id = tool_call_id;
    return one;
  });
  return talk.system ? [{ role: "system", content: talk.system }, ...plain] : plain;
}
// What training can use: each conversation up to its last answer; `thoughts` for models whose template shows them.
export function rows(talks, thoughts) {
  return talks.flatMap((talk) => {
    const end = talk.messages.findLastIndex((one) => one.role === "assistant") + 1;
    return end ? [{ messages: written(talk, end, thoughts) }] : [];
  });
}
export function rated(talks, thoughts) {
  return talks.flatMap((talk) => talk.messages.flatMap((one, n) => one.label === undefined ? [] : [{ messages: written(talk, n + 1, thoughts), label: one.label }]));
}
function written(talk, end, thoughts) {
  const all = conversation(talk, end), shift = all.length - end;
  for (const [n, one] of talk.messages.slice(0, end).entries()) if (thoughts && one.reasoning_content) all[n + shift].reasoning_content = one.reasoning_content;
  return all;
}
// Conversations in a text of JSON lines.
// Throws the number of the line that holds none.
export function read(text) {
  const found = [];
  for (const [n, line] of text.split("\n").entries()) {
    if (!line.trim()) continue;
    try {
      const { messages: all, label } = JSON.parse(line);
      if (!all.length || !all.every((m) => typeof m.role === "string" && typeof (m.content ?? "") === "string")) throw 0;
      const messages = all.filter((m) => m.role !== "system").map((m) => ({ ...m, content: m.content ?? "" }));
      if (typeof label === "boolean" && messages.at(-1)?.role === "assistant") messages.at(-1).label = label;
      found.push(make({ system: all.find((m) => m.role === "system")?.content || "", messages }));
    } catch { throw n + 1; }
  }
  return found;
}
