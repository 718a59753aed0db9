"""Reads a package's source by its syntax tree and names what breaks the house's rules."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

MODULE_LIMIT = 300
FUNCTION_LIMIT = 40

# Lowest first: a module may import from its own layer and from those above it in this list.
LAYERS = (
    ("errors", "error_text", "keys", "dtypes"),
    ("layout", "lanes", "plan", "plan_json"),
    ("wire", "refusal", "descriptor", "plan_check"),
    ("_native",),
    (
        "layout_check",
        "memory",
        "endpoints",
        "interfaces",
        "sockets",
        "dialing",
        "listening",
        "rdma",
        "stores",
        "tensors",
        "settings",
        "speed",
        "transport",
        "ucx_candidates",
        "ucx_library",
        "ucx_probe",
    ),
    (
        "assembly",
        "attach",
        "handshake",
        "service",
        "faults",
        "verdicts",
        "arrivals",
        "targets",
        "readiness",
    ),
    ("lease", "lifetime", "passes", "reports"),
    ("role",),
    ("mailbox", "outbox", "telemetry"),
    ("__init__",),
    (
        "machine",
        "selftest",
        "doctor",
        "doctor_network",
        "doctor_report",
        "doctor_text",
        "litmus",
        "litmus_command",
        "demo",
        "benchmark",
        "integrations",
        "testing",
    ),
    ("cli",),
    ("__main__",),
)
HEIGHT = {name: height for height, names in enumerate(LAYERS) for name in names}
WITHOUT_TORCH = {*LAYERS[0], *LAYERS[1], *LAYERS[2]}
PICKLES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve"}


class Import(NamedTuple):
    """One import: its line, the full dotted name, and whether importing the module runs it."""

    line: int
    name: str
    at_import: bool


def modules(package: Path) -> Iterator[tuple[Path, str]]:
    """Yield each module's path and its dotted name, the package itself being ``__init__``."""
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        if len(parts) > 1 and parts[-1] == "__init__":
            parts = parts[:-1]
        yield path, ".".join(parts)


def layer_of(module: str) -> str:
    """Return the name by which a module or a module of a subpackage stands in LAYERS."""
    return module.partition(".")[0]


def _is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in (
        "TYPE_CHECKING",
        "typing.TYPE_CHECKING",
    )


def _import_nodes(node: ast.AST, at_import: bool = True) -> Iterator[tuple[ast.stmt, bool]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import | ast.ImportFrom):
            yield child, at_import
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or _is_type_checking(child):
            yield from _import_nodes(child, at_import=False)
        else:
            yield from _import_nodes(child, at_import)


def _base_of(node: ast.ImportFrom, path: Path, package: Path) -> str:
    """Return the absolute dotted name that a from-import starts from."""
    if not node.level:
        return node.module or ""
    folder = path.parent
    for _ in range(node.level - 1):
        folder = folder.parent
    parts = [package.name, *folder.relative_to(package).parts]
    return ".".join([*parts, node.module] if node.module else parts)


def imports(path: Path, package: Path) -> Iterator[Import]:
    """Yield every import of a module, those inside functions included."""
    for node, at_import in _import_nodes(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            base = _base_of(node, path, package)
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            yield Import(node.lineno, name, at_import)


def _imported_layer(name: str, package: Path) -> str | None:
    """Return the layer name that an import reaches into, None if it leaves the package."""
    root, _, rest = name.partition(".")
    if root != package.name:
        return None
    first = layer_of(rest)
    is_module = (package / first).is_dir() or any(package.glob(f"{first}.*"))
    return first if first and (is_module or first in HEIGHT) else "__init__"


def broken_layers(package: Path) -> list[str]:
    """Name each import of a higher layer, and each module that stands in no layer."""
    found: list[str] = []
    for path, module in modules(package):
        own = layer_of(module)
        if own not in HEIGHT:
            found.append(f"{module} stands in no layer")
            continue
        for line, name, _ in imports(path, package):
            other = _imported_layer(name, package)
            if other is not None and HEIGHT.get(other, -1) > HEIGHT[own]:
                found.append(f"{module}:{line} imports {other}, which is above it")
    return found


def early_torch(package: Path) -> list[str]:
    """Name each module that must not need torch to be imported, but does."""
    return [
        f"{module}:{line} imports {name} when it is imported"
        for path, module in modules(package)
        if layer_of(module) in WITHOUT_TORCH
        for line, name, at_import in imports(path, package)
        if at_import and name.partition(".")[0] == "torch"
    ]


def pickles(package: Path) -> list[str]:
    """Name each import of a module that runs code when it reads bytes."""
    return [
        f"{module}:{line} imports {name}"
        for path, module in modules(package)
        for line, name, _ in imports(path, package)
        if name.partition(".")[0] in PICKLES
    ]


def long_files(folder: Path, *patterns: str, limit: int = MODULE_LIMIT) -> list[str]:
    """Name each file longer than the limit, in lines."""
    sizes = {
        path: len(path.read_text().splitlines())
        for pattern in patterns
        for path in sorted(folder.rglob(pattern))
    }
    return [
        f"{path.relative_to(folder)} has {lines} lines"
        for path, lines in sizes.items()
        if lines > limit
    ]


def _length(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Count a function's lines, its docstring left out."""
    lines = (function.end_lineno or function.lineno) - function.lineno + 1
    first = function.body[0]
    if ast.get_docstring(function, clean=False) is not None:
        lines -= (first.end_lineno or first.lineno) - first.lineno + 1
    return lines


def long_functions(package: Path) -> list[str]:
    """Name each function longer than FUNCTION_LIMIT lines."""
    return [
        f"{module}:{node.lineno} {node.name} has {_length(node)} lines"
        for path, module in modules(package)
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        if _length(node) > FUNCTION_LIMIT
    ]
