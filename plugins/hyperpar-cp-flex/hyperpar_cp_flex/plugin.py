"""What this distribution offers to hyperpar."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

from hyperpar_core import hookimpl
from hyperpar_core.descriptors import InnerWrapper, PluginInfo

__all__ = ["hyperpar_inner_wrappers", "hyperpar_plugin_info"]

_FORMS = {
    "all_gather": "FlexAttention on gathered keys and values; gradients are scattered",
    "ulysses": "FlexAttention on exchanged heads; cp must divide the heads",
}
_STYLES: tuple[Literal["hf"], Literal["qkv"]] = ("hf", "qkv")


def _factory(form: str, style: str) -> Callable[..., Callable[..., Any]]:
    """The factory of one wrapper. It imports what it needs when it runs: transformers is slow to load."""

    def factory(*, target_module: Any, model: Any, fqn: str, cp_mesh: Any, kernel: str = "auto") -> Callable[..., Any]:
        from hyperpar_cp_sdpa.extend import wrap

        from .attention import FlexContextParallel

        where = {"target_module": target_module, "model": model, "fqn": fqn, "cp_mesh": cp_mesh}
        return wrap(form, style, kernel, None, **where, kind=FlexContextParallel)

    return factory


def _check(form: str, style: str) -> Callable[..., None]:
    """What refuses a module when the plan is made."""

    def check(*, target_module: Any, model: Any, fqn: str, contract: Any, sizes: Any, kernel: str) -> None:
        from hyperpar_cp_sdpa.extend import refuse

        from .attention import KERNELS

        refuse(form, style, kernel, KERNELS, None, target_module=target_module, model=model, fqn=fqn, contract=contract, sizes=sizes)

    return check


def _sent(form: str) -> Callable[..., list[tuple[str, str, int]] | None]:
    """What a plan counts: as hyperpar-cp-sdpa sends it, but gathered keys and values stay until the backward."""

    def sent(**known: Any) -> list[tuple[str, str, int]] | None:
        from hyperpar_cp_sdpa.extend import sent

        moved = sent(form, **known)
        return None if moved is None else [one for one in moved if one[:2] != ("backward", "all_gather")]

    return sent


@hookimpl
def hyperpar_plugin_info() -> PluginInfo:
    return PluginInfo(api="1.1", requires=("torch>=2.13,<2.14", "transformers>=5.24,<5.25"))


@hookimpl
def hyperpar_inner_wrappers() -> list[InnerWrapper]:
    return [
        InnerWrapper(
            f"flex_{style}" if form == "all_gather" else f"flex_{style}_{form}",
            factory=_factory(form, style),
            forward_style=style,
            needs_axis="cp",
            region_dispatch=False,
            summary=summary,
            check=_check(form, style),
            traffic=_sent(form),
        )
        for style in _STYLES
        for form, summary in _FORMS.items()
    ]
