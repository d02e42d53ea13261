"""A pool of rank processes: run a function on every rank of a live gloo process group, again and again.

    from hyperpar_core.testing import pool
    results = pool(2).run(function, 3, timeout=30, key="value")      # [function(3, key="value") of rank 0, of rank 1]

Ranks are forked from one server process that has imported torch and transformers once, and serve every later run in a
few milliseconds. The function is found by name (a function at the top of a module, also of a test file or a script);
arguments and results are pickled. After each run a rank restores what the function changed in os.environ, the default
dtype and the seed. Process groups stay, since meshes are shared between runs; when a run leaves too many, the next one
gets a new job.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import gc
import importlib
import importlib.util
import multiprocessing
import os
import pickle
import queue
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any, cast

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

__all__ = ["RankFailure", "RankPool", "close_pools", "locate", "pool"]

GROUP_TIMEOUT = 60.0  # seconds a collective waits for the other ranks
START_TIMEOUT = 180.0  # seconds for a rank to import torch and transformers
GRACE = 3.0  # seconds the other ranks get to finish once one has failed
STDERR_LINES = 20
MAX_GROUPS = 48  # process groups that may pile up in a rank; each has threads and sockets
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_OFFLINE": "1",  # a test never asks the network
}

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch.distributed.tensor", "transformers", "hyperpar_core.testing"])


class RankFailure(RuntimeError):
    """A run failed. The text holds, rank by rank, a traceback, or the stack of a rank that was stuck.

    `reports`: {rank: text} of the ranks that failed or were stuck.
    `exceptions`: {rank: exception}, of those that can be pickled.
    """

    def __init__(self, summary: str, reports: dict[int, str], exceptions: dict[int, BaseException]) -> None:
        self.summary, self.reports, self.exceptions = summary, reports, exceptions
        alike: dict[str, list[int]] = {}
        for rank, text in sorted(reports.items()):
            alike.setdefault(text.rstrip(), []).append(rank)
        parts = [f"---- rank {', '.join(map(str, ranks))}: {text}" for text, ranks in alike.items()]
        super().__init__("\n".join([summary, *parts]))


@dataclass(frozen=True)
class _Job:
    """One run, as it travels to a rank. A new `generation` asks for a fresh process group."""

    generation: int
    path: list[str]
    module: str
    file: str | None
    name: str
    arguments: bytes


class RankPool:
    """`world_size` rank processes in one process group: started at first use, and again after a run got stuck."""

    def __init__(self, world_size: int, backend: str = "gloo", grace: float = GRACE) -> None:
        self.world_size, self.backend, self.grace = world_size, backend, grace
        self._processes: list[ForkServerProcess] = []
        self._connections: list[Connection] = []
        self._folder: Path | None = None
        self._store: TCPStore | None = None
        self._generation = 0
        self._seen: list[int] = []  # how much each rank had printed before this run

    def __repr__(self) -> str:
        return f"RankPool({self.world_size}, {self.backend!r})"

    @property
    def pids(self) -> list[int]:
        """The processes of the ranks, in order; empty before the first run."""
        return [process.pid or 0 for process in self._processes]

    def run(self, fn: Callable[..., Any], *args: Any, timeout: float = 60.0, **kwargs: Any) -> list[Any]:
        """Calls `fn(*args, **kwargs)` on every rank and returns the results in the order of the ranks.

        Raises RankFailure with every rank's traceback if one raises, dies, or isn't done within `timeout` seconds, or
        `grace` seconds after another has failed. Ranks that hang are shown with their stacks; then the processes are
        killed, and the next run starts new ones.
        """
        module, file, name = _reference(fn)
        arguments = pickle.dumps((args, kwargs))
        self.start()
        job = pickle.dumps(_Job(self._generation, sys.path, module, file, name, arguments))
        self._seen = [self._file(rank, "stderr").stat().st_size for rank in range(self.world_size)]
        try:
            replies, died = self._exchange(job, timeout)
        except BaseException:  # such as KeyboardInterrupt: the ranks are in an unknown state
            self.close()
            raise
        missing = [rank for rank in range(self.world_size) if rank not in replies and rank not in died]
        reports = {rank: f"{reply[1]}{self._stderr(rank)}" for rank, reply in replies.items() if not reply[0]}
        exceptions = {r: reply[2] for r, reply in replies.items() if not reply[0] and reply[2] is not None}
        if not (died or missing or reports):
            if any(not 0 < reply[2] <= MAX_GROUPS for reply in replies.values()):  # 0: the function ended the job
                self._generation += 1
            return [pickle.loads(replies[rank][1]) for rank in range(self.world_size)]
        where = f"{module}.{name} on {self.world_size} ranks"
        for rank in died:
            self._processes[rank].join(10)
            reports[rank] = f"died with exit code {self._processes[rank].exitcode}{self._stderr(rank)}"
        summary = f"{where}: failed on ranks {sorted(reports)}"
        if missing:
            late = f"{self.grace:g} s after ranks {sorted(reports)} had failed" if reports else f"after {timeout:g} s"
            summary = f"{where}: ranks {missing} were still running {late}"
            for rank, stack in self._stacks(missing).items():
                reports[rank] = f"was stuck here:\n{stack}{self._stderr(rank)}"
        if missing or died:
            self.close()
        self._generation += 1  # collectives may be half done: the next run gets a new process group
        raise RankFailure(summary, reports, exceptions)

    def close(self) -> None:
        """Ends the rank processes (these only, by their ids). A later run starts new ones."""
        for connection in self._connections:
            connection.close()
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        if self._folder:
            shutil.rmtree(self._folder, ignore_errors=True)
        self._processes, self._connections, self._folder, self._store = [], [], None, None

    # ---- the parent's side

    def start(self) -> None:
        """Starts the ranks, unless they live; `run` does it by itself."""
        if self._processes and all(process.is_alive() for process in self._processes):
            return
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="hyperpar-ranks-"))
        self._seen = [0] * self.world_size
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with _quiet_start():
            for rank in range(self.world_size):
                self._spawn(rank, self._store.port)
        replies, died = self._exchange(None, START_TIMEOUT)
        if died or len(replies) < self.world_size:
            missing = [rank for rank in range(self.world_size) if rank not in replies]
            reports = {rank: f"didn't start{self._stderr(rank)}" for rank in missing}
            self.close()
            raise RankFailure(f"ranks {missing} of {self.world_size} didn't start", reports, {})

    def _spawn(self, rank: int, port: int) -> None:
        ours, theirs = _context.Pipe()
        environment = {
            **os.environ,
            **ENVIRONMENT,
            **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(self.world_size)},
            **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)},
        }
        for kind in ("stderr", "stack"):
            self._file(rank, kind).touch()
        files = str(self._file(rank, "stderr")), str(self._file(rank, "stack"))
        process = _context.Process(target=_serve, args=(theirs, rank, self.world_size, self.backend, environment, *files))
        process.start()
        theirs.close()
        self._processes.append(process)
        self._connections.append(ours)

    def _exchange(self, job: bytes | None, timeout: float) -> tuple[dict[int, Any], list[int]]:
        """Sends `job` to every rank and collects {rank: reply} and the ranks that died, until all did or time is up."""
        replies: dict[int, Any] = {}
        died: list[int] = []
        if job is not None:
            for rank, connection in enumerate(self._connections):
                try:
                    connection.send_bytes(job)
                except OSError:
                    died.append(rank)
        waiting = {c: rank for rank, c in enumerate(self._connections) if rank not in died}
        deadline = time.monotonic() + timeout
        while waiting and (left := deadline - time.monotonic()) > 0:
            for ready in wait(list(waiting), left):
                connection = cast(Connection, ready)
                rank = waiting.pop(connection)
                try:
                    replies[rank] = pickle.loads(connection.recv_bytes())
                except (EOFError, OSError):
                    died.append(rank)
                    failed = True
                else:
                    failed = not replies[rank][0]
                if failed:
                    deadline = min(deadline, time.monotonic() + self.grace)
        return replies, died

    def _file(self, rank: int, kind: str) -> Path:
        assert self._folder
        return self._folder / f"rank{rank}.{kind}"

    def _stderr(self, rank: int) -> str:
        printed = self._file(rank, "stderr").read_bytes()[self._seen[rank] :].decode(errors="replace")
        lines = printed.rstrip().splitlines()[-STDERR_LINES:]
        return "\n  the last lines of its output:\n" + "\n".join(f"  | {line}" for line in lines) if lines else ""

    def _stacks(self, ranks: list[int]) -> dict[int, str]:
        """Asks each rank's faulthandler where it is, which works while a rank waits inside a collective."""
        for rank in ranks:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pids[rank], signal.SIGUSR1)
        deadline = time.monotonic() + 2
        while time.monotonic() < deadline and not all(self._file(rank, "stack").stat().st_size for rank in ranks):
            time.sleep(0.02)
        time.sleep(0.05)
        return {rank: self._file(rank, "stack").read_text() or "(no stack: it didn't answer)" for rank in ranks}


_pools: dict[tuple[int, str], RankPool] = {}


def pool(world_size: int, backend: str = "gloo") -> RankPool:
    """The pool of `world_size` ranks that everyone in this process shares; closed at exit."""
    if (world_size, backend) not in _pools:
        _pools[world_size, backend] = RankPool(world_size, backend)
    return _pools[world_size, backend]


@atexit.register
def close_pools() -> None:
    """Ends the processes of every shared pool."""
    for shared in _pools.values():
        shared.close()


@contextlib.contextmanager
def _quiet_start() -> Iterator[None]:
    """Around the start of ranks: the server's environment has one thread, and no rank runs a script's main part again.

    A rank finds a script's functions by itself (see `locate`), so it isn't told of the main module.
    """
    main, before = sys.modules["__main__"], dict(os.environ)
    sys.modules["__main__"] = ModuleType("__main__")
    os.environ.update(ENVIRONMENT)
    try:
        yield
    finally:
        sys.modules["__main__"] = main
        os.environ.clear()
        os.environ.update(before)


def _reference(fn: Callable[..., Any]) -> tuple[str, str | None, str]:
    """(module, file, name) of a function, for a rank to find it by."""
    if not isinstance(fn, FunctionType) or "<" in fn.__qualname__:
        raise TypeError(f"{fn!r} can't run on ranks: it must be a function at the top of a module.")
    module = sys.modules[fn.__module__]
    return fn.__module__, getattr(module, "__file__", None), fn.__qualname__


# ---- the rank's side


def _serve(
    connection: Connection,
    rank: int,
    world_size: int,
    backend: str,
    environment: dict[str, str],
    stderr_file: str,
    stack_file: str,
) -> None:
    """The main loop of a rank process."""
    os.setsid()  # Ctrl-C reaches the parent alone
    with open(stderr_file, "ab") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    os.environ.clear()
    os.environ.update(environment)
    faulthandler.register(signal.SIGUSR1, file=open(stack_file, "w"), all_threads=False)  # noqa: SIM115
    jobs: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(connection, jobs), daemon=True).start()
    importlib.import_module("transformers")
    importlib.import_module("torch.distributed.tensor")
    torch.set_num_threads(1)
    _share_gloo_device()
    store = TCPStore("127.0.0.1", int(environment["MASTER_PORT"]), is_master=False)
    gc.freeze()  # what was imported stays; a collection after each run looks at the run's objects alone
    connection.send_bytes(pickle.dumps((True, b"", 0)))
    generation = None
    while True:
        job: _Job = pickle.loads(jobs.get())
        try:
            sys.path[:] = job.path
            if job.generation != generation:
                if dist.is_initialized():
                    dist.destroy_process_group()
                    # torch labels DTensors from a cache in which equal meshes are one: groups that are gone would come back
                    importlib.import_module("torch.distributed.tensor.debug")._clear_sharding_prop_cache()
                prefixed = PrefixStore(str(job.generation), store)
                limit = timedelta(seconds=GROUP_TIMEOUT)
                dist.init_process_group(backend, store=prefixed, rank=rank, world_size=world_size, timeout=limit)
                generation = job.generation
            with _isolated():
                function = locate(job.module, job.file, job.name)
                args, kwargs = pickle.loads(job.arguments)
                result = pickle.dumps(function(*args, **kwargs))
            reply = pickle.dumps((True, result, len(dist.distributed_c10d._world.pg_map)))
        except BaseException as error:
            reply = _failure(error)
        sys.stdout.flush()
        sys.stderr.flush()
        connection.send_bytes(reply)


def _share_gloo_device() -> None:
    """One gloo device, with its one thread, for all process groups of this rank. torch gives each group its own, whose thread wakes up
    every 10 ms: 48 groups cost an idle rank 8% of a core, and the waiting pools of a test run half a machine."""
    if not dist.is_gloo_available():
        return
    group: Any = dist.ProcessGroupGloo
    init, device = group.__init__, group.create_default_device()

    def shared(self: Any, store: Any, rank: int, size: int, timeout: timedelta) -> None:
        options = group._Options()
        options._devices, options._timeout, options._threads = [device], timeout, 2
        init(self, store, rank, size, options)

    group.__init__ = shared


def _read(connection: Connection, jobs: queue.SimpleQueue[bytes]) -> None:
    """Feeds the main loop; ends the process when the parent is gone, whatever the main thread is doing."""
    while True:
        try:
            jobs.put(connection.recv_bytes())
        except (EOFError, OSError):
            os._exit(0)


def _failure(error: BaseException) -> bytes:
    if error.__traceback__ and error.__traceback__.tb_next:
        error.__traceback__ = error.__traceback__.tb_next  # without the main loop's own frame
    text = "".join(traceback.format_exception(error))
    try:
        error.__traceback__ = None
        blob = pickle.dumps((False, text, error))
        pickle.loads(blob)  # an exception with its own constructor may not come back
        return blob
    except Exception:
        return pickle.dumps((False, text, None))


def locate(module: str, file: str | None, name: str) -> Any:
    """The object `name` of a module; one that can't be imported by its name is loaded from its file under that name."""
    known = "__mp_main__" if module == "__main__" else module
    found: Any = sys.modules.get(known)
    if found is None or not _same_file(found, file):
        found = _import(known, file)
    if known == "__mp_main__":
        sys.modules["__main__"] = found
    for part in name.split("."):
        found = getattr(found, part)
    return found


def _import(name: str, file: str | None) -> ModuleType:
    sys.modules.pop(name, None)
    if name != "__mp_main__":
        with contextlib.suppress(ModuleNotFoundError):
            module = importlib.import_module(name)
            if _same_file(module, file):
                return module
    if file is None:
        raise ModuleNotFoundError(f"module {name!r} can't be imported on the ranks")
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def _same_file(module: ModuleType, file: str | None) -> bool:
    return file is None or getattr(module, "__file__", None) == file


@contextlib.contextmanager
def _isolated() -> Iterator[None]:
    """What one run changes in the process is undone after it."""
    environment, dtype = dict(os.environ), torch.get_default_dtype()
    torch.manual_seed(0)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(environment)
        torch.set_default_dtype(dtype)
        torch.set_grad_enabled(True)
        torch.set_num_threads(1)
        gc.collect()
