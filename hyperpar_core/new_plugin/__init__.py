"""`hyperpar new-plugin`: a complete distribution for one kind of descriptor, from the templates in this folder.

A template's name says where its text goes: `KIND.WHAT.tmpl` for one kind, `all.WHAT.tmpl` for every kind. They are string.Template
texts with $name (the distribution), $package (its package, and the prefix of what it offers) and the version ranges that are tested.
"""

from __future__ import annotations

import importlib.util
import keyword
import re
import sys
from importlib.resources import files
from pathlib import Path
from string import Template

from .. import __version__
from ..descriptors import API_VERSION
from ..errors import HyperparError
from ..plugins.checks import installed_version

__all__ = ["KINDS", "new_plugin"]

KINDS = ("inner-wrapper", "local-compute", "special-handler", "lowerer", "family")
_NAME = re.compile(r"[a-z][a-z0-9]*(-[a-z0-9]+)*")
# {what a template's name says: where its text goes}
_TARGETS = {
    "pyproject": "pyproject.toml",
    "readme": "README.md",
    "package": "$package/__init__.py",
    "hooks": "$package/plugin.py",
    "code": "$package/$module.py",
    "conftest": "tests/conftest.py",
    "tests": "tests/test_$package.py",
    "model": "tests/toy_model.py",
}
_MODULES = {
    "inner-wrapper": "wrapper",
    "local-compute": "compute",
    "special-handler": "handler",
    "lowerer": "lowering",
    "family": "family",
}


def new_plugin(name: str, kind: str, out: Path | None = None) -> list[Path]:
    """Writes the distribution `name` into `out` (default: a folder of that name), and returns its files.

    Raises HyperparError for a name that no distribution or package can have, and where `out` exists; then nothing is written.
    """
    package = _package(name)
    if kind not in KINDS:
        raise HyperparError(f"--kind {kind}: no such kind of plugin (kinds: {', '.join(KINDS)}).")
    folder = Path(name) if out is None else Path(out)
    if folder.exists():
        raise HyperparError(f"{folder} exists already; name another folder with --out.")
    values = {"name": name, "package": package, "module": _MODULES[kind], "kind": kind.replace("-", " "), **_ranges()}
    texts = {f"{package}/py.typed": ""}
    for template in sorted(files(__name__).iterdir(), key=lambda one: one.name):
        of, _, rest = template.name.partition(".")
        if of in ("all", kind) and rest.endswith(".tmpl"):
            target = Template(_TARGETS[rest.removesuffix(".tmpl")]).substitute(values)
            texts[target] = Template(template.read_text(encoding="utf-8")).substitute(values)
    for target, text in texts.items():
        path = folder / target
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return [folder / target for target in sorted(texts)]


def _package(name: str) -> str:
    """The package of a distribution; HyperparError where it can't be one."""
    if not _NAME.fullmatch(name):
        raise HyperparError(
            f"{name!r} is no name for a distribution: small letters, digits and single hyphens, such as acme-attention."
        )
    package = name.replace("-", "_")
    if keyword.iskeyword(package) or package in sys.stdlib_module_names:
        raise HyperparError(f"{name!r} is a word or a module of Python itself; choose another name.")
    if importlib.util.find_spec(package) is not None:
        raise HyperparError(f"a module {package!r} is installed already; choose another name, or uninstall it.")
    return package


def _ranges() -> dict[str, str]:
    """The ranges that the new plugin states: the versions that are here, to the next minor one."""
    versions = {"core": __version__, **{name: installed_version(name) or "0.0" for name in ("torch", "transformers")}}
    ranges = {"api": API_VERSION}
    for name, version in versions.items():
        major, minor = (int(re.match(r"\d+", part)[0]) for part in version.split(".")[:2])  # type: ignore[index]
        ranges[name] = f">={major}.{minor},<{major}.{minor + 1}"
    return ranges
