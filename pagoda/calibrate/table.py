"""Prints hardware for people: each figure in human units, its spread, and what it describes."""

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from rich.table import Column, Table

from pagoda.memory.sizes import format_bytes
from pagoda.simulate.hardware import Figure, Hardware

_LABELS = {
    "cpu": "CPU",
    "device": "GPU",
    "link": "link",
    "ssd": "SSD",
    "bf16": "bf16",
    "fp32": "fp32",
    "memory_bytes": "memory",
    "memory_bytes_per_s": "memory bandwidth",
    "update_params_per_s": "update",
    "peak_flop_per_s": "fastest product",
    "reached_flop_per_s": "transformer block",
    "copy_bytes_per_s": "copy to a device in RAM",
    "gradient_bytes_per_s": "gradient stored",
    "task_switch_s": "compute lost to each piece of other work",
    "parameter_s": "bookkeeping of each parameter in a step",
    "h2d_bytes_per_s": "RAM to GPU",
    "d2h_bytes_per_s": "GPU to RAM",
    "both_bytes_per_s": "both at once",
    "capacity_bytes": "capacity",
    "read_bytes_per_s": "read",
    "write_bytes_per_s": "write",
    "beside_bytes_per_s": "both at once beside compute",
    "small": "in small transfers",
    "endurance_bytes": "rated writes",
    "cpu_share": "cores taken by transfers",
    "intra_node_bytes_per_s": "collectives in the node",
    "inter_node_bytes_per_s": "collectives between nodes",
}


def figure_table(hardware: Hardware) -> Table:
    """A table with a row per figure."""
    value, spread = Column("value", justify="right", no_wrap=True), Column("spread", justify="right")
    table = Table("figure", value, spread, "of", title=f"{hardware.name}, {hardware.cpu.cores} cores")
    for names, figure in _walk(hardware, ()):
        label = " ".join(_LABELS[name] for name in names)
        varies = f"{figure.spread:.0%}" if figure.spread else "-"
        table.add_row(label, _value(names[-1], figure.value), varies, _origin(figure.source))
    return table


def _origin(source: str) -> str:
    """A source without the words that all measured figures share."""
    said, _, note = source.partition(": ")
    return (note or "-") if said.startswith("measured ") else source


def _walk(part: Any, names: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Figure]]:
    """Each figure of a hardware with the names of the fields that lead to it, in the order of fields."""
    for field in fields(part):
        value = getattr(part, field.name)
        if isinstance(value, Figure):
            yield (*names, field.name), value
        elif is_dataclass(value):
            yield from _walk(value, (*names, field.name))


def _value(name: str, value: float) -> str:
    """A figure in human units. The field's name tells its base unit."""
    if name in ("task_switch_s", "parameter_s"):
        return f"{value * 1e3:.2f} ms"
    if name.endswith("flop_per_s"):
        return f"{value / 1e12:,.2f} TFLOP/s" if value >= 1e12 else f"{value / 1e9:,.1f} GFLOP/s"
    if name.endswith("params_per_s"):
        return f"{value / 1e9:,.2f} G parameters/s"
    if name.endswith("bytes_per_s"):
        return f"{value / 1e9:,.2f} GB/s"
    if name.endswith("share"):
        return f"{value:.1%}"
    if name == "memory_bytes":
        return format_bytes(round(value))
    return f"{value / 1e12:,.2f} TB"
