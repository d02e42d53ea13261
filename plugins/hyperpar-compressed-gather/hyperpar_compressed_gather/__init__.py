"""Half the bytes between tensor-parallel ranks: float32 activations travel as bfloat16."""
