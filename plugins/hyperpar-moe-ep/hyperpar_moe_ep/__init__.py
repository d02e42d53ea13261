"""Expert parallelism for hyperpar: tokens travel to the ranks that hold their experts."""

from .dispatch import Dispatcher, Experts
from .plugin import archetypes_with

__all__ = ["Dispatcher", "Experts", "archetypes_with"]
