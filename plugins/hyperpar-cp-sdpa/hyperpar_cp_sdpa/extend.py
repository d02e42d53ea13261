"""What other distributions of context-parallel attention build on; nothing else here is for them.

`ContextParallel` is the way into a model: a subclass overrides `compute`, `wrap` makes it for a module, `refuse` says at plan time
where it can't work. A `Mask` is a rule over global positions, `Parts` says which rank holds which of them, `to_heads` and
`to_sequence` exchange heads for tokens. `sent` says what that costs.
"""

from .attention import checked
from .exchange import Parts, to_heads, to_sequence
from .kernels import sum_dtype
from .masks import Mask, Rule, positions
from .refusals import refuse
from .traffic import sent
from .wrappers import ContextParallel, wrap

__all__ = [
    "ContextParallel",
    "Mask",
    "Parts",
    "Rule",
    "checked",
    "positions",
    "refuse",
    "sent",
    "sum_dtype",
    "to_heads",
    "to_sequence",
    "wrap",
]
