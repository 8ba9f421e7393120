"""`magi2 inspect`: what a checkpoint or a configuration holds, and what ranks would make of it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from magi2.cli import options

if TYPE_CHECKING:
    from magi2.config import Magi2Config
    from magi2.planning import RankLayout, WeightGroup
    from magi2.release import Release


def inspect(
    source: options.Source,
    ulysses_degree: options.UlyssesDegree = 1,
    cfg_parallel_size: options.CfgParallelSize = 1,
    expert_parallel_size: options.ExpertParallelSize = None,
) -> None:
    """Show parameters by part, memory and reading of each rank, and which parts are missing.

    Of a checkpoint only headers are read, and index and shards are checked against each other.
    """
    from magi2.cli.tables import make_console
    from magi2.planning import RankLayout, weight_groups

    release = _open(source)
    config = options.read_config(source) if release is None else release.config
    layout = RankLayout.of(
        config,
        (0, 0),
        ulysses=ulysses_degree,
        cfg=cfg_parallel_size,
        expert=expert_parallel_size,
    )
    groups = weight_groups(config)
    console = make_console()
    console.print(_describe(config))
    console.print(_parts_table(groups, layout, config))
    console.print(_ranks_table(groups, layout, config, release))
    if release is not None:
        _show_parts(console, release)


def _open(source: str) -> Release | None:
    """The checkpoint, if the source is a folder that holds one."""
    from magi2.checkpoint.index import INDEX_NAME
    from magi2.checkpoint.save import CONFIG_NAME
    from magi2.release import open_release

    path = Path(source)
    has_config_alone = (path / CONFIG_NAME).is_file() and not (path / INDEX_NAME).is_file()
    if not path.is_dir() or has_config_alone:
        return None
    return open_release(path)


def _describe(config: Magi2Config) -> str:
    moe = config.moe
    return (
        f"{config.num_layers} layers of {config.num_streams} streams of {config.hidden_size}, "
        f"{str(config.dtype).removeprefix('torch.')}; attention of {config.num_heads} heads"
        + (f" ({config.num_kv_heads} for keys)" if config.num_kv_heads != config.num_heads else "")
        + f" of {config.head_dim};\nmixture in {len(moe.layers)} layers: {moe.num_heads} heads of "
        f"{moe.num_experts} experts, {moe.top_k} chosen;\n"
        "weights of their own for video, audio and text in layers "
        f"{', '.join(map(str, config.multimodal_layers))}."
    )


def _parts_table(groups: list[WeightGroup], layout: RankLayout, config: Magi2Config) -> Any:
    from magi2.cli.tables import gib, make_table

    total = config.moe.num_heads
    local = layout.heads_local(total)
    rows = [
        (
            group.name,
            str(group.tensors),
            f"{group.elements:,}",
            _dtypes(group),
            gib(group.nbytes),
            gib(group.nbytes_local(local, total)),
        )
        for group in groups
    ]
    rows.append(
        (
            "all",
            str(sum(group.tensors for group in groups)),
            f"{sum(group.elements for group in groups):,}",
            "",
            gib(sum(group.nbytes for group in groups)),
            gib(sum(group.nbytes_local(local, total) for group in groups)),
        )
    )
    headers = ("part", "tensors", "parameters", "dtype", "memory", "of rank 0")
    return make_table("Parameters and buffers", headers, rows)


def _dtypes(group: WeightGroup) -> str:
    """The dtypes, that of most elements first."""
    names = {"bfloat16": "bf16", "float32": "fp32"}
    by_size = sorted(group.dtypes, key=group.dtypes.__getitem__, reverse=True)
    plain = [str(dtype).removeprefix("torch.") for dtype in by_size]
    return ", ".join(names.get(name, name) for name in plain)


def _ranks_table(
    groups: list[WeightGroup], layout: RankLayout, config: Magi2Config, release: Release | None
) -> Any:
    from magi2.cli.tables import gib, make_table
    from magi2.planning.reading import plan_reading

    checkpoint = None if release is None else release.checkpoint
    total = config.moe.num_heads
    rows = []
    for reading in plan_reading(config, layout, groups, checkpoint):
        held = sum(group.nbytes_local(len(reading.heads), total) for group in groups)
        heads = reading.heads
        shards = "" if checkpoint is None else f"{reading.num_shards} of {len(checkpoint.files)}"
        rows.append(
            (
                ", ".join(map(str, reading.ranks)),
                f"{heads.start} to {heads.stop - 1}" if len(heads) > 1 else _one_or_none(heads),
                gib(held),
                gib(reading.nbytes),
                shards,
            )
        )
    headers = ("ranks", "heads of the mixture", "weights", "reads", "shards")
    return make_table(f"Each rank of {layout.name}", headers, rows)


def _one_or_none(heads: range) -> str:
    return str(heads.start) if heads else "none"


def _show_parts(console: Any, release: Release) -> None:
    from magi2.release import PARTS

    console.print(f"Checkpoint in {release.folder}; beside it:", soft_wrap=True)
    for part in PARTS:
        path = release.parts.get(part.key)
        if path is not None:
            console.print(f"  [green]found[/]    {part.what}: {path}", soft_wrap=True)
    for part in release.missing():
        console.print(
            f"  [yellow]missing[/]  {part.what} ({part.flag}): {part.without}", soft_wrap=True
        )
