"""What devices and the links between them can do, as their makers state it."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from pathlib import Path

from magi2.checks import parse_json
from ulysses_comm import CostModel, Link

# Not measured here: what well-written kernels and collectives commonly reach of a stated peak.
MATMUL_FRACTION = 0.6
BANDWIDTH_FRACTION = 0.8
# Until the first byte of a collective arrives, inside a node and across nodes.
LINK_LATENCY = 10e-6
NETWORK_LATENCY = 25e-6


@dataclass(frozen=True, kw_only=True)
class DeviceProfile:
    """One device, its link to others in its node, and its share of the network.

    Attributes:
        name: For people.
        source: Where the numbers are from.
        bf16_flops: Dense bfloat16 matrix products, operations per second.
        fp32_flops: Float32 without tensor cores, operations per second.
        memory_bytes: Of the device.
        memory_bandwidth: Bytes per second.
        link_bandwidth: Bytes per second in each direction to the other devices of a node.
        network_bandwidth: Bytes per second in each direction to other nodes.
        ranks_per_node: Devices of a node.
        matmul_fraction: What is reached of the rates.
        bandwidth_fraction: What is reached of the bandwidths.

    Raises:
        ValueError: If a number is not positive.
    """

    name: str
    source: str
    bf16_flops: float
    fp32_flops: float
    memory_bytes: float
    memory_bandwidth: float
    link_bandwidth: float
    network_bandwidth: float
    ranks_per_node: int = 8
    matmul_fraction: float = MATMUL_FRACTION
    bandwidth_fraction: float = BANDWIDTH_FRACTION

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in ("name", "source"):
                continue
            if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
                raise ValueError(f"device {field.name}={value!r}: expected a positive number.")

    @classmethod
    def from_file(cls, path: str | Path) -> DeviceProfile:
        """Read a profile from a JSON object with this class's attributes as keys.

        Raises:
            ValueError: If it is none, or cannot be read.
        """
        try:
            document = parse_json(Path(path).read_bytes())
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{path} cannot be read as a device profile: {error}. Expected a JSON object with "
                "the attributes of DeviceProfile."
            ) from error
        known = {field.name: field.default for field in dataclasses.fields(cls)}
        required = {name for name, default in known.items() if default is dataclasses.MISSING}
        given = set(document) if isinstance(document, dict) else set()
        if not required <= given or not given <= set(known):
            raise ValueError(
                f"{path} has the keys {sorted(given)}: expected {sorted(required)}, and perhaps "
                f"{sorted(set(known) - required)}."
            )
        return cls(**document)

    @property
    def links(self) -> CostModel:
        """How long exchanges take."""
        share = self.bandwidth_fraction
        network = Link(latency=NETWORK_LATENCY, bandwidth=self.network_bandwidth * share)
        inside = Link(latency=LINK_LATENCY, bandwidth=self.link_bandwidth * share)
        if self.ranks_per_node == 1:
            return CostModel.one_level(network)
        return CostModel.two_level(
            ranks_per_node=int(self.ranks_per_node), intra=inside, inter=network
        )

    def seconds(self, *, bf16: float, fp32: float, nbytes: float) -> float:
        """Of work that computes while it reads and writes: the longer of the two."""
        computing = (bf16 / self.bf16_flops + fp32 / self.fp32_flops) / self.matmul_fraction
        return max(computing, nbytes / self.memory_bandwidth / self.bandwidth_fraction)


# NVLink figures on data sheets are of both directions together; here is one. 400 Gbit/s a device is
# what HGX and DGX systems of these generations have (200 Gbit/s of the A100's).
DEVICES = {
    "h200": DeviceProfile(
        name="NVIDIA H200 SXM",
        source="NVIDIA H200 data sheet (dense rates); 400 Gbit/s network",
        bf16_flops=989e12,
        fp32_flops=67e12,
        memory_bytes=141e9,
        memory_bandwidth=4.8e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
    ),
    "h100": DeviceProfile(
        name="NVIDIA H100 SXM",
        source="NVIDIA H100 data sheet (dense rates); 400 Gbit/s network",
        bf16_flops=989e12,
        fp32_flops=67e12,
        memory_bytes=80e9,
        memory_bandwidth=3.35e12,
        link_bandwidth=450e9,
        network_bandwidth=50e9,
    ),
    "a100": DeviceProfile(
        name="NVIDIA A100 SXM 80 GB",
        source="NVIDIA A100 data sheet (dense rates); 200 Gbit/s network",
        bf16_flops=312e12,
        fp32_flops=19.5e12,
        memory_bytes=80e9,
        memory_bandwidth=2.039e12,
        link_bandwidth=300e9,
        network_bandwidth=25e9,
    ),
}
