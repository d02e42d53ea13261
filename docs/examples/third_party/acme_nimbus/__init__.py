"""The Nimbus model, and what hyperpar needs to know to run it in parallel."""
