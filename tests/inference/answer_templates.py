"""How model families write tool calls and thoughts, in templates that are alike otherwise."""

from __future__ import annotations

from fixtures import make_tokenizer

from swift.config.data import PromptConfig
from swift.data.encoding.encode import ChatEncoder

_VALUE = "{{ v if v is string else v | tojson }}"
_OBJECT = "{{ {'name': c.name, 'arguments': c.arguments} | tojson }}"

# `t` is a call, `c` its function
CALLS = {
    "hermes": f"{{{{ '\\n<tool_call>\\n' }}}}{_OBJECT}{{{{ '\\n</tool_call>' }}}}",
    "kimi k2": (
        "{% if loop.first %}<|tool_calls_section_begin|>{% endif %}<|tool_call_begin|>{{ t.id }}"
        "<|tool_call_argument_begin|>{{ c.arguments | tojson }}<|tool_call_end|>"
        "{% if loop.last %}<|tool_calls_section_end|>{% endif %}"
    ),
    "granite": "{{ '<|tool_call|>[' if loop.first else ', ' }}" + _OBJECT + "{{ ']' if loop.last }}",
    "phi-4-mini": "{{ '<|tool_call|>[' if loop.first else ', ' }}" + _OBJECT + "{{ ']<|/tool_call|>' if loop.last }}",
    "minimax m1": ("{{ '<tool_calls>\n' if loop.first }}" + _OBJECT + "{{ '\n' }}{{ '</tool_calls>' if loop.last }}"),
    "minimax m2": (
        "{{ '<minimax:tool_call>\n' if loop.first }}<invoke name=\"{{ c.name }}\">{{ '\n' }}"
        '{% for k, v in c.arguments.items() %}<parameter name="{{ k }}">'
        + _VALUE
        + "</parameter>{{ '\n' }}{% endfor %}</invoke>{{ '\n' }}{{ '</minimax:tool_call>' if loop.last }}"
    ),
    "hunyuan": "{{ '<tool_calls>[' if loop.first else ', ' }}" + _OBJECT + "{{ ']</tool_calls>' if loop.last }}",
    "command r": (
        "{{ 'Action: ```json\n[' if loop.first else ',' }}"
        "{{ '\n    ' + {'tool_name': c.name, 'parameters': c.arguments} | tojson }}{{ '\n]```' if loop.last }}"
    ),
    "command r7b": (
        "{{ '<|START_ACTION|>[' if loop.first else ',' }}"
        "{{ '\n    ' + {'tool_call_id': loop.index0 | string, 'tool_name': c.name, 'parameters': c.arguments}"
        " | tojson }}"
        "{{ '\n]<|END_ACTION|>' if loop.last }}"
    ),
    "qwen3 coder": (
        "{{ '\n<tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments.items() %}"
        "{{ '<parameter=' + k + '>\n' }}" + _VALUE + "{{ '\n</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</tool_call>' }}"
    ),
    "glm 4.5": (
        "{{ '\n<tool_call>' + c.name }}{% for k, v in c.arguments.items() %}"
        "{{ '\n<arg_key>' + k + '</arg_key>\n<arg_value>' }}" + _VALUE + "{{ '</arg_value>' }}{% endfor %}"
        "{{ '\n</tool_call>' }}"
    ),
    "deepseek v3.1": (
        "{{ '<｜tool▁calls▁begin｜>' if loop.first }}{{ '<｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' }}"
        "{{ c.arguments | tojson + '<｜tool▁call▁end｜>' }}{{ '<｜tool▁calls▁end｜>' if loop.last }}"
    ),
    "mistral v3": (
        "{{ '[TOOL_CALLS] [' if loop.first else ', ' }}"
        "{{ {'name': c.name, 'arguments': c.arguments, 'id': t.id} | tojson }}{{ ']' if loop.last }}"
    ),
    "mistral v11": "{{ '[TOOL_CALLS]' + c.name + '[CALL_ID]' + t.id + '[ARGS]' }}{{ c.arguments | tojson }}",
    "mistral v13": "{{ '[TOOL_CALLS]' + c.name + '[ARGS]' }}{{ c.arguments | tojson }}",
    "seed oss": (
        "{{ '\n<seed:tool_call>\n<function=' + c.name + '>\n' }}{% for k, v in c.arguments.items() %}"
        "{{ '<parameter=' + k + '>' }}" + _VALUE + "{{ '</parameter>\n' }}{% endfor %}"
        "{{ '</function>\n</seed:tool_call>' }}"
    ),
    "xlam": "{{ '[' if loop.first else ', ' }}" + _OBJECT + "{{ ']' if loop.last }}",
}

# forms that no reader can be derived for
REFUSED = {
    "gpt-oss": (
        "{% if not loop.first %}{{ raise_exception('one call at a time') }}{% endif %}"
        "{{ ' to=functions.' + c.name + '<|channel|>commentary json<|message|>' }}{{ c.arguments | tojson }}"
    ),
    "python calls": (
        "{{ '[' if loop.first else ', ' }}{{ c.name }}({% for k, v in c.arguments.items() %}"
        "{{ k }}={{ v | tojson }}{{ ', ' if not loop.last }}{% endfor %}){{ ']' if loop.last }}"
    ),
    "values as Python writes them": (
        "{{ '<tool_call>' + c.name + '\n' }}{% for k, v in c.arguments.items() %}"
        "{{ '<k>' ~ k ~ '</k><v>' ~ v ~ '</v>\n' }}{% endfor %}</tool_call>"
    ),
}

# opening, closing, and what stands before the content of an answer
THOUGHTS = {
    "think": (
        "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}"
        "{{ m.content }}",
        ("<think>", "</think>", ""),
    ),
    "magistral": (
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}{% if p.type == 'thinking' %}"
        "{{ '[THINK]' + p.thinking + '[/THINK]' }}{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}",
        ("[THINK]", "[/THINK]", ""),
    ),
    "gpt-oss": (
        "{% if m.thinking %}{{ '<|channel|>analysis<|message|>' + m.thinking }}<|end|><|start|>assistant{% endif %}"
        "{{ '<|channel|>final<|message|>' + m.content }}",
        ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant", "<|channel|>final<|message|>"),
    ),
    "command": (
        "{% if m.reasoning_content %}{{ '<|START_THINKING|>' + m.reasoning_content + '<|END_THINKING|>' }}{% endif %}"
        "{{ '<|START_RESPONSE|>' + m.content }}",
        ("<|START_THINKING|>", "<|END_THINKING|>", "<|START_RESPONSE|>"),
    ),
    "seed oss": (
        "{% if m.reasoning_content %}{{ '\n<seed:think>' + m.reasoning_content + '</seed:think>\n' }}{% endif %}"
        "{{ m.content }}",
        ("<seed:think>", "</seed:think>", ""),
    ),
}


def encoder_of(calls: str = "", *, answer: str = "{{ m.content or '' }}", opened: str = "") -> ChatEncoder:
    """An encoder whose template writes calls, and assistants' answers, as told.

    Args:
        opened: what the generation prompt ends with.
    """
    text = (
        "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
        + answer
        + "{% else %}{{ m.content }}{% endif %}{% for t in m.tool_calls or [] %}{% set c = t.function %}"
        + calls
        + "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n" + opened + "' }}{% endif %}"
    )
    tokenizer = make_tokenizer()
    tokenizer.chat_template = text
    return ChatEncoder(tokenizer, PromptConfig())
