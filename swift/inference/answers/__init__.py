"""What an answer consists of: content, thoughts and tool calls, found by what the chat template shows of them."""
