"""Reading and writing the YAML of override and plan files: safe for a stranger's file, strict about its shape."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import OverrideError

__all__ = ["dump", "load_mapping", "refuse_unknown_keys"]

VERSION = 1
_MAX_BYTES = 16 * 2**20


class _Loader(yaml.SafeLoader):
    """SafeLoader without aliases (a small file could expand without end) and without repeated keys."""

    def compose_node(self, parent: Any, index: Any) -> Any:
        if self.check_event(yaml.events.AliasEvent):
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise OverrideError(f"line {event.start_mark.line + 1}: YAML aliases aren't read; write the value out.")
        return super().compose_node(parent, index)

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise OverrideError(f"line {key_node.start_mark.line + 1}: a key must be plain text, got {key!r}.")
            if key in seen:
                raise OverrideError(f"line {key_node.start_mark.line + 1}: key {key!r} stands twice.")
            seen.add(key)
        return super().construct_mapping(node, deep)


def load_mapping(source: str | Path, what: str) -> dict[str, Any]:
    """The mapping at the top of a YAML file, or of YAML text; OverrideError on anything else. `what` names it in errors."""
    text = str(source)
    where = what
    if isinstance(source, Path) or ("\n" not in text and (text.endswith((".yaml", ".yml")) or Path(text).is_file())):
        path = Path(source)
        where = f"{what} {path}"
        try:
            if path.stat().st_size > _MAX_BYTES:
                raise OverrideError(f"{where}: larger than {_MAX_BYTES >> 20} MiB.")
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise OverrideError(f"{where}: {error.strerror or error}.") from None
        except UnicodeDecodeError:
            raise OverrideError(f"{where}: not UTF-8 text.") from None
    try:
        data = yaml.load(text, Loader=_Loader)
    except OverrideError as error:
        raise OverrideError(f"{where}: {error}") from None
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise OverrideError(f"{where}: not readable as YAML: {' '.join(str(error).split())[:300]}") from None
    if data is None:
        raise OverrideError(f"{where}: empty.")
    if not isinstance(data, dict):
        raise OverrideError(f"{where}: expected a mapping at the top, got a {type(data).__name__}.")
    version = data.get("version")
    if version != VERSION or isinstance(version, bool):
        raise OverrideError(f"{where}: version {version!r}; this hyperpar reads version {VERSION}.")
    return data


def refuse_unknown_keys(data: Mapping[str, Any], known: set[str], where: str) -> None:
    """OverrideError for the first key of `data` that isn't known, with the nearest known one."""
    import difflib

    for key in data:
        if key not in known:
            near = difflib.get_close_matches(str(key), known, 1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise OverrideError(f"{where}: unknown key {key!r}.{hint} Known: {', '.join(sorted(known))}.")


def dump(data: Mapping[str, Any]) -> str:
    """YAML text, keys in the given order."""
    return yaml.safe_dump(dict(data), sort_keys=False, default_flow_style=None, width=120, allow_unicode=True)
