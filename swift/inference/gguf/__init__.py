"""llama.cpp as what computes our engine's steps."""
