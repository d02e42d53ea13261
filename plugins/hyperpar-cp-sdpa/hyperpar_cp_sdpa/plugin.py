"""What this distribution offers to hyperpar."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import InnerWrapper, PluginInfo

from .traffic import sent

__all__ = ["hyperpar_inner_wrappers", "hyperpar_plugin_info"]

_FORMS = {
    "all_gather": "gathers keys and values, scatters their gradients",
    "ring": "keys and values travel along a ring, hidden behind the compute",
    "ulysses": "exchanges heads for tokens; the degree must divide the heads",
    "hybrid": "Ulysses between neighbours, a ring of the groups; option ulysses_degree",
}
_STYLES: tuple[Literal["hf"], Literal["qkv"]] = ("hf", "qkv")


def _factory(form: str, style: str) -> Callable[..., Callable[..., Any]]:
    """The factory of one wrapper. It imports what it needs when it runs: transformers is slow to load."""

    def factory(*, target_module: Any, model: Any, fqn: str, cp_mesh: Any, kernel: str = "auto") -> Callable[..., Any]:
        from .wrappers import wrap

        return wrap(form, style, kernel, None, target_module=target_module, model=model, fqn=fqn, cp_mesh=cp_mesh)

    def hybrid(
        *, target_module: Any, model: Any, fqn: str, cp_mesh: Any, kernel: str = "auto", ulysses_degree: int = 2
    ) -> Callable[..., Any]:
        from .wrappers import wrap

        return wrap(form, style, kernel, ulysses_degree, target_module=target_module, model=model, fqn=fqn, cp_mesh=cp_mesh)

    return hybrid if form == "hybrid" else factory


def _check(form: str, style: str) -> Callable[..., None]:
    """What refuses a module when the plan is made."""

    def check(*, target_module: Any, model: Any, fqn: str, contract: Any, sizes: Any, kernel: str) -> None:
        from .kernels import KERNELS
        from .refusals import refuse

        refuse(form, style, kernel, KERNELS, None, target_module=target_module, model=model, fqn=fqn, contract=contract, sizes=sizes)

    def hybrid(
        *, target_module: Any, model: Any, fqn: str, contract: Any, sizes: Any, kernel: str, ulysses_degree: int
    ) -> None:
        from .kernels import KERNELS
        from .refusals import refuse

        where = {"target_module": target_module, "model": model, "fqn": fqn, "contract": contract, "sizes": sizes}
        refuse(form, style, kernel, KERNELS, ulysses_degree, **where)

    return hybrid if form == "hybrid" else check


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_inner_wrappers() -> list[InnerWrapper]:
    return [
        InnerWrapper(
            f"sdpa_{style}" if form == "all_gather" else f"sdpa_{style}_{form}",
            factory=_factory(form, style),
            forward_style=style,
            needs_axis="cp",
            region_dispatch=False,
            summary=summary,
            check=_check(form, style),
            traffic=partial(sent, form),
        )
        for style in _STYLES
        for form, summary in _FORMS.items()
    ]
