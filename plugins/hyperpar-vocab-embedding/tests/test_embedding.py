"""The compute has no communication: one process plays every rank in turn, and its sum is the boundary's all-reduce."""

import copy
import pickle
from types import SimpleNamespace

import pytest
import torch
from hyperpar_vocab_embedding import embedding
from hyperpar_vocab_embedding.embedding import vocab_parallel_embedding
from torch import nn

from hyperpar_core.errors import ApplyError, Refused
from hyperpar_core.placement import shard_size

DIM = 6


@pytest.fixture(autouse=True)
def no_plan(monkeypatch):
    """The modules here belong to no plan: nothing stands in front of their class's own forward."""
    monkeypatch.setattr(embedding, "original_forward", lambda module, *a, **k: type(module).forward(module, *a, **k))


class Scaled(nn.Embedding):
    """The shape of Gemma's and Bart's word embeddings."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.embed_scale = nn.Buffer(torch.tensor(7.5), persistent=False)

    def forward(self, input_ids):
        return super().forward(input_ids) * self.embed_scale.to(self.weight.dtype)


def rank_of(tp, rank):
    return SimpleNamespace(size=lambda: tp, get_local_rank=lambda: rank)


def table(vocab, padding_idx=None, kind=nn.Embedding, dtype=torch.float64):
    torch.manual_seed(1)
    module = kind(vocab, DIM, padding_idx=padding_idx, dtype=dtype)
    with torch.no_grad():
        module.weight.copy_(torch.randn(vocab, DIM, dtype=dtype))  # the padding row too: a lookup reads it
    return module


def shard_of(module, tp, rank):
    """The module as a region sees it: its weight is this rank's rows."""
    length, offset = shard_size(module.num_embeddings, tp, rank)
    local = copy.deepcopy(module)
    local.weight = nn.Parameter(module.weight.detach()[offset : offset + length].clone())
    return local


def run(module, tp, ids, grad):
    """(sum of the ranks' outputs, their weight gradients in order)."""
    total, grads = 0, []
    for rank in range(tp):
        compute = vocab_parallel_embedding(module=module, tp_mesh=rank_of(tp, rank))
        local = shard_of(module, tp, rank)
        out = compute(local, ids)
        out.backward(grad)
        total = total + out.detach()
        grads.append(local.weight.grad)
    return total, torch.cat(grads)


@pytest.mark.parametrize("tp", [2, 4])
@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize(
    ("vocab", "padding_idx"),
    [(99, None), (99, 40), (99, 5), (99, -1), (64, 63), (5, 4), (5, -1), (5, 0), (3, 1)],
)
def test_the_sum_over_ranks_and_every_gradient_are_those_of_one_process(vocab, padding_idx, kind, tp):
    module = table(vocab, padding_idx, kind)
    ids = torch.arange(2 * vocab).reshape(2, -1) % vocab  # every row, twice
    grad = torch.randn(*ids.shape, DIM, dtype=torch.float64)
    out, weight_grad = run(module, tp, ids, grad)
    expected = module(ids)
    expected.backward(grad)
    assert torch.equal(out, expected)
    torch.testing.assert_close(weight_grad, module.weight.grad, rtol=0, atol=1e-12)
    zero_rows = (weight_grad == 0).all(1).nonzero().flatten().tolist()
    assert zero_rows == ([] if padding_idx is None else [padding_idx % vocab])


def test_an_empty_shard_yields_zeros_and_a_gradient_of_its_own_shape():
    module = table(5)
    local = shard_of(module, 4, 3)
    assert local.weight.shape == (0, DIM)
    out = vocab_parallel_embedding(module=module, tp_mesh=rank_of(4, 3))(local, torch.tensor([[0, 4, 2]]))
    out.sum().backward()
    assert torch.equal(out, torch.zeros(1, 3, DIM, dtype=torch.float64))
    assert local.weight.grad.shape == (0, DIM)


def test_rows_of_infinities_and_nan_stay_out_of_other_ranks_outputs_and_gradients():
    module = table(8)
    with torch.no_grad():
        module.weight[0], module.weight[4] = torch.nan, torch.inf
    ids = torch.tensor([[1, 2, 5, 7]])
    grad = torch.ones(1, 4, DIM, dtype=torch.float64)
    out, weight_grad = run(module, 2, ids, grad)
    assert torch.equal(out, module(ids))
    assert weight_grad.isfinite().all()


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32])
@pytest.mark.parametrize("vocab", [99, 5])
def test_an_id_outside_the_vocab_is_the_error_of_one_process_on_every_rank(vocab, dtype, kind):
    module = table(vocab, kind=kind)
    for bad in (vocab, vocab + 1, vocab + 1000, -1, -vocab):
        ids = torch.tensor([[0, bad]], dtype=dtype)
        with pytest.raises(IndexError) as expected:
            module(ids)
        for tp in (2, 4):
            for rank in range(tp):
                compute = vocab_parallel_embedding(module=module, tp_mesh=rank_of(tp, rank))
                with pytest.raises(IndexError) as raised:
                    compute(shard_of(module, tp, rank), ids)
                assert str(raised.value) == str(expected.value) == "index out of range in self"


@pytest.mark.parametrize("vocab", [99, 5])
def test_it_compiles_without_graph_breaks(vocab):
    module = table(vocab, padding_idx=1)
    ids = torch.randint(0, vocab, (2, 7))
    for rank in (1, 3):
        compute = vocab_parallel_embedding(module=module, tp_mesh=rank_of(4, rank))
        eager, compiled = shard_of(module, 4, rank), shard_of(module, 4, rank)
        torch._dynamo.reset()
        out = torch.compile(lambda m, i, f=compute: f(m, i), fullgraph=True, backend="aot_eager")(compiled, ids)
        expected = compute(eager, ids)
        out.sum().backward()
        expected.sum().backward()
        assert torch.equal(out, expected)
        assert torch.equal(compiled.weight.grad, eager.weight.grad)


@pytest.mark.parametrize("kind", [nn.Embedding, Scaled])
def test_the_compute_pickles_and_holds_no_module(kind):
    module = table(9, kind=kind)
    compute = pickle.loads(pickle.dumps(vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 0))))
    local = shard_of(module, 2, 0)
    local.weight.data.fill_(2.0)
    ids = torch.tensor([0, 8])
    assert compute(local, ids)[:, 0].tolist() == [2.0 * (7.5 if kind is Scaled else 1), 0.0]


@pytest.mark.parametrize("option", [{"max_norm": 1.0}, {"scale_grad_by_freq": True}, {"sparse": True}])
def test_options_that_need_the_whole_table_are_refused(option):
    with pytest.raises(Refused, match=f"model.embed: {next(iter(option))}="):
        vocab_parallel_embedding(module=nn.Embedding(8, 4, **option), tp_mesh=rank_of(2, 0), fqn="model.embed")


def test_a_module_that_is_no_embedding_is_refused():
    with pytest.raises(Refused, match=r"needs an nn\.Embedding, not Linear"):
        vocab_parallel_embedding(module=nn.Linear(4, 8), tp_mesh=rank_of(2, 0))


class WithNorm(nn.Embedding):
    def forward(self, input_ids):
        return nn.functional.rms_norm(super().forward(input_ids), (DIM,))


class WithBias(nn.Embedding):
    def forward(self, input_ids):
        return super().forward(input_ids) + 1


class WithDropout(nn.Embedding):
    def forward(self, input_ids):
        return nn.functional.dropout(super().forward(input_ids), 0.5, self.training)


class Squared(nn.Embedding):
    def forward(self, input_ids):
        rows = super().forward(input_ids)
        return rows * rows


class Inverse(nn.Embedding):
    def forward(self, input_ids):
        return 1 / super().forward(input_ids)


class Indexed(nn.Embedding):
    def forward(self, input_ids):
        return self.weight[input_ids]


class Twice(nn.Embedding):
    def forward(self, input_ids):
        return super().forward(super().forward(input_ids).long()[..., 0])


class Constant(nn.Embedding):
    def forward(self, input_ids):
        super().forward(input_ids)
        return torch.ones(1)


class Derived(nn.Embedding):
    def forward(self, input_ids):
        return nn.functional.embedding(input_ids, self.weight.softmax(0))


class Crash(nn.Embedding):
    def forward(self, input_ids, positions):
        return super().forward(input_ids)


class Learned(nn.Embedding):
    def __init__(self, *args):
        super().__init__(*args)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, input_ids):
        return super().forward(input_ids) * self.scale


@pytest.mark.parametrize("mode", ["train", "eval", "meta"])
@pytest.mark.parametrize(
    ("kind", "cause"),
    [
        (WithNorm, "applies '_fused_rms_norm|applies 'pow"),
        (WithBias, "applies 'add'"),
        (WithDropout, "applies '"),
        (Squared, "applies 'mul'"),
        (Inverse, "applies 'reciprocal'"),
        (Indexed, "exactly one F.embedding"),
        (Twice, "applies 'select'|exactly one F.embedding"),
        (Constant, "returns something else"),
        (Derived, "exactly one F.embedding"),
        (Crash, "can't be traced"),
        (Learned, r"parameters besides its table \(scale\)"),
    ],
)
def test_a_forward_that_does_more_than_scale_its_rows_is_refused(kind, cause, mode):
    with torch.device("meta" if mode == "meta" else "cpu"):
        module = kind(8, DIM)
    module.train(mode == "train")
    with pytest.raises(Refused, match=cause) as raised:
        vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 0), fqn="model.embed_tokens")
    assert f"model.embed_tokens: {kind.__name__}" in str(raised.value) or kind is Crash
    assert module.training == (mode == "train")


def test_scaled_embeddings_are_accepted_on_the_meta_device():
    with torch.device("meta"):
        module = Scaled(8, DIM)
    vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 0))


@pytest.mark.parametrize(
    ("family", "name", "scaled"),
    [
        ("gemma3", "Gemma3TextScaledWordEmbedding", True),
        ("bart", "BartScaledWordEmbedding", True),
        ("muse_glimmer", "MuseGlimmerTextNormedEmbedding", False),
    ],
)
def test_transformers_own_word_embeddings_are_scaled_rightly_or_refused(family, name, scaled):
    transformers = pytest.importorskip(f"transformers.models.{family}.modeling_{family}")
    torch.manual_seed(0)
    module = getattr(transformers, name)(9, DIM, 1, 2.5 if scaled else 1e-6)
    if not scaled:
        with pytest.raises(Refused, match=f"{name} applies '"):
            vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 0))
        return
    ids = torch.tensor([[0, 8, 3, 1]])
    grad = torch.randn(1, 4, DIM)
    out, weight_grad = run(module, 2, ids, grad)
    expected = module(ids)
    expected.backward(grad)
    assert torch.equal(out, expected)
    assert torch.equal(weight_grad, module.weight.grad)


class LooksTwiceLater(Scaled):
    again = False

    def forward(self, input_ids):
        if self.again:
            super().forward(input_ids)
        return super().forward(input_ids)


def test_a_lookup_that_did_not_run_exactly_once_is_an_error_that_names_the_class():
    module = table(8, kind=LooksTwiceLater)
    compute = vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 0), fqn="model.embed_tokens")
    local = shard_of(module, 2, 0)
    local.again = True
    with pytest.raises(ApplyError, match=r"embed_tokens: the forward of LooksTwiceLater looked up its table 2 times"):
        compute(local, torch.tensor([1]))


def test_a_weight_that_is_not_this_ranks_shard_is_an_error():
    module = table(9)
    compute = vocab_parallel_embedding(module=module, tp_mesh=rank_of(2, 1))
    with pytest.raises(ApplyError, match="found 9 rows, this rank's shard of 9 has 4"):
        compute(module, torch.tensor([1]))
