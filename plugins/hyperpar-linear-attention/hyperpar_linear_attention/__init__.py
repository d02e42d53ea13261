"""Gated-delta and state-space layers for hyperpar: their packed projections, their convolutions and their norms over tp ranks."""
