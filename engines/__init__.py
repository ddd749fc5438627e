"""Compute: a batch of experiences becomes a gradient step. Owns no durable state and knows no URL.

Importing this package imports neither torch nor transformers; `engines.hf` does.
"""
