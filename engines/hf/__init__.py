"""The Hugging Face engine: one process, any causal LM that transformers can build."""
