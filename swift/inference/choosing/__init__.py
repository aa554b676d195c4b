"""How the next tokens are chosen from a model's scores: settings, structures, guesses and beams."""
