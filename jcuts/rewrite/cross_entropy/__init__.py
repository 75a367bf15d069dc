"""Fused linear cross-entropy as a rewrite: logits and their gradient in chunks of tokens."""
