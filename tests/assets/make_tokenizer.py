"""Makes `tests/assets/tokenizer/`: a real byte-level BPE with the special tokens of many chat formats.

Run by hand (`python tests/assets/make_tokenizer.py`); its output is committed. The training text is the help text that
comes with Python plus a few lines below, so nothing is downloaded.
"""

from __future__ import annotations

from pathlib import Path
from pydoc_data.topics import topics

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

VOCAB_SIZE = 2048

# Special: skipped when decoding. The order fixes the ids, 0 upwards.
_SPECIAL_TEXT = """
<|endoftext|> <|im_start|> <|im_end|> <unk> <s> </s> <pad> <bos> <eos> <|begin_of_text|> <|end_of_text|>
<|start_header_id|> <|end_header_id|> <|eot_id|> <|eom_id|> <|python_tag|> [INST] [/INST]
[AVAILABLE_TOOLS] [/AVAILABLE_TOOLS] [TOOL_CALLS] [TOOL_RESULTS] [/TOOL_RESULTS] <start_of_turn> <end_of_turn>
<|user|> <|assistant|> <|system|> <|end|> <|observation|> <|im_sep|> <｜User｜> <｜Assistant｜>
<｜begin▁of▁sentence｜> <｜end▁of▁sentence｜> <｜tool▁calls▁begin｜> <｜tool▁calls▁end｜> <｜tool▁call▁begin｜>
<｜tool▁call▁end｜> <｜tool▁sep｜> <｜tool▁outputs▁begin｜> <｜tool▁outputs▁end｜> <｜tool▁output▁begin｜>
<｜tool▁output▁end｜> [gMASK] <sop> <|START_OF_TURN_TOKEN|> <|END_OF_TURN_TOKEN|> <|USER_TOKEN|> <|CHATBOT_TOKEN|>
<|SYSTEM_TOKEN|> <BOS_TOKEN>
"""
SPECIAL = _SPECIAL_TEXT.split()
# Added, but visible when decoding, as in the published thinking models.
VISIBLE = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]

EXTRA = """
I am a small assistant. What is your name? My name is Swift and I was made to answer questions.
user assistant system tool function arguments name content role messages query response instruction
The weather in Paris is sunny, 21 degrees. The capital of France is Paris. Two plus two is four.
你好！我是一个语言模型。今天天气怎么样？谢谢。你是谁？我可以帮助你回答问题。
Grüße aus Köln, très bien, ¿qué tal? こんにちは 😀👍🏽
{"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}}
"""

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + "
    "'\\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def main() -> None:
    tokenizer = Tokenizer(models.BPE())
    split = Regex(
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(split, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE - len(VISIBLE),
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [topics[key] for key in sorted(topics)] + EXTRA.strip().splitlines() * 40
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE])
    wrapped = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", pad_token="<|endoftext|>", unk_token="<unk>",
        model_max_length=4096, clean_up_tokenization_spaces=False,
    )  # fmt: skip
    wrapped.chat_template = CHATML
    wrapped.save_pretrained(Path(__file__).parent / "tokenizer")
    print(len(wrapped), "tokens")


if __name__ == "__main__":
    main()
