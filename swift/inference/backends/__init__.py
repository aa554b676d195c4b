"""What runs the model: the program's own engine, transformers' `generate`, or another program spoken to over HTTP."""
