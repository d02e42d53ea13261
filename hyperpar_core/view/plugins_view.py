"""What `hyperpar plugins` and `hyperpar env` print: texts for people, and the same as data for --json."""

from __future__ import annotations

import io
import os
import platform
import shutil
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed

from ..descriptors import API_VERSION
from ..plugins import plugin_report
from ..plugins.checks import installed_version

__all__ = ["env_report", "env_text", "plugins_text"]

_LIBRARIES = (
    "hyperpar-core", "torch", "transformers", "pluggy", "numpy", "pyyaml", "importlib-metadata", "safetensors",
)  # fmt: skip
_PLUGIN_KEYS = ("name", "distribution", "version", "status", "reason")


def plugins_text(report: Sequence[Mapping[str, Any]], *, width: int | None = None) -> str:
    """A table of `plugin_report()`, one row per plugin, with reasons and notes below. `width`: of the terminal."""
    if not report:
        return "no plugin is installed"
    rows = [
        (
            one["name"],
            f"{one['distribution']} {one['version']}",
            one["status"],
            f"{one['seconds']:.2f} s" if one["status"] in ("loaded", "broken") else "",
            _registers(one),
        )
        for one in report
    ]
    width = width or shutil.get_terminal_size((120, 24)).columns
    table = _table(("plugin", "distribution", "status", "load", "registers"), rows, width)
    remarks = [f"{one['name']}: {one['reason']}" for one in report if one["status"] == "broken"]
    remarks += [f"{one['name']}: {note}" for one in report for note in one["notes"]]
    return "\n".join([table, *([""] if remarks else []), *remarks])


def _registers(one: Mapping[str, Any]) -> str:
    if one["status"] != "loaded":
        return "" if one["status"] == "broken" else str(one["reason"])
    kinds = [f"{kind.replace('_', ' ')}: {', '.join(names)}" for kind, names in one["registers"].items()]
    return "; ".join(kinds) or "nothing"


def _table(header: Sequence[str], rows: Iterable[Sequence[str]], width: int) -> str:
    """Columns that line up: by rich, which wraps the last one; without it, plainly."""
    rows = list(rows)
    try:
        from rich.console import Console
        from rich.table import Table
    except ImportError:
        widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
        cells = (zip(row, widths, strict=True) for row in [header, *rows])
        return "\n".join("  ".join(cell.ljust(wide) for cell, wide in row).rstrip() for row in cells)
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    for column, title in enumerate(header):
        table.add_column(title, no_wrap=column < len(header) - 1, overflow="fold", header_style="")
    for row in rows:
        table.add_row(*row)
    out = io.StringIO()
    Console(file=out, width=width, markup=False, highlight=False, color_system=None).print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def env_report() -> dict[str, Any]:
    """What a report of a fault needs: versions, devices, backends, plugins and HYPERPAR_ variables. JSON-able."""
    cuda = torch.cuda.is_available()
    distributed = torch.distributed.is_available()
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "cpu_count": os.cpu_count(),
        "api": API_VERSION,
        "libraries": {name: installed_version(name) for name in _LIBRARIES},
        "cuda": {
            "available": cuda,
            "version": torch.version.cuda,
            "devices": [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count() if cuda else 0)],
        },
        "backends": {
            "gloo": distributed and torch.distributed.is_gloo_available(),
            "nccl": _nccl_version() if distributed and torch.distributed.is_nccl_available() else False,
        },
        "plugins": [{key: one[key] for key in _PLUGIN_KEYS} for one in plugin_report()],
        "environment": {name: value for name, value in sorted(os.environ.items()) if name.startswith("HYPERPAR_")},
    }


def _nccl_version() -> str | bool:
    try:
        nccl: Any = torch.cuda.nccl  # untyped
        return ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError, ValueError):  # built in, but its library can't be asked
        return True


def env_text(report: Mapping[str, Any]) -> str:
    """`env_report()`, to be pasted."""
    cuda, backends = report["cuda"], report["backends"]
    rows = [
        ("python", f"{report['python']}, {report['platform']}, {report['cpu_count']} CPUs"),
        *((name, version or "not installed") for name, version in report["libraries"].items()),
        ("core API", report["api"]),
        ("cuda", f"{cuda['version']}, {', '.join(cuda['devices'])}" if cuda["available"] else "not available"),
        *((name, _said(value)) for name, value in backends.items()),
    ]
    for one in report["plugins"]:
        reason = f": {one['reason']}" if one["reason"] else ""
        rows.append((f"plugin {one['name']}", f"{one['distribution']} {one['version']}, {one['status']}{reason}"))
    rows += report["environment"].items() or [("HYPERPAR_ variables", "none")]
    widest = max(len(name) for name, _ in rows)
    return "\n".join(f"{name.ljust(widest)}  {value}" for name, value in rows)


def _said(value: str | bool) -> str:
    return value if isinstance(value, str) else "available" if value else "not available"
