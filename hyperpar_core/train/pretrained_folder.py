"""A Hugging Face folder written a few tensors at a time: transformers' names and conversions, files of a bounded size, an index."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from ..errors import CheckpointError

__all__ = ["Reversal", "ShardWriter", "parse_size"]

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}


def parse_size(size: int | str) -> int:
    """Bytes, of a number or of a text such as "5GB"."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMGT]?B)\s*", size.upper()) if isinstance(size, str) else None
    bytes_ = int(float(found[1]) * _UNITS[found[2]]) if found else size
    if not isinstance(bytes_, int) or isinstance(bytes_, bool) or bytes_ < 1:
        raise CheckpointError(f"max_shard_size={size!r}; a number of bytes, or a text such as '5GB'.")
    return bytes_


class Reversal:
    """How a model's tensors go back to the names and forms of its checkpoints, group by group.

    The same as transformers' revert_weight_conversion, which takes all tensors at once. `bare`: the model on the meta device.
    """

    def __init__(self, bare: Any, names: Iterable[str], original_format: bool) -> None:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import PrefixChange, WeightConverter, WeightRenaming, dot_natural_key

        self.bare = bare
        transforms: Any = []
        if original_format:
            transforms = getattr(bare, "_weight_conversions", None)
            if transforms is None:
                known = get_model_conversion_mapping(bare, add_legacy=False)
                transforms = [t for t in known if not isinstance(t, PrefixChange)]
        back = [t.reverse_transform() for t in transforms[::-1]]
        self._renamings = [t for t in back if isinstance(t, WeightRenaming)]
        self._converters = [t for t in back if isinstance(t, WeightConverter)]
        self._names = sorted(names, key=dot_natural_key)

    def groups(self) -> Iterator[tuple[list[str], Any]]:
        """(names of tensors that are converted together, what `convert` needs), in the checkpoint's order."""
        from transformers.core_model_loading import apply_converters, apply_renamings

        by_pattern = {pattern: c for c in self._converters for pattern in c.source_patterns}
        found: dict[str, tuple[list[str], Any]] = {}
        for name in self._names:
            renamed, pattern = apply_converters(name, self._converters)
            if pattern is None:
                renamed = apply_renamings(name, self._renamings)
                if renamed in found:
                    raise CheckpointError(f"{name} and {found[renamed][0][0]} would both be saved as {renamed}.")
                found[renamed] = ([name], renamed)
                continue
            if renamed not in found:
                found[renamed] = ([], (renamed, copy.deepcopy(by_pattern[pattern]), []))
            names, how = found[renamed]
            names.append(name)
            how[2].append((renamed, name, pattern))
        yield from found.values()

    def convert(self, how: Any, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """{name in the checkpoint: tensor} of one group's {name: whole tensor}."""
        from transformers.core_model_loading import apply_renamings

        if isinstance(how, str):
            return {how: next(iter(values.values()))}
        first, step, members = how
        for renamed, name, pattern in members:
            step.add_tensor(renamed, name, pattern, values[name])
        made = step.convert(first, model=self.bare, config=self.bare.config)
        return {
            apply_renamings(name, self._renamings): value[0] if isinstance(value, list) else value
            for name, value in made.items()
        }


class ShardWriter:
    """Writes tensors into files of at most `limit` bytes each (one larger tensor has a file of its own). Used by one process."""

    def __init__(self, folder: Path, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self._held: dict[str, Tensor] = {}
        self._files: list[list[str]] = []
        self._bytes = self._parameters = self._total = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes tensors on the host; writes a file when the next would be too large."""
        for name, tensor in tensors.items():
            if self._held and self._bytes + tensor.nbytes > self.limit:
                self._flush()
            self._held[name] = tensor.contiguous()
            self._bytes += tensor.nbytes
            self._total += tensor.nbytes
            self._parameters += tensor.numel()

    def _part(self, number: int) -> Path:
        return self.folder / f".part-{number:05d}"

    def _flush(self) -> None:
        from safetensors.torch import save_file

        self.folder.mkdir(parents=True, exist_ok=True)
        # of its own memory each: pieces of one larger tensor share it
        save_file({n: t.clone() if t.untyped_storage().nbytes() != t.nbytes else t for n, t in self._held.items()},
                  self._part(len(self._files)), metadata={"format": "pt"})  # fmt: skip
        self._files.append(list(self._held))
        self._held.clear()
        self._bytes = 0

    def finish(self, bare: Any) -> None:
        """Writes what is left, the index where there are several files, and, as transformers does, config and generation config."""
        self._flush()
        bare.save_pretrained(self.folder, state_dict={})  # all but the weights; clears an earlier save's numbered files
        single, index = self.folder / "model.safetensors", self.folder / "model.safetensors.index.json"
        count = len(self._files)
        (index if count == 1 else single).unlink(missing_ok=True)  # an earlier save's, which a reader would take
        if count == 1:
            self._part(0).replace(single)
            return
        weight_map = {}
        for number, names in enumerate(self._files):
            file = f"model-{number + 1:05d}-of-{count:05d}.safetensors"
            self._part(number).replace(self.folder / file)
            weight_map.update(dict.fromkeys(names, file))
        said = {"total_parameters": self._parameters, "total_size": self._total}
        index.write_text(json.dumps({"metadata": said, "weight_map": weight_map}, indent=2, sort_keys=True) + "\n")
