"""The OpenAI-compatible HTTP server over backends: requests in JSON in, answers in JSON or as events out."""
