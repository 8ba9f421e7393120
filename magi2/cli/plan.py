"""`magi2 plan`: what a clip would need on given ranks."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from magi2.cli import options

if TYPE_CHECKING:
    from magi2.config import Magi2Config
    from magi2.geometry import Geometry
    from magi2.planning import DeviceProfile, StepPlan

_PREDICTED = "predicted"
_COMPARED_SIDE_BY_SIDE = 4


def plan(
    source: options.Source = "preview",
    resolution: options.Resolution = "272p",
    width: options.Width = None,
    height: options.Height = None,
    num_frames: options.NumFrames = 125,
    text_tokens: options.TextTokens = 222,
    negative_text_tokens: options.NegativeTextTokens = 222,
    ulysses_degree: options.UlyssesDegree = 1,
    cfg_parallel_size: options.CfgParallelSize = 1,
    expert_parallel_size: options.ExpertParallelSize = None,
    compare: Annotated[
        list[str] | None,
        typer.Option(
            help="A topology as ULYSSES,CFG or ULYSSES,CFG,EXPERTS; repeated for each to compare.",
            rich_help_panel=options.RANKS,
        ),
    ] = None,
    device: options.DeviceName = "h200",
    device_file: options.DeviceFile = None,
    num_inference_steps: Annotated[
        int, typer.Option(min=1, help="Steps of a clip.", rich_help_panel=options.SIZE)
    ] = 100,
    output_json: Annotated[
        Path | None, typer.Option("--json", help="Also write all numbers to this file.")
    ] = None,
) -> None:
    """Show tokens, bytes per exchange, memory and predicted step time; nothing is run."""
    config = options.read_config(source)
    profile = options.read_device(device, device_file)
    geometry = options.read_geometry(resolution, width, height, num_frames)
    texts = (text_tokens, negative_text_tokens)
    if compare:
        sizes = [_parse(text) for text in compare]
    else:
        sizes = [(ulysses_degree, cfg_parallel_size, expert_parallel_size)]
    plans = _make_plans(config, geometry, texts, sizes, profile)
    _show(plans, geometry, texts, profile, num_inference_steps, in_detail=not compare)
    if output_json is not None:
        output_json.parent.mkdir(parents=True, exist_ok=True)
        document = [_document(plan) for plan in plans]
        output_json.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def _parse(text: str) -> tuple[int, int, int | None]:
    parts = text.split(",")
    if len(parts) not in (2, 3) or not all(part.strip().isdigit() for part in parts):
        raise ValueError(
            f"--compare {text}: expected ULYSSES,CFG or ULYSSES,CFG,EXPERTS, such as 8,1,4."
        )
    ulysses, cfg, *expert = (int(part) for part in parts)
    return ulysses, cfg, expert[0] if expert else None


def _make_plans(
    config: Magi2Config,
    geometry: Geometry,
    texts: tuple[int, int],
    sizes: list[tuple[int, int, int | None]],
    device: DeviceProfile,
) -> list[StepPlan]:
    from magi2.planning import RankLayout, branch_tokens, plan_step, weight_groups

    tokens = branch_tokens(geometry, texts)
    layouts = [
        RankLayout.of(config, tokens, ulysses=ulysses, cfg=cfg, expert=expert)
        for ulysses, cfg, expert in sizes
    ]
    weights = weight_groups(config)
    return [
        plan_step(config, layout, device, text_tokens=sum(texts), weights=weights)
        for layout in layouts
    ]


def _show(
    plans: list[StepPlan],
    geometry: Geometry,
    texts: tuple[int, int],
    device: DeviceProfile,
    num_steps: int,
    *,
    in_detail: bool,
) -> None:
    from magi2.cli.tables import make_console

    console = make_console()
    video, audio = geometry.num_video_tokens, geometry.audio_length
    console.print(
        f"{geometry.width} x {geometry.height}, {geometry.num_frames} frames: {video:,} video and "
        f"{audio:,} audio tokens, with {texts[0]:,} and {texts[1]:,} of text: "
        f"{sum(plans[0].layout.tokens):,} in both branches."
    )
    if in_detail:
        for table in _detail_tables(plans[0], num_steps):
            console.print(table)
    else:
        for table in _comparisons(plans):
            console.print(table)
    console.print(
        f"Times are predicted, not measured: {device.name} at {device.matmul_fraction:.0%} of its "
        f"matrix rate and {device.bandwidth_fraction:.0%} of its bandwidths ({device.source}); "
        "kernels that read and write once, nothing overlapped. "
        "Activations are an estimate from one layer that was measured on an H200.",
        style="dim",
    )


def _detail_tables(plan: StepPlan, num_steps: int) -> list[Any]:
    return [_exchange_table(plan), _memory_table(plan), _time_table(plan, num_steps)]


def _exchange_table(plan: StepPlan) -> Any:
    from magi2.cli.tables import make_table, megabytes, milliseconds

    seconds = plan.exchange_seconds
    rows = [
        (
            exchange.name,
            str(len(exchange.ranks)),
            str(exchange.count),
            megabytes(exchange.buffer_bytes),
            megabytes(exchange.sent_bytes),
            milliseconds(seconds[exchange.name] / exchange.count),
        )
        for exchange in plan.exchanges
    ]
    total = sum(exchange.count * exchange.sent_bytes for exchange in plan.exchanges)
    rows.append(
        ("all in a step", "", "", "", megabytes(total), milliseconds(sum(seconds.values())))
    )
    title = f"Exchanges of {plan.layout.name}: {plan.layout.tokens_local:,} tokens a rank"
    headers = (
        *("", "\nranks", "in a\nstep", "buffer\nof a rank", "\nleaves it"),
        f"each,\n{_PREDICTED}",
    )
    return make_table(title, headers, rows)


def _memory_table(plan: StepPlan) -> Any:
    from magi2.cli.tables import gib, make_table

    rows = [
        ("routed experts", gib(plan.expert_bytes)),
        ("other weights, whole on every rank", gib(plan.other_weight_bytes)),
        ("the packed request", gib(plan.request_bytes)),
        ("activations", gib(plan.activation_bytes)),
        ("all", gib(plan.memory_bytes)),
        (f"of {plan.device.name}", gib(plan.device.memory_bytes)),
    ]
    caption = (
        "" if plan.fits else "[bold red]This does not fit.[/] Share the experts among more ranks."
    )
    return make_table("Memory of the rank that has the most", ("", ""), rows, caption=caption)


def _time_table(plan: StepPlan, num_steps: int) -> Any:
    from magi2.cli.tables import make_table, milliseconds

    def row(name: str, seconds: float, flops: float) -> tuple[str, str, str, str]:
        operations = f"{flops / 1e12:,.2f}" if flops else ""
        return name, milliseconds(seconds), f"{seconds / plan.seconds:.0%}", operations

    rows = [
        row(name, seconds, plan.work[name].flops)
        for name, seconds in plan.component_seconds.items()
    ]
    rows.append(row("exchanges", sum(plan.exchange_seconds.values()), 0))
    rows.append(row("all", plan.seconds, sum(work.flops for work in plan.work.values())))
    caption = (
        f"{num_steps} steps: {plan.seconds * num_steps:,.1f} s, without encoding and decoding."
    )
    headers = ("", _PREDICTED, "share", "10^12 operations")
    return make_table("One step", headers, rows, caption=caption)


def _comparisons(plans: list[StepPlan]) -> list[Any]:
    """A column for each topology, as many in a table as 80 columns have room for."""
    from magi2.cli.tables import make_table

    fastest = min(plan.seconds for plan in plans)
    names = (
        *("", "ranks", "tokens of a rank", "weights", "memory", "fits", "sent in a step"),
        *("computing", "exchanges", "step", "times the fastest"),
    )
    columns = [
        (
            f"{plan.layout.ulysses},{plan.layout.cfg},{plan.layout.expert}",
            str(plan.layout.world_size),
            f"{plan.layout.tokens_local:,}",
            f"{(plan.expert_bytes + plan.other_weight_bytes) / 2**30:,.2f} GiB",
            f"{plan.memory_bytes / 2**30:,.2f} GiB",
            "yes" if plan.fits else "[bold red]no[/]",
            f"{sum(e.count * e.sent_bytes for e in plan.exchanges) / 1e6:,.0f} MB",
            f"{1e3 * sum(plan.component_seconds.values()):,.1f} ms",
            f"{1e3 * sum(plan.exchange_seconds.values()):,.1f} ms",
            f"{1e3 * plan.seconds:,.1f} ms",
            f"{plan.seconds / fastest:.2f}",
        )
        for plan in plans
    ]
    title = "The busiest rank of each topology: ulysses,cfg,experts"
    tables = []
    for start in range(0, len(columns), _COMPARED_SIDE_BY_SIDE):
        headers, *rows = zip(names, *columns[start : start + _COMPARED_SIDE_BY_SIDE], strict=True)
        tables.append(make_table(title, headers, rows))
    return tables


def _document(plan: StepPlan) -> dict[str, Any]:
    layout = plan.layout
    return {
        "topology": {"ulysses": layout.ulysses, "cfg": layout.cfg, "expert": layout.expert},
        "tokens": list(layout.tokens),
        "tokens_of_a_rank": layout.tokens_local,
        "bytes": {
            "routed_experts": plan.expert_bytes,
            "other_weights": plan.other_weight_bytes,
            "request": plan.request_bytes,
            "activations": plan.activation_bytes,
            "all": plan.memory_bytes,
        },
        "fits": plan.fits,
        "exchanges": [
            {
                "name": exchange.name,
                "count": exchange.count,
                "buffer_bytes": exchange.buffer_bytes,
                "sent_bytes": exchange.sent_bytes,
                "predicted_seconds": plan.exchange_seconds[exchange.name],
            }
            for exchange in plan.exchanges
        ],
        "components": {
            name: {
                "flops": plan.work[name].flops,
                "bytes": plan.work[name].nbytes,
                "predicted_seconds": seconds,
            }
            for name, seconds in plan.component_seconds.items()
        },
        "predicted_step_seconds": plan.seconds,
        "device": dataclasses.asdict(plan.device),
    }
