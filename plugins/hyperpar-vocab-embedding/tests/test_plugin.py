import inspect
from importlib.metadata import entry_points

import pluggy
from hyperpar_vocab_embedding import plugin

from hyperpar_core import hookspecs
from hyperpar_core.descriptors import CONTEXT_NAMES


def test_the_plugin_implements_known_hooks_only_and_offers_the_embedding_and_the_loss():
    manager = pluggy.PluginManager(hookspecs.PROJECT)
    manager.add_hookspecs(hookspecs)
    manager.register(plugin)
    manager.check_pending()
    (compute,) = manager.hook.hyperpar_local_compute_factories()[0]
    (loss,) = manager.hook.hyperpar_losses()[0]
    assert (compute.name, compute.expects, compute.needs_axis) == (
        "vocab_parallel_embedding",
        ("weight", "num_embeddings"),
        "tp",
    )
    assert (loss.name, loss.needs_axis) == ("vocab_parallel_cross_entropy", "tp")
    assert manager.hook.hyperpar_plugin_info()[0].api == "1.1"


def test_factories_ask_for_context_by_name_and_the_loss_has_one_option():
    (compute,), (loss,) = plugin.hyperpar_local_compute_factories(), plugin.hyperpar_losses()
    assert set(inspect.signature(compute.factory).parameters) <= CONTEXT_NAMES
    assert set(inspect.signature(loss.factory).parameters) - CONTEXT_NAMES == {"label_smoothing"}


def test_the_entry_point_leads_to_the_plugin():
    (entry,) = entry_points(group="hyperpar", name="vocab_embedding")
    assert entry.load() is plugin
