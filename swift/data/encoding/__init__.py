"""Conversations and texts to token ids with a loss weight for each, from the tokenizer's own template."""
