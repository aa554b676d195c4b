"""Floor 3: what is optimised. Pure functions of hidden states and a batch; no model, no loop."""

from swift.objectives.causal_lm import CausalLM, LossTerms, build_objective

__all__ = ["CausalLM", "LossTerms", "build_objective"]
