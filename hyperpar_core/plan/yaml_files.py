"""Reading and writing the YAML of override and plan files: safe for a stranger's file, strict about its shape."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any

import yaml

from ..errors import OverrideError
from .file_versions import VERSION, brought_up
from .names import nearest

__all__ = ["VERSION", "dump", "load_mapping", "plain_data", "refuse_unknown_keys", "shown"]

_MAX_BYTES = 16 * 2**20
_MAX_DEPTH = 32


_Safe: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # libyaml's, where PyYAML was built with it
_Dumper: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


class _Loader(_Safe):  # type: ignore[misc]
    """A safe loader without repeated keys."""

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Hashable, Any]:
        seen = set()
        for key_node, _ in node.value if isinstance(node, yaml.MappingNode) else ():
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, Hashable):
                raise OverrideError(f"line {key_node.start_mark.line + 1}: a key must be plain text, got {shown(key)}.")
            if key in seen:
                raise OverrideError(f"line {key_node.start_mark.line + 1}: key {key!r} stands twice.")
            seen.add(key)
        made: dict[Hashable, Any] = super().construct_mapping(node, deep)
        return made


def _check_events(text: str) -> None:
    """No aliases (a small file could expand without end), and no deep nesting (loading recurses)."""
    depth = 0
    events: Any = yaml.parse(text, Loader=_Safe)
    for event in events:
        mark: Any = event.start_mark
        if isinstance(event, yaml.AliasEvent):
            raise OverrideError(f"line {mark.line + 1}: YAML aliases aren't read; write the value out.")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _MAX_DEPTH:
            raise OverrideError(f"line {mark.line + 1}: nested more than {_MAX_DEPTH} levels deep.")


def load_mapping(source: str | Path, what: str) -> dict[str, Any]:
    """The mapping at the top of a YAML file, or of YAML text; OverrideError on anything else. `what` names it in errors."""
    if not isinstance(source, (str, Path)):
        raise OverrideError(f"{what}: expected a path or YAML text, got {shown(source)}.")
    text, where = str(source), what
    if isinstance(source, Path) or _is_path(text):
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
    elif len(text) > _MAX_BYTES:
        raise OverrideError(f"{where}: larger than {_MAX_BYTES >> 20} MiB.")
    try:
        _check_events(text)
        data = yaml.load(text, Loader=_Loader)
    except OverrideError as error:
        raise OverrideError(f"{where}: {error}") from None
    except (
        Exception
    ) as error:  # PyYAML's constructors raise KeyError, AttributeError and more for a wrong value under a tag
        said = " ".join(str(error).split())[:300] or type(error).__name__
        raise OverrideError(f"{where}: not readable as YAML: {said}") from None
    if data is None:
        raise OverrideError(f"{where}: empty.")
    if not isinstance(data, dict):
        raise OverrideError(f"{where}: expected a mapping at the top, got a {type(data).__name__}.")
    return brought_up(data, where)


def _is_path(text: str) -> bool:
    if "\n" in text or "\0" in text or len(text) > 4096:
        return False
    try:
        return text.endswith((".yaml", ".yml", ".json")) or Path(text).is_file()
    except OSError:  # too long for a file's name
        return False


def refuse_unknown_keys(data: Mapping[str, Any], known: set[str], where: str) -> None:
    """OverrideError for the first key of `data` that isn't known, with the nearest known one."""
    for key in data:
        if key not in known:
            raise OverrideError(
                f"{where}: unknown key {shown(key)}.{nearest(str(key), known)} Known: {', '.join(sorted(known))}."
            )


def plain_data(value: Any, where: str, depth: int = 0) -> Any:
    """`value` with lists for tuples; OverrideError unless it is text, numbers, booleans, none, and lists and mappings of them."""
    if depth > _MAX_DEPTH:
        raise OverrideError(f"{where}: nested more than {_MAX_DEPTH} levels deep.")
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, (list, tuple)):
        return [plain_data(item, f"{where}[{i}]", depth + 1) for i, item in enumerate(value)]
    if isinstance(value, Mapping) and all(type(key) is str for key in value):
        return {key: plain_data(item, f"{where}.{key}", depth + 1) for key, item in value.items()}
    raise OverrideError(f"{where}: expected plain data (text, numbers, lists, mappings by name), got {shown(value)}.")


def shown(value: Any) -> str:
    """A value in an error, cut to a line's length."""
    try:
        text = repr(value)
    except Exception:  # an object that can't even be printed
        text = f"a {type(value).__name__}"
    return text if len(text) <= 80 else f"{text[:77]}..."


def dump(data: Mapping[str, Any]) -> str:
    """YAML text, keys in the given order."""
    text: str = yaml.dump(
        dict(data), Dumper=_Dumper, sort_keys=False, default_flow_style=None, width=120, allow_unicode=True
    )
    return text
