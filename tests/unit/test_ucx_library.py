"""Which UCX library is chosen, with which reasons, on made-up machines."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

import pytest

from tapchannel import ucx_candidates, ucx_library
from tapchannel.errors import TransportUnavailable
from tapchannel.ucx_candidates import candidates
from tapchannel.ucx_library import UcxCandidate, UcxChoice, choose_ucx, load_plan, loading, pick
from tapchannel.ucx_probe import Probe

BASE = frozenset({"self", "tcp", "cma"})
CUDA_LESS = {"cuda_cpy": "it has no libuct_cuda"}
VERBS_LESS = {"ib": "it has no libuct_ib"}


class MadeUpMachine:
    """Folders with empty files named like UCX's, and what a probe of each would say."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.says: dict[Path, Probe] = {}
        self.system: Path | None = None
        self.probed: list[tuple[str, ...]] = []
        self.mapped: dict[str, tuple[Path, ...]] = {}

    def library(
        self,
        folder: str,
        ending: str = ".so.0",
        hashes: bool = False,
        version: tuple[int, ...] = (1, 19, 0),
        verbs: Sequence[str] | None = None,
        cuda: bool = False,
        failure: str = "",
    ) -> Path:
        """Put a UCX into a folder; ``verbs`` are the devices it finds, None if it has no verbs."""
        place = self.root / folder
        place.mkdir(parents=True, exist_ok=True)
        names = {
            name: place / (f"lib{name}-{number}abc{ending}" if hashes else f"lib{name}{ending}")
            for number, name in enumerate(("ucm", "ucs", "uct", "ucp"))
        }
        for file in names.values():
            file.touch()
        has = {"ib"} if verbs is not None else set[str]()
        has |= {"cuda_cpy"} if cuda else set()
        lacks = {**({} if cuda else CUDA_LESS), **(VERBS_LESS if verbs is None else {})}
        mapped = {name: (file,) for name, file in names.items()}
        self.says[names["ucp"]] = Probe(
            failure, version, BASE | has, tuple(verbs or ()), lacks, {} if failure else mapped
        )
        return names["ucp"]

    def wheel(self, name: str, library: Path) -> None:
        """Install a wheel that holds a library."""
        info = self.root / f"{name.replace('-', '_')}-1.dist-info"
        info.mkdir(exist_ok=True)
        (info / "METADATA").write_text(f"Name: {name}\nVersion: 1\n")
        files = [f"{file.relative_to(self.root)},," for file in library.parent.iterdir()]
        (info / "RECORD").write_text("\n".join(files))

    def probe(self, libraries: Sequence[str], environment: dict[str, str]) -> Probe:
        """Answer for `tapchannel.ucx_probe.probe`."""
        self.probed.append(tuple(libraries))
        if libraries[-1] == "libucp.so.0":
            if self.system is None:
                return Probe("libucp.so.0: no such file")
            return self.says[self.system]
        return self.says[Path(libraries[-1])]

    def distribution(self, name: str) -> metadata.Distribution:
        """Answer for `importlib.metadata.distribution`."""
        for found in metadata.distributions(name=name, path=[str(self.root)]):
            return found
        raise metadata.PackageNotFoundError(name)


@pytest.fixture
def made_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MadeUpMachine]:
    """Make a machine that has no UCX at all."""
    machine = MadeUpMachine(tmp_path)
    monkeypatch.setattr(ucx_candidates, "probe", machine.probe)
    monkeypatch.setattr(ucx_candidates, "mapped_ucx", lambda: machine.mapped)
    monkeypatch.setattr(ucx_candidates.metadata, "distribution", machine.distribution)
    monkeypatch.setattr(ucx_library, "_chosen", [])
    monkeypatch.delenv("TAPCHANNEL_UCX", raising=False)
    for name in ("UCX_LOG_FILE", "UCX_HANDLE_ERRORS", "UCX_DEBUG_SIGNO", "UCX_MODULES"):
        monkeypatch.delenv(name, raising=False)
    ucx_candidates._examined.cache_clear()
    ucx_candidates._seen.cache_clear()
    yield machine
    ucx_candidates._examined.cache_clear()
    ucx_candidates._seen.cache_clear()


def full_house(made_up: MadeUpMachine) -> None:
    """Install what a well-stocked machine has: Debian's UCX, the libucx and the NIXL wheel."""
    made_up.system = made_up.library("usr/lib", version=(1, 13, 1), verbs=["mlx5_0"])
    made_up.wheel("libucx-cu12", made_up.library("libucx/lib", ending=".so", cuda=True))
    nixl = made_up.library(
        "nixl_cu12.libs", ".so.0.0.0", True, (1, 23, 0), verbs=["mlx5_0"], cuda=True
    )
    (nixl.parent / "libibverbs-1de.so.1").touch()
    made_up.wheel("nixl-cu12", nixl)


@pytest.mark.parametrize(
    ("needs_verbs", "needs_cuda", "origin", "passed_over"),
    [
        (False, False, "system", 0),
        (True, False, "system", 0),
        (False, True, "libucx wheel", 1),
        (True, True, "nixl wheel", 2),
    ],
)
def test_first_that_does_for_the_job(
    made_up: MadeUpMachine, needs_verbs: bool, needs_cuda: bool, origin: str, passed_over: int
) -> None:
    """Catches a library chosen in spite of what it lacks, and reasons that get lost."""
    full_house(made_up)
    choice = choose_ucx(needs_verbs, needs_cuda)
    assert choice.chosen.origin == origin
    assert choice.remark == ""
    assert len(choice.passed_over) == passed_over
    assert all(choice.passed_over.values())


def test_what_comes_after_the_chosen_one_is_not_looked_at(made_up: MadeUpMachine) -> None:
    """Catches a start-up that loads every library on the machine, one process each."""
    full_house(made_up)
    choose_ucx(False, False)
    assert {Path(files[-1]).parent.name for files in made_up.probed} == {"", "lib"}


def test_no_library_names_each_place_and_the_extra(made_up: MadeUpMachine) -> None:
    """Catches an error that does not say where was searched and what to install."""
    with pytest.raises(TransportUnavailable) as caught:
        choose_ucx(True, True)
    assert caught.value.refused == {
        "system": "libucp.so.0: no such file",
        "libucx wheel": "not installed",
        "nixl wheel": "not installed",
    }
    assert "rdma-cu12" in str(caught.value.next_step)


def test_failed_choice_binds_nothing(made_up: MadeUpMachine) -> None:
    """Catches a first refusal that would be remembered after the cause is gone."""
    with pytest.raises(TransportUnavailable):
        choose_ucx(True, False)
    made_up.system = made_up.library("usr/lib")
    assert choose_ucx(False, False).chosen.origin == "system"


def test_first_choice_binds(made_up: MadeUpMachine) -> None:
    """Catches a second copy, loaded because a later mailbox needs more than the first did."""
    full_house(made_up)
    first = choose_ucx(False, False)
    assert choose_ucx(True, False) is first
    with pytest.raises(TransportUnavailable, match="uses already") as caught:
        choose_ucx(False, True)
    assert list(caught.value.refused.values()) == ["no CUDA: it has no libuct_cuda"]


def test_verbs_without_a_device_do_not_count(made_up: MadeUpMachine) -> None:
    """Catches a library whose verbs cannot open this machine's devices: it would fall to TCP."""
    made_up.system = made_up.library("usr/lib", verbs=[])
    with pytest.raises(TransportUnavailable) as caught:
        choose_ucx(True, False)
    assert "find no RDMA device" in caught.value.refused[f"system {made_up.system}"]


@pytest.mark.parametrize("version", [(1, 12, 1), (2, 0, 0)])
def test_version_out_of_range_is_refused(made_up: MadeUpMachine, version: tuple[int, ...]) -> None:
    """Catches a call into a library whose functions are not those that are meant."""
    made_up.system = made_up.library("usr/lib", version=version)
    found = next(candidates())
    assert ".".join(map(str, version)) in found.refusal
    assert pick_fails(found)


def test_library_that_cannot_be_looked_at_is_refused(made_up: MadeUpMachine) -> None:
    """Catches a crash of the probe taken for an empty library."""
    made_up.system = made_up.library("usr/lib", failure="ends by signal 11")
    found = next(candidates())
    assert found.refusal == "ends by signal 11"
    assert pick_fails(found)


def pick_fails(found: UcxCandidate) -> bool:
    """Tell whether a candidate is passed over by the least demanding job."""
    with pytest.raises(TransportUnavailable):
        pick(iter([found]), False, False)
    return True


def test_two_libucx_wheels_are_refused(made_up: MadeUpMachine) -> None:
    """Catches the two wheels that write into one folder, half of each."""
    library = made_up.library("libucx/lib", ending=".so")
    made_up.wheel("libucx-cu12", library)
    made_up.wheel("libucx-cu13", library)
    wheel = [found for found in candidates() if found.origin == "libucx wheel"]
    assert len(wheel) == 1
    assert "libucx-cu12 and libucx-cu13" in wheel[0].refusal


def test_named_library_is_the_only_one(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a silent way round the library that the user named."""
    full_house(made_up)
    monkeypatch.setenv("TAPCHANNEL_UCX", str(made_up.root / "libucx" / "lib"))
    assert [found.origin for found in candidates()] == ["TAPCHANNEL_UCX"]
    choice = choose_ucx(True, True)
    assert choice.chosen.path == made_up.root / "libucx" / "lib" / "libucp.so"
    assert choice.remark == "no verbs: it has no libuct_ib"


def test_named_library_without_cuda_is_no_choice(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a GPU mailbox over a library that does not know GPU memory."""
    monkeypatch.setenv("TAPCHANNEL_UCX", str(made_up.library("opt")))
    with pytest.raises(TransportUnavailable, match="no CUDA"):
        choose_ucx(False, True)


@pytest.mark.parametrize(
    ("name", "reason"), [("nowhere", "no such file"), ("empty", "no libucp.so in this folder")]
)
def test_named_library_that_is_not_there(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch, name: str, reason: str
) -> None:
    """Catches a misspelt path that falls back to another library."""
    full_house(made_up)
    (made_up.root / "empty").mkdir()
    monkeypatch.setenv("TAPCHANNEL_UCX", str(made_up.root / name))
    with pytest.raises(TransportUnavailable, match=reason):
        choose_ucx(False, False)


def test_loaded_library_is_the_only_one(made_up: MadeUpMachine) -> None:
    """Catches a second copy beside the one that another package has loaded."""
    full_house(made_up)
    libucp = made_up.root / "libucx" / "lib" / "libucp.so"
    made_up.mapped = dict(made_up.says[libucp].mapped)
    assert [found.origin for found in candidates()] == ["loaded"]
    choice = choose_ucx(False, True)
    assert choice.chosen.path == libucp
    assert load_plan(choice).preload == ()
    with pytest.raises(TransportUnavailable, match="no verbs"):
        choose_ucx(True, True)


def test_library_named_beside_a_loaded_one(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches two copies that meet because the user named one of them."""
    loaded, other = made_up.library("one"), made_up.library("other")
    made_up.mapped = dict(made_up.says[loaded].mapped)
    monkeypatch.setenv("TAPCHANNEL_UCX", str(other))
    with pytest.raises(TransportUnavailable, match="two copies"):
        choose_ucx(False, False)
    monkeypatch.setenv("TAPCHANNEL_UCX", str(loaded))
    assert choose_ucx(False, False).chosen.path == loaded


def test_loaded_library_that_was_replaced(made_up: MadeUpMachine) -> None:
    """Catches an upgrade under a running process: its path is another library by now."""
    gone = Path(f"{made_up.library('opt')} (deleted)")
    made_up.mapped = {"ucp": (gone,)}
    with pytest.raises(TransportUnavailable, match="restart the process"):
        choose_ucx(False, False)


def test_siblings_are_of_the_same_copy(made_up: MadeUpMachine) -> None:
    """Catches a libucs of another ending, which is another copy in a wheel without links."""
    for ending in (".so.0.0.0", ".so.0", ".so"):
        library = made_up.library("libucx/lib", ending=ending)
    made_up.wheel("libucx-cu12", library)
    plan = load_plan(choose_ucx(False, False))
    assert [Path(file).name for file in (*plan.preload, plan.libucp)] == [
        "libucs.so",
        "libuct.so",
        "libucp.so",
    ]


def test_moved_library_brings_its_own_libucm(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a relocated tree whose libucs finds the system's libucm."""
    library = made_up.library("opt")
    says = made_up.says[library]
    mixed = Probe("", says.version, says.components, (), says.unloadable, dict(says.mapped))
    mixed.mapped["ucm"] = (Path("/usr/lib/libucm.so.0"),)
    made_up.system = library
    whole = made_up.probe

    def probe(libraries: Sequence[str], environment: dict[str, str]) -> Probe:
        return whole(libraries, environment) if len(libraries) == 4 else mixed

    monkeypatch.setattr(ucx_candidates, "probe", probe)
    plan = load_plan(choose_ucx(False, False))
    assert [Path(file).name for file in plan.preload] == [
        "libucm.so.0",
        "libucs.so.0",
        "libuct.so.0",
    ]


def test_mixed_library_is_refused(made_up: MadeUpMachine) -> None:
    """Catches two versions in one process, half of each."""
    library = made_up.library("opt")
    made_up.says[library].mapped["ucs"] = (Path("/usr/lib/libucs.so.0"),)
    made_up.system = library
    assert "/usr/lib/libucs.so.0" in next(candidates()).refusal


def test_environment_leaves_the_user_his_own(
    made_up: MadeUpMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Catches a user's log file that is overwritten, and variables that stay behind."""
    full_house(made_up)
    monkeypatch.setenv("UCX_LOG_FILE", "/tmp/mine")
    choice = choose_ucx(True, True)
    before = dict(os.environ)
    with loading(choice) as plan:
        assert plan.environment == {
            "UCX_HANDLE_ERRORS": "none",
            "UCX_DEBUG_SIGNO": "0",
            "UCX_MODULES": "^efa",
        }
        assert os.environ["UCX_LOG_FILE"] == "/tmp/mine"
        assert os.environ["UCX_MODULES"] == "^efa"
    assert dict(os.environ) == before


def test_efa_is_kept_where_verbs_are_the_systems(made_up: MadeUpMachine) -> None:
    """Catches a transport taken from a library that has no quarrel with it."""
    made_up.system = made_up.library("usr/lib")
    choice: UcxChoice = choose_ucx(False, False)
    assert "UCX_MODULES" not in load_plan(choice).environment
    assert load_plan(choice).environment["UCX_LOG_FILE"] == "stderr"
