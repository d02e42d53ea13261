"""The suite of special handlers: sections that add up, cut rightly over tp, and come back as the original's bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from torch import nn
from torch.distributed.tensor import Replicate, Shard

from ...descriptors import SpecialHandler
from ...placement import format_placement
from ..verify import Degrees
from ..zoo import jitter, tiny_model
from .suite import Conformance

__all__ = ["SpecialHandlerConformance"]


class SpecialHandlerConformance(Conformance):
    """The suite of a SpecialHandler.

    `block` makes a module [batch, sequence, hidden] -> the same that holds the packed parameter; it stands in for the MLPs of a tiny
    model. For a parameter that needs more around it (attention), give `model` and `entries` instead.

    packed     the packed parameter's name in the block
    rowwise    the weights that join what was cut: their columns are cut, and the block yields summands
    argument   the name of the block's input
    """

    kind: ClassVar[type] = SpecialHandler
    packed: str
    rowwise: Sequence[str] = ()
    argument: str = "x"

    def block(self, hidden: int) -> nn.Module:
        raise NotImplementedError("make the module that holds the packed parameter, or give model() and entries()")

    def model(self) -> Any:
        model = tiny_model("llama")
        for layer in model.model.layers:
            layer.mlp = self.block(model.config.hidden_size)
            jitter(layer.mlp)
        return model.train()

    def default_degrees(self) -> Sequence[Degrees]:
        plain = {"sequence_parallel": False}
        return Degrees(tp=2, options=plain), Degrees(tp=4, options=plain), Degrees(dp=2, tp=2, options=plain)

    def packed_parameters(self, model: nn.Module) -> list[tuple[nn.Module, str, nn.Parameter]]:
        """(the module that owns it, its name there, itself) of every parameter that the handler cuts."""
        found = []
        for name, parameter in model.named_parameters():
            if name == self.packed or name.endswith(f".{self.packed}"):
                owner, _, leaf = name.rpartition(".")
                found.append((model.get_submodule(owner), leaf, parameter))
        return found

    def entries(self, model: Any, degrees: Degrees, options: Mapping[str, Any]) -> list[dict[str, Any]]:
        x, entries = self.argument, []
        for name, module in model.named_modules():
            if not name.endswith(".mlp"):
                continue
            params: dict[str, Any] = {own: {} for own, _ in module.named_parameters()}
            params.update({own: {"tp": "shard(1)"} for own in self.rowwise})
            owner, _, leaf = self.packed.rpartition(".")
            sections = self._sections(module.get_submodule(owner), leaf, module.get_parameter(self.packed), model)
            cut = [one.placement for one in sections if isinstance(one.placement, Shard)]
            params[self.packed] = {"tp": format_placement(cut[0] if cut else Replicate())}
            entries.append({
                "match": name, "params": params, "special_handlers": {self.packed: self.name},
                "in_src": {x: {}}, "in_dst": {x: {}}, "in_grad": {x: {"tp": "partial"}},
                "out_src": {"output": {"tp": "partial"}}, "out_dst": {"output": {}},
            })  # fmt: skip
        return entries

    def _sections(self, owner: nn.Module, leaf: str, parameter: nn.Parameter, model: Any) -> Any:
        config = getattr(model, "config", None)
        return self.descriptor().sections(tuple(parameter.shape), module=owner, param_name=leaf, config=config)

    def test_its_sections_fill_one_dim_in_order_under_names_of_their_own(self) -> None:
        model = self.model()
        parameters = self.packed_parameters(model)
        assert parameters, f"the model has no parameter {self.packed!r}"
        for owner, leaf, parameter in parameters:
            sections = self._sections(owner, leaf, parameter, model)
            assert sections and all(section.size > 0 for section in sections), sections
            dims, names = {section.dim for section in sections}, [section.name for section in sections]
            assert len(dims) == 1 and min(dims) >= 0, f"sections along several dims, or a negative one: {sections}"
            assert len(set(names)) == len(names) and all(name.isidentifier() for name in names), names
            assert sum(section.size for section in sections) == parameter.shape[min(dims)], sections
            odd = [s for s in sections if s.placement not in (Replicate(), Shard(s.dim))]
            assert not odd, f"a section is cut along its own dim or replicated: {odd}"
