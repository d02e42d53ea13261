"""The layout of the repository: which file may import which, who knows transformers, how long a module may get."""

from __future__ import annotations

import ast
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).resolve().parents[1]
CORE = "hyperpar_core"

# From the ground up. A module imports only from its own floor or from those below it. A package stands for what is in
# it, unless a longer name says otherwise; "" is hyperpar_core itself, which re-exports the public names.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("errors", "placement", "changes", "descriptors", "hookspecs", "plugins"),
    ("collectives",),
    ("plan",),  # a plan is refused by the transition table
    ("apply",),
    ("view",),
    ("train", "batch"),
    ("testing",),
    ("applied",),
    ("",),
    ("testing.verify", "testing.__init__"),  # verify puts a plan on a model; the package re-exports it
    ("testing.conformance",),
    ("cli", "new_plugin"),
)
# What a plugin may import from the core.
PUBLIC_FACE = {"", "descriptors", "placement", "errors", "collectives.functional", "batch", "testing"}
# The only core modules that import transformers.
KNOWS_TRANSFORMERS = {
    "apply.preflight", "testing.models", "testing.zoo", "train.bare", "train.loading", "train.pretrained_folder"
}  # fmt: skip
# The test kit holds tables of families to try; nothing else in the core names one.
MAY_NAME_FAMILIES = ("testing",)
# Families whose names are ordinary words.
ORDINARY_WORDS = {"beam", "bloom", "git", "opt", "reformer", "whisper", "zaya", "cwm"}
LONGEST = 600


def modules(folder: Path, package: str) -> dict[str, Path]:
    """{dotted name within `package`: file}; the package itself is ''."""
    found = {}
    for path in sorted((folder / package).rglob("*.py")):
        parts = path.relative_to(folder / package).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(path: Path, name: str, package: str) -> Iterator[tuple[int, str, str]]:
    """(line, absolute module, imported name or '') of every import in the file, wherever it stands in it."""
    here = [package, *(name.split(".") if name else [])]
    if path.name != "__init__.py":
        here = here[:-1]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name, ""
        elif isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            source = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                yield node.lineno, source, alias.name


def graph(folder: Path) -> dict[str, dict[str, int]]:
    """{core module: {core module it imports: line}}. `from .x import y` means x.y where that is a module."""
    known = modules(folder, CORE)
    edges: dict[str, dict[str, int]] = {name: {} for name in known}
    for name, path in known.items():
        for line, source, symbol in imports(path, name, CORE):
            if source.split(".")[0] != CORE:
                continue
            target = source[len(CORE) + 1 :]
            inner = f"{target}.{symbol}".strip(".")
            edges[name].setdefault(inner if inner in known else target, line)
    return edges


def floor(name: str) -> int | None:
    """The floor of a core module, None where no entry of FLOORS holds it."""
    floors = {entry: i for i, names in enumerate(FLOORS) for entry in names}
    parts = name.split(".")
    holders = [f"{name}.__init__", *(".".join(parts[:n]) for n in range(len(parts), 0, -1))]
    return next((floors[holder] for holder in holders if holder in floors), None) if name else floors[""]


def upward_imports(folder: Path) -> list[str]:
    faults = []
    for name, targets in graph(folder).items():
        mine = floor(name)
        if mine is None:
            faults.append(f"{name}: stands on no floor")
            continue
        for target, line in targets.items():
            theirs = floor(target)
            if theirs is None or theirs > mine:
                faults.append(f"{name}:{line} imports {target or CORE}, which stands above it")
    return faults


def import_cycles(folder: Path) -> list[str]:
    edges, done, cycles = graph(folder), set[str](), []

    def visit(name: str, path: tuple[str, ...]) -> None:
        if name in path:
            cycles.append(" -> ".join([*path[path.index(name) :], name]))
        elif name not in done and name in edges:
            for target in edges[name]:
                visit(target, (*path, name))
            done.add(name)

    for name in edges:
        visit(name, ())
    return cycles


def plugin_packages(folder: Path) -> list[tuple[Path, str]]:
    """(folder of the distribution, name of its package)."""
    found = [path.parent for path in sorted(folder.glob("plugins/*/pyproject.toml"))]
    return [(path, path.name.replace("-", "_")) for path in found]


def private_imports(folder: Path) -> list[str]:
    faults, known = [], set(modules(folder, CORE))
    for home, package in plugin_packages(folder):
        for name, path in modules(home, package).items():
            for line, source, symbol in imports(path, name, package):
                where = f"{package}.{name}:{line}"
                first, _, rest = source.partition(".")
                if first == CORE:
                    inner = f"{rest}.{symbol}".strip(".")
                    target = inner if inner in known and inner not in PUBLIC_FACE else rest
                    if target not in PUBLIC_FACE:
                        faults.append(f"{where} imports {CORE}.{target}, which is not public")
                elif first.startswith("hyperpar_") and first != package and not (
                    rest == "extend" and first.replace("_", "-") in dependencies(home)
                ):
                    faults.append(f"{where} imports another plugin, {first}")
    return faults


def dependencies(home: Path) -> set[str]:
    """The names of the distributions that a distribution's pyproject.toml asks for."""
    project = tomllib.loads((home / "pyproject.toml").read_text(encoding="utf-8")).get("project", {})
    return {re.split(r"[^\w.-]", text)[0] for text in project.get("dependencies", [])}


def plugins_in_core(folder: Path) -> list[str]:
    return [
        f"{name}:{line} imports {source}"
        for name, path in modules(folder, CORE).items()
        for line, source, _ in imports(path, name, CORE)
        if source.startswith("hyperpar_") and source.split(".")[0] != CORE
    ]


def transformers_importers(folder: Path) -> set[str]:
    return {
        name
        for name, path in modules(folder, CORE).items()
        if any(source.split(".")[0] == "transformers" for _, source, _ in imports(path, name, CORE))
    }


def family_names(folder: Path) -> list[str]:
    """Every place in the core's text where a causal-LM family of transformers is named, as llama, llama_x or LlamaX."""
    names = sorted(set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES) - ORDINARY_WORDS, key=len, reverse=True)
    word = re.compile(rf"(?<![a-z0-9])({'|'.join(map(re.escape, names))})(?![a-z0-9])")
    faults = []
    for name, path in modules(folder, CORE).items():
        if name.split(".")[0] in MAY_NAME_FAMILIES:
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            plain = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", line).lower()
            faults += [f"{name}:{number} names {found}" for found in word.findall(plain)]
    return faults


def long_modules(folder: Path) -> list[str]:
    found = (path for part in (CORE, "plugins", "tests", "docs") for path in sorted((folder / part).rglob("*.py")))
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in found}
    return [f"{path.relative_to(folder)}: {n} lines" for path, n in lengths.items() if n > LONGEST]


def test_a_core_module_imports_only_from_its_own_floor_or_below() -> None:
    assert upward_imports(ROOT) == []


def test_no_two_core_modules_import_each_other() -> None:
    assert import_cycles(ROOT) == []


def test_the_core_imports_no_plugin() -> None:
    assert plugins_in_core(ROOT) == []


def test_a_plugin_imports_only_the_public_face_of_the_core_and_what_a_plugin_it_depends_on_offers_in_extend() -> None:
    assert plugin_packages(ROOT), "no plugin found"
    assert private_imports(ROOT) == []


def test_transformers_is_imported_in_the_named_core_modules_only() -> None:
    assert transformers_importers(ROOT) == KNOWS_TRANSFORMERS


def test_the_core_names_no_model_family() -> None:
    assert family_names(ROOT) == []


def test_no_module_is_longer_than_the_limit() -> None:
    assert long_modules(ROOT) == []


PLANTED = {
    "upward": (upward_imports, f"{CORE}/plan/x.py", "def f():\n    from ..apply import regions\n"),
    "upward to the face": (upward_imports, f"{CORE}/plan/x.py", f"import {CORE}\n"),
    "no floor": (upward_imports, f"{CORE}/extra.py", ""),
    "cycle": (import_cycles, f"{CORE}/plan/x.py", "from . import y\n"),
    "plugin in core": (plugins_in_core, f"{CORE}/plan/x.py", "import hyperpar_a\n"),
    "private": (private_imports, "plugins/hyperpar-a/hyperpar_a/x.py", f"from {CORE}.plan import y\n"),
    "private by name": (private_imports, "plugins/hyperpar-a/hyperpar_a/x.py", f"from {CORE} import plan\n"),
    "other plugin": (private_imports, "plugins/hyperpar-a/hyperpar_a/x.py", "import hyperpar_b.z\n"),
    "not depended on": (private_imports, "plugins/hyperpar-a/hyperpar_a/x.py", "from hyperpar_b.extend import y\n"),
    "beside extend": (private_imports, "plugins/hyperpar-a/hyperpar_a/x.py", "from hyperpar_c.masks import y\n"),
    "family": (family_names, f"{CORE}/plan/x.py", "isinstance(m, LlamaConfig)\n"),
    "family as text": (family_names, f"{CORE}/plan/x.py", "'qwen3_moe'\n"),
    "long": (long_modules, f"{CORE}/plan/x.py", "\n" * (LONGEST + 1)),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_each_rule_finds_a_planted_fault(fault: str, tmp_path: Path) -> None:
    rule, file, text = PLANTED[fault]
    planted = {
        f"{CORE}/__init__.py": "from .plan import y\n",
        f"{CORE}/plan/__init__.py": "",
        f"{CORE}/plan/y.py": "from .x import name\n",
        f"{CORE}/plan/x.py": "from ..errors import Refused\n",
        f"{CORE}/errors.py": "",
        f"{CORE}/apply/regions.py": "",
        "plugins/hyperpar-a/pyproject.toml": '[project]\ndependencies = ["hyperpar-core>=0.1", "hyperpar-c>=0.1,<0.2"]\n',
        "plugins/hyperpar-a/hyperpar_a/x.py": f"from {CORE}.errors import Refused\nfrom {CORE} import errors\n"
        "from hyperpar_c.extend import y\n",
    }
    for name, content in planted.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(content)
    assert rule(tmp_path) == []
    (tmp_path / file).write_text(text)
    assert rule(tmp_path) != []
