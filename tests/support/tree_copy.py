"""A copy of the tree with a native module and an environment of its own, beside the real one's."""

from __future__ import annotations

import filecmp
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[2]
COPIED = ("tapchannel", "native", "tests", "pyproject.toml")


class DoesNotBuild(Exception):
    """A build step failed; the text is what it said."""


class TreeCopy:
    """The copy in a work folder; what is built there is kept between runs."""

    def __init__(self, work: Path, *settings: str) -> None:
        self.tree, self._cmake, self._venv = work / "tree", work / "cmake", work / "venv"
        self._settings = settings
        self.python = self._venv / "bin" / "python"

    def make(self) -> None:
        """Bring all of it up to date.

        Raises:
            DoesNotBuild: with what the build said.
        """
        self._copy_tree()
        self._make_venv()
        self.build()

    def _copy_tree(self) -> None:
        """Bring the copy up to date; what has not changed keeps its time: builds are small."""
        wanted: set[Path] = set()
        for name in COPIED:
            sources = [ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*")
            for source in sources:
                if source.is_dir() or "__pycache__" in source.parts or source.suffix == ".so":
                    continue
                target = self.tree / source.relative_to(ROOT)
                wanted.add(target)
                if not target.exists() or not filecmp.cmp(source, target, shallow=False):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copyfile(source, target)
        for old in [path for path in self.tree.rglob("*") if path.is_file() and path not in wanted]:
            old.unlink()

    def _make_venv(self) -> None:
        """Make an environment that imports the copy, with this one's packages beside it.

        Plain paths: the .pth files that lie there would bring the tree itself back in.
        """
        if not self.python.exists():
            subprocess.run([sys.executable, "-m", "venv", "--without-pip", self._venv], check=True)
        [packages] = self._venv.glob("lib/python*/site-packages")
        below = [path for path in sys.path if path.endswith(("site-packages", "dist-packages"))]
        (packages / "below.pth").write_text("\n".join([str(self.tree), *below, ""]))

    def build(self) -> Path:
        """Build the copy's native module, put it into the copy's package and return it.

        Raises:
            DoesNotBuild: with what the build said.
        """
        if not (self._cmake / "build.ninja").exists():
            settings = [
                "-DCMAKE_BUILD_TYPE=Release",
                f"-DPython_EXECUTABLE={sys.executable}",
                f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}",
                *self._settings,
            ]
            source = ["-S", self.tree / "native", "-B", self._cmake]
            _run([tool("cmake"), *source, "-G", "Ninja", *settings])
        _run([tool("ninja"), "-C", self._cmake])
        [module] = self._cmake.glob("_native*.so")
        return Path(shutil.copyfile(module, self.tree / "tapchannel" / module.name))


def tool(name: str) -> str:
    """Return the path of a build tool, this environment's own first."""
    own = Path(sys.executable).parent / name
    found = str(own) if own.exists() else shutil.which(name)
    if found is None:
        sys.exit(f"{name} is not installed")
    return found


def _run(command: Sequence[object]) -> None:
    """Run a build step."""
    words = [str(word) for word in command]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise DoesNotBuild("does not build:\n" + (done.stdout + done.stderr)[-2000:])
