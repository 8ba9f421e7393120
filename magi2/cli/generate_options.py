"""Options of `magi2 generate`, in the order in which its help shows them."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

_PROMPT = "What is shown"
_SIZE = "Size and sampling"
_RANKS = "Ranks and devices"
_RUN = "The run and its outputs"
_PARTS = "Where optional parts are, if not beside the checkpoint"


class Resolution(str, Enum):
    """Sizes that the released model is made for."""

    low = "272p"
    high = "540p"


class Device(str, Enum):
    """Kinds of device."""

    cpu = "cpu"
    cuda = "cuda"
    musa = "musa"


Checkpoint = Annotated[
    Path,
    typer.Argument(metavar="FOLDER", help="Folder with the transformer's shards and config.json."),
]
Prompt = Annotated[
    str | None,
    typer.Option(help="Text, plain or structured JSON.", rich_help_panel=_PROMPT),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(help="UTF-8 file that holds it.", rich_help_panel=_PROMPT),
]
TextFeatures = Annotated[
    Path | None,
    typer.Option(
        help="Safetensors file with the features of a prompt that was encoded elsewhere.",
        rich_help_panel=_PROMPT,
    ),
]
NegativePromptFile = Annotated[
    Path | None,
    typer.Option(
        help="File with the released negative prompt; its hash is checked.",
        rich_help_panel=_PROMPT,
    ),
]
AllowOtherNegativePrompt = Annotated[
    bool,
    typer.Option(
        "--allow-other-negative-prompt",
        help="Take another text there.",
        rich_help_panel=_PROMPT,
    ),
]
NoNegativePrompt = Annotated[
    bool,
    typer.Option(
        "--no-negative-prompt",
        help="Leave the unconditional branch without text.",
        rich_help_panel=_PROMPT,
    ),
]
Image = Annotated[
    list[Path] | None,
    typer.Option(
        # Any longer, and 80 columns have no room for the longest name.
        metavar="<path>",
        help="Reference image; may be repeated.",
        rich_help_panel=_PROMPT,
    ),
]
ResolutionName = Annotated[
    Resolution, typer.Option(help="448 x 256 or 896 x 512 pixels.", rich_help_panel=_SIZE)
]
Width = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 16.", show_default="the resolution's", rich_help_panel=_SIZE
    ),
]
Height = Annotated[
    int | None,
    typer.Option(
        help="Pixels, a multiple of 16.", show_default="the resolution's", rich_help_panel=_SIZE
    ),
]
NumFrames = Annotated[
    int | None,
    typer.Option(help="One more than a multiple of 4; 12.5 are a second.", rich_help_panel=_SIZE),
]
Seconds = Annotated[
    float | None,
    typer.Option(help="Length instead of --num-frames.", show_default="10", rich_help_panel=_SIZE),
]
NumInferenceSteps = Annotated[
    int | None,
    typer.Option(
        help="From noise to the clip.", show_default="the checkpoint's", rich_help_panel=_SIZE
    ),
]
Seed = Annotated[
    int | None,
    typer.Option(help="Of the noise.", show_default="the checkpoint's", rich_help_panel=_SIZE),
]
Shift = Annotated[
    float | None,
    typer.Option(
        help="Moves steps towards noise.",
        show_default="the checkpoint's",
        rich_help_panel=_SIZE,
    ),
]
VideoGuidanceScale = Annotated[
    float | None,
    typer.Option(
        help="How much the video leans on the prompt.",
        show_default="the checkpoint's",
        rich_help_panel=_SIZE,
    ),
]
AudioGuidanceScale = Annotated[
    float | None,
    typer.Option(
        help="How much the sound does.", show_default="the checkpoint's", rich_help_panel=_SIZE
    ),
]
Simulate = Annotated[
    int | None,
    typer.Option(
        help="Simulate so many ranks in this process. Without it, the ranks that torchrun or "
        "mpirun started, or one.",
        rich_help_panel=_RANKS,
    ),
]
UlyssesDegree = Annotated[
    int | None,
    typer.Option(
        help="Ranks that share the tokens.",
        show_default="all that --cfg-parallel-size leaves",
        rich_help_panel=_RANKS,
    ),
]
CfgParallelSize = Annotated[
    int,
    typer.Option(help="2 gives each branch of guidance its own ranks.", rich_help_panel=_RANKS),
]
ExpertParallelSize = Annotated[
    int | None,
    typer.Option(
        help="Ranks that share the experts.",
        show_default="the most that leaves no expert head to pad",
        rich_help_panel=_RANKS,
    ),
]
DeviceKind = Annotated[
    Device | None,
    typer.Option(show_default="what the machine has", rich_help_panel=_RANKS),
]
Backend = Annotated[
    str | None,
    typer.Option(
        help="Of torch.distributed.",
        show_default="the one that fits",
        rich_help_panel=_RANKS,
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        help="Threads of each process on the CPU; decides last bits there.",
        show_default="torch's",
        rich_help_panel=_RANKS,
    ),
]
Timeout = Annotated[
    float, typer.Option(help="Seconds that a rank waits for others.", rich_help_panel=_RANKS)
]
CompileStatic = Annotated[
    bool,
    typer.Option(
        "--compile",
        help="Compile the regions between exchanges, for this token count.",
        rich_help_panel=_RUN,
    ),
]
CompileDynamic = Annotated[
    bool,
    typer.Option(
        "--compile-dynamic", help="Compile them for any token count.", rich_help_panel=_RUN
    ),
]
Deterministic = Annotated[
    bool,
    typer.Option(
        "--deterministic",
        help="Only operations whose results never vary.",
        rich_help_panel=_RUN,
    ),
]
RouteSum = Annotated[
    str,
    typer.Option(
        help="Order in which experts' outputs are added: choice, or expert as in the "
        "reference's deterministic mode.",
        rich_help_panel=_RUN,
    ),
]
MoeBackend = Annotated[
    str,
    typer.Option(
        help="What runs the mixture of experts: torch, triton, or auto for what is known faster.",
        rich_help_panel=_RUN,
    ),
]
AttentionBackend = Annotated[
    str,
    typer.Option(
        help="What runs the attention: auto for what is known faster, torch, cudnn, flash, "
        "varlen, flash_attn, flex, cpu_flash or musa.",
        rich_help_panel=_RUN,
    ),
]
QkvBackend = Annotated[
    str,
    typer.Option(
        help="What runs norms, rotation and gates around the attention: torch, triton, or auto.",
        rich_help_panel=_RUN,
    ),
]
MhcBackend = Annotated[
    str,
    typer.Option(
        help="What runs the hyper-connections: torch, triton, or auto.",
        rich_help_panel=_RUN,
    ),
]
Output = Annotated[Path, typer.Option(help="Folder for all results.", rich_help_panel=_RUN)]
PrintHashes = Annotated[
    bool,
    typer.Option(
        "--print-hashes",
        help="Print the SHA-256 of the raw bytes of latents, frames and samples.",
        rich_help_panel=_RUN,
    ),
]
SaveEvery = Annotated[
    int,
    typer.Option(help="Steps between saved states; 0 saves none.", rich_help_panel=_RUN),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on with the unfinished run in the output folder, if there is one.",
        rich_help_panel=_RUN,
    ),
]
Overwrite = Annotated[
    bool,
    typer.Option("--overwrite", help="Discard a run in the output folder.", rich_help_panel=_RUN),
]
TextEncoder = Annotated[
    Path | None, typer.Option(help="Folder of Qwen3.5-27B.", rich_help_panel=_PARTS)
]
VideoVae = Annotated[
    Path | None,
    typer.Option(help="Wan2.2 VAE: diffusers folder or file.", rich_help_panel=_PARTS),
]
TurboDecoder = Annotated[
    Path | None, typer.Option(help="Turbo video decoder.", rich_help_panel=_PARTS)
]
AudioVae = Annotated[
    Path | None,
    typer.Option(help="Stable Audio Open 1.0: diffusers folder or file.", rich_help_panel=_PARTS),
]
