"""What the user may choose, and where the stages run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ..errors import ConfigError

_COUNTS = (
    ("stages", 4, "pipeline stages, a process each"),
    ("microbatches", 8, "microbatches in a pass"),
    ("passes", 8, "passes: training steps of the policy"),
    ("depth", 4, "slots of the mailbox"),
)


@dataclass(frozen=True)
class Settings:
    """The options of one run, checked."""

    stages: int
    microbatches: int
    passes: int
    depth: int
    device: str
    json: bool
    plot: Path | None


@dataclass(frozen=True)
class Placement:
    """The device of each stage, and what carries the pipeline's own activations and gradients."""

    devices: list[str]
    backend: str

    @property
    def on_gpu(self) -> bool:
        """Tell whether the stages compute on GPUs."""
        return self.devices[0] != "cpu"

    def __str__(self) -> str:
        if not self.on_gpu:
            return "on the CPU"
        gpus = len(set(self.devices))
        name = torch.cuda.get_device_name(0)
        return f"on one {name}" if gpus == 1 else f"on {gpus} GPUs ({name})"


def parse(arguments: Sequence[str] | None) -> Settings:
    """Read the command line.

    Raises:
        ConfigError: values that cannot work together.
        SystemExit: the command line cannot be read, or only asks for help.
    """
    parser = argparse.ArgumentParser(
        prog="tapchannel demo",
        description="Train a small pipelined language model on text that ships with Python, and on "
        "its last stage a draft that reads the other stages' hidden states through tapchannel. "
        "Every one is compared, bit for bit, with an unpipelined forward of the same weights.",
    )
    for option, default, text in _COUNTS:
        help_text = f"{text} ({default})"
        parser.add_argument(f"--{option}", type=int, default=default, metavar="N", help=help_text)
    parser.add_argument(
        "--device",
        choices=["auto", "cpu", "cuda"],
        default="auto",
        help="auto: GPUs where torch sees any",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object, nothing else")
    parser.add_argument(
        "--plot", type=Path, metavar="FILE", help="draw the timeline of the passes into a PNG file"
    )
    settings = Settings(**vars(parser.parse_args(arguments)))
    _check(settings)
    return settings


def _check(settings: Settings) -> None:
    least = {"stages": 2, "passes": 2, "depth": 1, "microbatches": settings.stages}
    for option, minimum in least.items():
        value: int = getattr(settings, option)
        if value < minimum:
            reason = "one for each stage at least: 1F1B fills the pipeline first"
            raise ConfigError(
                f"--{option} is too small",
                seen=value,
                expected=f"{minimum} or more",
                cause=reason if option == "microbatches" else None,
            )
    if settings.plot is not None and not settings.plot.resolve().parent.is_dir():
        raise ConfigError(f"cannot write --plot {settings.plot}", cause="its folder does not exist")


def place(settings: Settings) -> Placement:
    """Choose a device for each stage: a GPU each, all on the first one, or the CPU.

    Raises:
        ConfigError: ``--device cuda`` where torch sees no GPU.
    """
    gpus = torch.cuda.device_count() if settings.device != "cpu" else 0
    if gpus == 0 and settings.device == "cuda":
        raise ConfigError(
            "--device cuda cannot be used",
            cause=f"torch {torch.__version__} sees no GPU here",
            next_step="run with --device cpu",
        )
    if gpus == 0:
        return Placement(["cpu"] * settings.stages, "gloo")
    if gpus >= settings.stages:
        return Placement([f"cuda:{n}" for n in range(settings.stages)], "cpu:gloo,cuda:nccl")
    # NCCL refuses two ranks on one GPU, and gloo carries no GPU tensors between two ranks.
    return Placement(["cuda:0"] * settings.stages, "gloo")
