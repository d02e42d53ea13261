"""Pairs of axes together compute what one process computes; `make parity` has every product."""

import pytest
from products import ON_EIGHT, Product, compared, products

from hyperpar_core.testing import pool

PAIRS = [
    Product("llama", dp=2, cp=2), Product("llama", cp=2, tp=2), Product("olmoe", dp=2, tp=2),
    Product("qwen3_moe", dp=2, tp=2, ep=2), Product("qwen3_moe", cp=2, tp=2, ep=4), Product("olmoe", dp=2, cp=2, ep=2),
]  # fmt: skip


@pytest.mark.parametrize("job", PAIRS, ids=Product.text)
def test_two_axes_together_compute_what_one_process_computes_over_three_steps(job):
    assert pool(4).run(compared, job, timeout=100) == [""] * 4


def test_the_grid_has_every_product_of_four_axes_on_four_ranks():
    jobs = products(4)
    assert len(jobs) == len(set(jobs)) == 6 + 2 * 6 * 3
    assert all(job.ranks == 4 for job in jobs) and all(job.ranks == 8 for job in ON_EIGHT)
    assert set(PAIRS) <= set(jobs)
