"""The operators that recipes name. Each module registers its own; `swift.data.engine.recipe` imports them all."""
