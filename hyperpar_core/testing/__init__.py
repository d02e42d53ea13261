"""Testing as a product: rank processes, tiny models, and the one comparer of a parallel model with one process."""

from .parity import Bounds, compare, merge
from .ranks import RankFailure, RankPool, close_pools, pool
from .record import Record, no_float32_casts, record_parallel, record_reference, replica_differences
from .report import ParityReport
from .verify import Degrees, check_parity, model_from, verify
from .zoo import families, jitter, tiny_batch, tiny_config, tiny_model

__all__ = [
    "Bounds",
    "Degrees",
    "ParityReport",
    "RankFailure",
    "RankPool",
    "Record",
    "check_parity",
    "close_pools",
    "compare",
    "families",
    "jitter",
    "merge",
    "model_from",
    "no_float32_casts",
    "pool",
    "record_parallel",
    "record_reference",
    "replica_differences",
    "tiny_batch",
    "tiny_config",
    "tiny_model",
    "verify",
]
