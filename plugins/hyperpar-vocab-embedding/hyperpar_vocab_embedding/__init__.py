"""Vocab-parallel embedding and vocab-parallel cross entropy for hyperpar."""
