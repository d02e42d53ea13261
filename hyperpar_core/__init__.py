"""hyperpar: tensor, sequence, context and expert parallelism for Hugging Face style models, proven equal to one process.

    from hyperpar_core import apply_plan, build_plan, make_mesh

    mesh = make_mesh(dp=2, tp=2)
    plan = build_plan(model, mesh)
    applied = apply_plan(model, plan, mesh)
    batch = applied.shard_batch({"input_ids": ids, "labels": labels})
    model(**batch).loss.backward()
"""

from .applied import Applied, apply_plan
from .apply.check import CheckReport, check_plan
from .apply.checks import Checks
from .apply.expert_mesh import build_expert_mesh
from .apply.generated import original_forward
from .apply.meshes import make_mesh
from .descriptors import API_VERSION
from .hookspecs import hookimpl
from .plan.build import LossSpec, build_plan, suggest_overrides
from .plan.overrides import Override, Overrides
from .plan.sharding_plan import ShardingPlan
from .plugins import plugin_report
from .train.bare import meta_model
from .train.seeds import set_seed
from .view.diff import diff
from .view.explain import explain

__version__ = "0.1.0"

__all__ = [
    "API_VERSION",
    "Applied",
    "CheckReport",
    "Checks",
    "LossSpec",
    "Override",
    "Overrides",
    "ShardingPlan",
    "apply_plan",
    "build_expert_mesh",
    "build_plan",
    "check_plan",
    "diff",
    "explain",
    "hookimpl",
    "make_mesh",
    "meta_model",
    "original_forward",
    "plugin_report",
    "set_seed",
    "suggest_overrides",
]
