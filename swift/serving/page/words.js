// The page's words in its languages.
export const WORDS = {
  en: { model: "Model", talk: "Conversation", fresh: "New", drop: "Delete", export: "Export", votes: "Export ratings", import: "Import", withThoughts: "with thoughts",
    settings: "Settings", system: "System prompt", message: "Message", send: "Send", stop: "Stop", copy: "Copy", again: "Again",
    edit: "Edit", good: "Good", bad: "Bad", thoughts: "Thoughts", tool: "Tool call", user: "You", assistant: "Answer",
    stops: "Stop at (one a line)", hint: "Enter sends, Shift+Enter: new line, Esc stops",
    empty: "What do you want to know?", sure: "Delete this conversation?", waiting: "Waiting for the answer …", stopped: "Stopped.",
    loading: "The model is being loaded …", lost: "The connection broke off.", key: "The endpoint refuses the key (--api_key):",
    busy: "The server is busy; try again in a moment.", badfile: "This file isn't JSON lines with messages: line ", full: "The browser's storage is full." },
  zh: { model: "模型", talk: "对话", fresh: "新建", drop: "删除", export: "导出", votes: "导出评价", import: "导入", withThoughts: "包含思考",
    settings: "设置", system: "系统提示", message: "消息", send: "发送", stop: "停止", copy: "复制", again: "重新生成",
    edit: "编辑", good: "好", bad: "差", thoughts: "思考", tool: "工具调用", user: "你", assistant: "回答",
    stops: "停止词（每行一个）", hint: "Enter 发送，Shift+Enter 换行，Esc 停止",
    empty: "想了解什么？", sure: "删除这个对话？", waiting: "等待回答…", stopped: "已停止。",
    loading: "模型加载中…", lost: "连接中断。", key: "服务端拒绝密钥（--api_key）：",
    busy: "服务器繁忙，请稍后重试。", badfile: "文件不是含 messages 的 JSON 行：第几行 ", full: "浏览器存储已满。" },
};
