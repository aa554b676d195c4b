"""Floor 4: answers from a tuned model, in a conversation or for a file of rows.

`load_engine(config)` gives an `Engine`; `Chat` talks on a terminal, `BatchJob` answers files.
Nothing is imported here: the commands import what they use.
"""
