"""Floor 5: ways of tuning beyond next-token prediction, composed of data, objectives and what works ahead of a step."""
