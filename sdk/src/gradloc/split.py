"""A model split over processes by FSDP2: what they do in lockstep, and what they tell each other.

Every process runs the same localization. A pass through a sharded model is a meeting of all, so the rows of each pass
are dealt out, and who has none left runs another's under coefficients of zero. Of parameters and gradients a process
holds its shard; what is decided by is added up or gathered first, so all decide alike. Knows no snapshot and nothing
of how processes are started. Shapes: B rows, R positions with a logp.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from gradloc.policy import ActivePart, Turn, cut


class Split:
    """The process of this rank among `size`, which share one default process group (gloo at least)."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @classmethod
    def of_this_process(cls) -> "Split":
        """As the default process group has it."""
        return cls(dist.get_rank(), dist.get_world_size())

    def turns(
        self, parts: Iterable[tuple[int, ActivePart]], is_kept: Callable[[ActivePart], bool] = lambda _part: False
    ) -> Iterator[Turn]:
        """This process's passes, as many as everybody else has. A row is always the same process's: what it remembers
        of it, such as the experts chosen, is remembered there. is_kept: what is not cut by rows."""
        dealt: list[list[Turn]] = [[] for _ in range(self.size)]
        for batch, part in parts:
            owners = [(batch + (0 if is_kept(part) else row)) % self.size for row in part.rows.tolist()]
            for rank, turns in enumerate(dealt):
                own = [at for at, owner in enumerate(owners) if owner == rank]
                if own:
                    turns.append(Turn(batch, _narrowed(part, own), rank == self.rank))
        for number in range(max(len(turns) for turns in dealt)):
            own_turns = dealt[self.rank]
            yield (
                own_turns[number]
                if number < len(own_turns)
                else next(turns[number] for turns in dealt if number < len(turns))
            )

    def together(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Float64 tensors on the host that are NaN where another process knows more."""
        if not tensors:
            return []
        own = torch.cat([tensor.flatten() for tensor in tensors])
        gathered = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(gathered, own)
        known = gathered[0]
        for one in gathered[1:]:
            known = torch.where(known.isnan(), one, known)
        parts = torch.split(known, [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for part, tensor in zip(parts, tensors, strict=True)]

    def rows_together(
        self, found: Mapping[tuple[int, int], Tensor], rows: Sequence[tuple[int, int]], widths: Sequence[int]
    ) -> dict[tuple[int, int], Tensor]:
        """Values float64 [R] of these rows, whoever found them. widths: R by batch."""
        nothing = [torch.full((widths[batch],), torch.nan, dtype=torch.float64) for batch, _ in rows]
        own = [found.get(row, blank) for row, blank in zip(rows, nothing, strict=True)]
        return dict(zip(rows, self.together(own), strict=True))

    def all_have(self, own: Sequence[bool]) -> list[bool]:
        """What every process says yes to."""
        votes = torch.tensor([float(one) for one in own], dtype=torch.float64)
        dist.all_reduce(votes, op=dist.ReduceOp.MIN)
        return [bool(vote) for vote in votes]


def _narrowed(part: ActivePart, at: list[int]) -> ActivePart:
    """Some rows of a part, as wide as before: who computes them changes nothing else."""
    rows = part.rows[at]
    return replace(part, rows=rows, batch=cut(part.source, rows, part.source.first_position + part.num_columns))
