"""Every family of the zoo: its folder into a meta model and back, beside plain transformers, in one process.

    python every_folder.py [FAMILY ...]        prints what differs; the exit code is 1 when anything does
"""

from __future__ import annotations

import sys
import tempfile
import warnings
from pathlib import Path

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from hyperpar_core import apply_plan, build_plan, make_mesh, meta_model
from hyperpar_core.errors import HyperparError
from hyperpar_core.testing import families, tiny_model
from hyperpar_core.train.loading import load_pretrained
from hyperpar_core.train.materialise import materialise
from hyperpar_core.train.saving import save_pretrained

NOT_CAUSAL = {"mllama", "emu3"}  # transformers has no causal language model for the config that it saves


def unequal(ours, theirs):
    """Names that only one has, and names of unequal tensors."""
    wrong = sorted(set(ours) ^ set(theirs))
    both = [name for name in ours if name in theirs]
    return wrong + [n for n in both if not (ours[n].dtype == theirs[n].dtype and torch.equal(ours[n], theirs[n]))]


def files(folder):
    return {key: value for file in Path(folder).glob("*.safetensors") for key, value in load_file(file).items()}


def differences(family, mesh, folder):
    tiny_model(family).save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    model = meta_model(folder)
    try:
        apply_plan(model, build_plan(model, mesh), mesh).load_pretrained(folder)
    except HyperparError as error:  # a family that no plan can be made for: its weights alone
        if type(error).__name__ == "CheckpointError":
            raise
        model = meta_model(folder)
        load_pretrained(model, mesh, folder, lambda: materialise(model, torch.device("cpu")))
    wrong = unequal(model.state_dict(), theirs.state_dict())
    wrong += unequal(dict(model.named_buffers()), dict(theirs.named_buffers()))
    save_pretrained(model, f"{folder}/ours", mesh, max_shard_size="100KB")
    theirs.save_pretrained(f"{folder}/theirs")
    return wrong + [f"saved {name}" for name in unequal(files(f"{folder}/ours"), files(f"{folder}/theirs"))]


def main(names):
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    mesh, bad = make_mesh(device_type="cpu"), 0
    names = names or [family for family in families() if family not in NOT_CAUSAL]
    for family in names:
        with tempfile.TemporaryDirectory() as folder:
            try:
                wrong = differences(family, mesh, folder)
            except Exception as error:
                wrong = [f"{type(error).__name__}: {error}"]
        if wrong:
            bad += 1
            print(f"{family}: {len(wrong)} differ: {'; '.join(wrong[:4])}"[:500], flush=True)
    print(f"{len(names) - bad} of {len(names)} families are equal")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
