"""The choice of tokens: what each request asks for, as tensors of a batch, and one pass over the logits."""
