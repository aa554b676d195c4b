"""Floor 6: one file per command, each with `main`. A command builds its parts from a configuration and runs them."""
