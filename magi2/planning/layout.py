"""How many tokens, heads and experts a rank of a topology gets, without the ranks."""

from __future__ import annotations

from dataclasses import dataclass

from magi2.config import Magi2Config
from magi2.geometry import Geometry
from magi2.topology import heads_per_rank, usable_group_sizes
from ulysses_comm import balanced_split_sizes


def branch_tokens(
    geometry: Geometry,
    text_lengths: tuple[int, int],
    *,
    image_size: tuple[int, int] | None = None,
    num_images: int = 0,
) -> tuple[int, int]:
    """Tokens of the conditional and the unconditional branch, without padding.

    Args:
        geometry: The clip.
        text_lengths: Text tokens of each branch.
        image_size: Rows and columns of latents of every reference image.
        num_images: Reference images, with a special token each.
    """
    rows, columns = image_size or (0, 0)
    common = geometry.num_video_tokens + geometry.audio_length + num_images * (1 + rows * columns)
    return common + text_lengths[0], common + text_lengths[1]


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """What the busiest rank of a topology has.

    Args:
        ulysses: Ranks that share the tokens of a sequence group.
        cfg: 1 for both branches in every group, 2 for a group of ranks each.
        expert: Ranks that share the experts, inside a sequence group.
        tokens: Of the two branches.
    """

    ulysses: int
    cfg: int
    expert: int
    tokens: tuple[int, int]

    @classmethod
    def of(
        cls,
        config: Magi2Config,
        tokens: tuple[int, int],
        *,
        ulysses: int = 1,
        cfg: int = 1,
        expert: int | None = None,
    ) -> RankLayout:
        """Check a topology against a model.

        Args:
            config: The model's.
            tokens: Of the two branches.
            ulysses: As in the class.
            cfg: As in the class.
            expert: As in the class; None for the most that leaves no head of the mixture to pad.

        Raises:
            ValueError: If the model cannot run so.
        """
        usable = usable_group_sizes(config.num_heads, config.num_kv_heads)
        if ulysses not in usable:
            raise ValueError(
                f"ulysses degree {ulysses} does not divide {config.num_heads} query and "
                f"{config.num_kv_heads} key/value heads: expected one of {usable}."
            )
        if cfg not in (1, 2):
            raise ValueError(f"cfg parallel size {cfg}: expected 1 or 2.")
        if expert is None:
            expert = usable_group_sizes(ulysses, config.moe.num_heads)[-1]
        if expert < 1 or ulysses % expert:
            raise ValueError(
                f"expert parallel size {expert} does not divide the ulysses degree {ulysses}: "
                f"expected one of {usable_group_sizes(ulysses)}."
            )
        return cls(ulysses=ulysses, cfg=cfg, expert=expert, tokens=tokens)

    @property
    def name(self) -> str:
        """Such as "8 x 1, experts over 4"."""
        return f"ulysses {self.ulysses} x cfg {self.cfg}, experts over {self.expert}"

    @property
    def world_size(self) -> int:
        """All ranks."""
        return self.ulysses * self.cfg

    @property
    def sequences(self) -> tuple[int, ...]:
        """Lengths of the sequences that the busiest sequence group runs."""
        return self.tokens if self.cfg == 1 else (max(self.tokens),)

    @property
    def split_sizes(self) -> tuple[int, ...]:
        """Tokens of each rank of that group."""
        return tuple(balanced_split_sizes(sum(self.sequences), self.ulysses))

    @property
    def tokens_local(self) -> int:
        """Tokens of its busiest rank."""
        return max(self.split_sizes)

    @property
    def expert_tokens(self) -> int:
        """Tokens that a rank's experts meet: those of its whole expert group."""
        return sum(self.split_sizes[: self.expert])

    def heads_local(self, num_heads: int, expert_rank: int = 0) -> int:
        """Heads of the mixture that an expert rank holds; the first holds the most."""
        run = heads_per_rank(num_heads, self.expert)
        return max(0, min(run, num_heads - expert_rank * run))
