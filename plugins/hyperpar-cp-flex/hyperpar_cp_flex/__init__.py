"""Context-parallel attention on torch's FlexAttention."""
