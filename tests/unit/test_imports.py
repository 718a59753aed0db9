"""The package's shape: who imports whom, what is never imported, how long things get."""

from __future__ import annotations

from pathlib import Path

import pytest

from support import source_rules

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tapchannel"
NATIVE = ROOT / "native"


@pytest.fixture
def seeded(tmp_path: Path) -> Path:
    """Make a package that keeps every rule, for a test to break."""
    package = tmp_path / "tapchannel"
    (package / "transport").mkdir(parents=True)
    files = {
        "__init__.py": "from .mailbox import Mailbox\n",
        "errors.py": "from .keys import Key\n",
        "keys.py": "import struct\n",
        "plan.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch\n",
        "mailbox.py": "import torch\nfrom . import _native, plan\nfrom .transport.shm import Shm\n",
        "transport/__init__.py": "",
        "transport/shm.py": "from ..errors import ConfigError\nfrom .base import Transport\n",
        "transport/base.py": "from .. import _native\n",
        "_native.pyi": "",
    }
    for name, source in files.items():
        (package / name).write_text(source)
    return package


def test_imports_point_one_way() -> None:
    """Catches a lower layer that reaches up, which is how cycles and hidden dependencies start."""
    assert source_rules.broken_layers(PACKAGE) == []


def test_protocol_needs_no_torch_to_be_imported() -> None:
    """Catches a module-level torch import in the pure modules, slow and wrong for tools."""
    assert source_rules.early_torch(PACKAGE) == []


def test_nothing_unpickles() -> None:
    """Catches a way for a peer's bytes to run code (I8)."""
    assert source_rules.pickles(PACKAGE) == []


def test_modules_stay_short() -> None:
    """Catches a module that has grown past what one sitting can review."""
    assert source_rules.long_files(PACKAGE, "*.py") == []


def test_native_files_stay_short() -> None:
    """Catches the same in the native sources."""
    for folder in (NATIVE, ROOT / "tests"):
        assert source_rules.long_files(folder, "*.cpp", "*.hpp") == []


def test_functions_stay_short() -> None:
    """Catches a function that does more than its name says."""
    assert source_rules.long_functions(PACKAGE) == []


def test_rules_hold_for_a_package_that_keeps_them(seeded: Path) -> None:
    """Catches a rule that complains about everything, which the tests below would not see."""
    assert source_rules.broken_layers(seeded) == []
    assert source_rules.early_torch(seeded) == []
    assert source_rules.pickles(seeded) == []
    assert source_rules.long_files(seeded, "*.py") == []
    assert source_rules.long_functions(seeded) == []


@pytest.mark.parametrize(
    ("module", "line", "other"),
    [
        ("keys.py", "from .plan import TapPlan", "plan"),
        ("plan.py", "from . import mailbox", "mailbox"),
        ("plan.py", "import tapchannel.transport.shm", "transport"),
        ("plan.py", "from ._native import Block", "_native"),
        ("plan.py", "from tapchannel import Mailbox", "__init__"),
        ("transport/shm.py", "from ..mailbox import Mailbox", "mailbox"),
        ("transport/shm.py", "from .. import lease", "lease"),
        ("mailbox.py", "def late():\n    from tapchannel import demo", "demo"),
    ],
)
def test_import_of_a_higher_layer_is_found(
    seeded: Path, module: str, line: str, other: str
) -> None:
    """Catches a layer rule that misses one of the ways to write an import."""
    (seeded / module).write_text(f"{line}\n")
    [found] = source_rules.broken_layers(seeded)
    assert found.endswith(f"imports {other}, which is above it")


def test_module_without_a_layer_is_found(seeded: Path) -> None:
    """Catches a new module that no rule covers."""
    (seeded / "helpers.py").write_text("")
    assert source_rules.broken_layers(seeded) == ["helpers stands in no layer"]


@pytest.mark.parametrize("line", ["import torch", "class A:\n    from torch import nn"])
def test_early_torch_is_found(seeded: Path, line: str) -> None:
    """Catches a torch rule that overlooks a form of import that runs at import."""
    (seeded / "plan.py").write_text(f"{line}\n")
    assert len(source_rules.early_torch(seeded)) == 1


def test_torch_inside_a_function_is_not_early(seeded: Path) -> None:
    """Catches a torch rule that forbids the lazy import it is meant to lead to."""
    (seeded / "plan.py").write_text("def dtype():\n    import torch\n")
    assert source_rules.early_torch(seeded) == []


@pytest.mark.parametrize("line", ["import pickle", "def f():\n    from pickle import loads"])
def test_pickle_is_found(seeded: Path, line: str) -> None:
    """Catches a pickle rule that looks at the top of modules only."""
    (seeded / "transport" / "shm.py").write_text(f"{line}\n")
    assert len(source_rules.pickles(seeded)) == 1


@pytest.mark.parametrize(("extra", "count"), [(0, 0), (1, 1)])
def test_length_limits_are_exact(seeded: Path, extra: int, count: int) -> None:
    """Catches limits that are off by one, or that count a docstring."""
    (seeded / "keys.py").write_text("import struct\n" * (source_rules.MODULE_LIMIT + extra))
    body = "    pass\n" * (source_rules.FUNCTION_LIMIT - 1 + extra)
    (seeded / "plan.py").write_text(f'def long():\n    """First.\n\n    Last.\n    """\n{body}')
    assert len(source_rules.long_files(seeded, "*.py")) == count
    assert len(source_rules.long_functions(seeded)) == count
