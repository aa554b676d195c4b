// The page's words in its languages.
export const WORDS = {
  en: { model: "Model", talk: "Conversation", fresh: "New", drop: "Delete", export: "Export", votes: "Export ratings", import: "Import",
    settings: "Settings", system: "System prompt", message: "Message", send: "Send", stop: "Stop", copy: "Copy", again: "Again",
    edit: "Edit", good: "Good answer", bad: "Bad answer", thoughts: "Thoughts", tool: "Tool call", lost: "The connection broke off.",
    busy: "The server is busy; try again in a moment.", badfile: "This file isn't JSON lines with messages: line ", full: "The browser's storage is full." },
  zh: { model: "模型", talk: "对话", fresh: "新建", drop: "删除", export: "导出", votes: "导出评价", import: "导入",
    settings: "设置", system: "系统提示", message: "消息", send: "发送", stop: "停止", copy: "复制", again: "重新生成",
    edit: "编辑", good: "好", bad: "差", thoughts: "思考", tool: "工具调用", lost: "连接中断。",
    busy: "服务器繁忙，请稍后重试。", badfile: "文件不是含 messages 的 JSON 行：第几行 ", full: "浏览器存储已满。" },
};
