"""Paceline: an LLM inference engine with batched DFlash2 speculative decoding."""
