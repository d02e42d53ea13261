"""Context-parallel attention on torch's scaled dot product attention operators."""
