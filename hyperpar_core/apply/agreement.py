"""One verdict for all ranks: what each rank is about to apply is compared through the store, before any collective.

A rank posts its record, or its refusal, and reads the others' as they come. Arrival may take as long as the process group waits;
once a refusal or a mismatch is posted, every rank that reads it raises at once.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import DeviceMesh

from ..errors import RankMismatch

__all__ = ["agree"]

_POLL = 0.02
_REMEDIES = {
    "weights": '.\n  Seed all ranks alike before the model is built (set_seed), or apply_plan(..., weights="broadcast"): rank 0\'s.'
}
_rounds: dict[tuple[int, ...], int] = {}


def _compare(mine: Mapping[str, Any], theirs: Mapping[str, Any], rank: int, other: int) -> str | None:
    """What differs between two records, in one sentence; None when they are equal."""
    for key, value in mine.items():
        if theirs.get(key) == value:
            continue
        if isinstance(value, Mapping) and isinstance(theirs.get(key), Mapping):
            names = [n for n in sorted({*value, *theirs[key]}) if value.get(n) != theirs[key].get(n)]
            shown = "; ".join(
                f"{n}: {value.get(n, 'missing')} on rank {rank}, {theirs[key].get(n, 'missing')} on rank {other}"
                for n in names[:3]
            )
            return f"{key} differ in {len(names)}: {shown}{'; ...' if len(names) > 3 else ''}{_REMEDIES.get(key, '')}"
        return f"{key}: {value} on rank {rank}, {theirs.get(key)} on rank {other}"
    return None


def agree(mesh: DeviceMesh, record: Mapping[str, Any], error: Exception | None = None) -> None:
    """Posts `record`, or `error`, for this rank, and waits for the records of all ranks of `mesh`. Every rank of the mesh calls it.

    Raises `error` itself on the rank that has one; RankMismatch on the others when a rank refused, when records differ (naming the
    ranks and the first difference), or when a rank didn't come within the process group's timeout.
    """
    ranks = tuple(sorted(mesh.mesh.flatten().tolist()))
    if len(ranks) == 1 or not dist.is_initialized():
        if error is not None:
            raise error
        return
    rank = dist.get_rank()
    store = c10d._get_default_store()
    turn = _rounds[ranks] = _rounds.get(ranks, 0) + 1
    prefix = f"hyperpar/{zlib.crc32(repr(ranks).encode()):08x}-{len(ranks)}/{turn}"
    mine = json.loads(json.dumps(dict(record)))
    posted = {"error": f"{type(error).__name__}: {error}"} if error is not None else {"record": mine}
    store.set(f"{prefix}/{rank}", json.dumps(posted))
    if error is not None:
        raise error
    waiting = [r for r in ranks if r != rank]
    records: dict[int, Mapping[str, Any]] = {rank: mine}
    deadline = time.monotonic() + _timeout()
    while waiting:
        for other in [r for r in waiting if store.check([f"{prefix}/{r}"])]:
            waiting.remove(other)
            theirs = json.loads(store.get(f"{prefix}/{other}"))
            if "error" in theirs:
                raise RankMismatch(
                    f"rank {other} refused, so rank {rank} stops too. Rank {other} says:\n  {theirs['error']}"
                )
            for known, values in records.items():
                difference = _compare(values, theirs["record"], known, other)
                if difference is not None:
                    raise RankMismatch(
                        f"ranks {known} and {other} are about to apply different things.\n  {difference}"
                    )
            records[other] = theirs["record"]
        if waiting:
            if time.monotonic() > deadline:
                raise RankMismatch(
                    f"ranks {', '.join(map(str, waiting[:8]))} didn't reach apply_plan within {_timeout():.0f} s."
                )
            time.sleep(_POLL)


def _timeout() -> float:
    """Seconds that the job's process group waits."""
    options = (
        c10d._get_default_group()._get_backend(torch.device("cpu" if dist.get_backend() == "gloo" else "cuda")).options
    )
    return float(getattr(options, "_timeout", c10d.default_pg_timeout).total_seconds())
