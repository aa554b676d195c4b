"""The engine: a paged KV cache, a scheduler of requests, and an unmodified Hugging Face model run through both."""
