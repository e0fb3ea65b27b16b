"""Model files: GGUF and Hugging Face checkpoints, their tokenizers and chat templates."""
