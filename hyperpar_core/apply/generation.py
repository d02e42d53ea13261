"""generate() on ranks whose dp slices wait for each other: it has to go on until the last slice is done."""

from __future__ import annotations

from typing import Any

from ..errors import ApplyError

__all__ = ["in_step"]


def in_step(options: dict[str, Any]) -> dict[str, Any]:
    """The options of generate(), with synced_gpus on. Raises ApplyError where it was turned off."""
    given = options.get("synced_gpus")
    if given is not None and not given:
        raise ApplyError(
            "generate(synced_gpus=False), and experts lie over several dp slices: a slice whose sequences end early would leave the others"
            " waiting for its experts.\n  Leave synced_gpus out."
        )
    return {**options, "synced_gpus": True}
