"""Ulysses sequence parallelism: exchanges, head shards and ranks inside one process."""

from ulysses_comm.agreement import Agreement, RankDisagreementError
from ulysses_comm.attention import UlyssesAttention
from ulysses_comm.bootstrap import init_distributed
from ulysses_comm.collective import read_split_sizes
from ulysses_comm.exchange import (
    scatter_heads_gather_seqlen,
    scatter_seqlen_gather_head_shards,
    scatter_seqlen_gather_heads,
    scatter_seqlen_gather_heads_each,
    start_scatter_heads_gather_seqlen,
    start_scatter_seqlen_gather_head_shards,
    start_scatter_seqlen_gather_heads,
    start_scatter_seqlen_gather_heads_each,
)
from ulysses_comm.group import LONE_RANK, Group
from ulysses_comm.head_shards import (
    as_send_buffer,
    empty_head_shards,
    flatten_head_shards,
    pack_head_shards,
    pin_head_layout,
)
from ulysses_comm.head_split import HeadSplit, local_kv_heads, split_query_groups
from ulysses_comm.layout import balanced_split_sizes
from ulysses_comm.pending import Pending
from ulysses_comm.per_head import PER_HEAD_ARGUMENTS, HeadIndex, PerHead
from ulysses_comm.producer import HeadScatterTarget, open_head_scatter
from ulysses_comm.sequence import (
    SequenceDispatcher,
    gather_sequence,
    shard_sequence,
    sum_gradients,
    sum_losses,
)
from ulysses_comm.simulate import (
    AbortedError,
    AsyncMisuseError,
    CostModel,
    DeadlockError,
    Link,
    MismatchError,
    Prediction,
    SimulatedProcessGroup,
    Simulation,
    SimulationError,
    Traffic,
    head_exchange_bytes,
    predict,
    record_traffic,
    simulate,
    simulate_all_to_all,
    simulate_world,
)
from ulysses_comm.symmetric.choice import (
    TransportChoice,
    explain_transport,
    transport_of,
    use_transport,
)
from ulysses_comm.workspace import Workspace

__all__ = [
    "LONE_RANK",
    "PER_HEAD_ARGUMENTS",
    "AbortedError",
    "Agreement",
    "AsyncMisuseError",
    "CostModel",
    "DeadlockError",
    "Group",
    "HeadIndex",
    "HeadScatterTarget",
    "HeadSplit",
    "Link",
    "MismatchError",
    "Pending",
    "PerHead",
    "Prediction",
    "RankDisagreementError",
    "SequenceDispatcher",
    "SimulatedProcessGroup",
    "Simulation",
    "SimulationError",
    "Traffic",
    "TransportChoice",
    "UlyssesAttention",
    "Workspace",
    "as_send_buffer",
    "balanced_split_sizes",
    "empty_head_shards",
    "explain_transport",
    "flatten_head_shards",
    "gather_sequence",
    "head_exchange_bytes",
    "init_distributed",
    "local_kv_heads",
    "open_head_scatter",
    "pack_head_shards",
    "pin_head_layout",
    "predict",
    "read_split_sizes",
    "record_traffic",
    "scatter_heads_gather_seqlen",
    "scatter_seqlen_gather_head_shards",
    "scatter_seqlen_gather_heads",
    "scatter_seqlen_gather_heads_each",
    "shard_sequence",
    "simulate",
    "simulate_all_to_all",
    "simulate_world",
    "split_query_groups",
    "start_scatter_heads_gather_seqlen",
    "start_scatter_seqlen_gather_head_shards",
    "start_scatter_seqlen_gather_heads",
    "start_scatter_seqlen_gather_heads_each",
    "sum_gradients",
    "sum_losses",
    "transport_of",
    "use_transport",
]
