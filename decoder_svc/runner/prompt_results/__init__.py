"""Results for prompts, computed from hidden states: embeddings, and log probabilities of tokens."""
