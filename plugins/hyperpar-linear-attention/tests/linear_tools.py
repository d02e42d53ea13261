"""What the tests here run on ranks."""

from typing import Any

import torch

from hyperpar_core import apply_plan, build_plan, make_mesh, suggest_overrides
from hyperpar_core.testing import check_parity, pool, tiny_batch, tiny_model
from hyperpar_core.testing.verify import Degrees


def model(family: str, dtype: torch.dtype = torch.float32, **config: Any) -> Any:
    return tiny_model(family, dtype, **config)


def on_ranks(family: str, sizes: dict[str, int], dtype: torch.dtype, config: dict[str, Any], options: dict[str, Any]) -> Any:
    made = model(family, dtype, **config)
    degrees = {axis: size for axis, size in sizes.items() if axis != "ep"}
    overrides = suggest_overrides(made, make_mesh(**degrees), ep_size=sizes.get("ep", 1))
    batch = tiny_batch(made, batch=2 * sizes.get("dp", 1), seq=options.pop("seq", 32))
    if options.pop("padded", False):
        mask = torch.ones_like(batch["input_ids"])
        mask[0, :5] = 0
        batch["attention_mask"] = mask
        batch["labels"] = batch["input_ids"].masked_fill(mask == 0, -100)
    return check_parity(made, batch, Degrees(**sizes, options={"overrides": overrides, **options}), steps=3)


def assert_equal(
    family: str, sizes: dict[str, int], *, dtype: torch.dtype = torch.float32, config: dict[str, Any] | None = None, **options: Any
) -> None:
    ranks = sizes.get("dp", 1) * sizes.get("tp", 1)
    reports = pool(ranks).run(on_ranks, family, sizes, dtype, config or {}, options)
    for report in reports:
        assert report.ok, report.text()


def planned(family: str, sizes: dict[str, int], **config: Any) -> Any:
    return build_plan(model(family, **config), sizes)


def applied_on_ranks(family: str, tp: int, **config: Any) -> tuple[Any, Any]:
    made = model(family, **config)
    mesh = make_mesh(tp=tp)
    return made, apply_plan(made, build_plan(made, mesh), mesh)
