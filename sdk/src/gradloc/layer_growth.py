"""How much each layer's norm grew over its healthy one, and which layers explode. Pure; knows no tensor."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from gradloc.layers import block_index, block_of, kind_of

GROWTH_MATERIAL = 4.0
HETEROGENEITY = 8.0  # weakest exploding block against the strongest calm one


@dataclass(frozen=True)
class LayerGrowth:
    """Growth of each layer key and block over its healthy norm, and which of them explode."""

    by_key: dict[str, float]
    keys_exploding: tuple[str, ...]
    blocks_exploding: tuple[str, ...]
    kinds_exploding: tuple[str, ...]
    growth_exploding_min: float | None
    growth_calm_max: float | None

    @property
    def is_heterogeneous(self) -> bool:
        """Some transformer blocks explode while others stay calm."""
        if self.growth_exploding_min is None or self.growth_calm_max is None:
            return False
        return self.growth_exploding_min >= HETEROGENEITY * self.growth_calm_max


def layer_growth(now: Mapping[str, float], healthy: Mapping[str, float]) -> LayerGrowth:
    """Compare layer norms with healthy ones. Exploding: at least GROWTH_MATERIAL, and nearer (on a log scale) to the
    worst layer than to healthy."""
    by_key = {key: _ratio(now[key], healthy[key]) for key in now if key in healthy}
    if not by_key:
        return LayerGrowth({}, (), (), (), None, None)
    blocks: dict[str, tuple[float, float]] = {}
    for key in by_key:
        square_now, square_healthy = blocks.get(block_of(key), (0.0, 0.0))
        blocks[block_of(key)] = (square_now + now[key] ** 2, square_healthy + healthy[key] ** 2)
    by_block = {name: math.sqrt(_ratio(*squares)) for name, squares in blocks.items()}
    bar = max(GROWTH_MATERIAL, math.sqrt(max(by_block.values())))
    exploding = [name for name, growth in by_block.items() if growth >= bar]
    numbered = {name: growth for name, growth in by_block.items() if block_index(name) is not None}
    hot = [growth for name, growth in numbered.items() if name in exploding]
    calm = [growth for name, growth in numbered.items() if name not in exploding]
    kinds = {kind_of(key) for key, growth in by_key.items() if block_of(key) in exploding and growth >= GROWTH_MATERIAL}
    return LayerGrowth(
        by_key=by_key,
        keys_exploding=tuple(key for key, growth in by_key.items() if growth >= bar),
        blocks_exploding=tuple(sorted(exploding, key=_block_order)),
        kinds_exploding=tuple(sorted(kinds)),
        growth_exploding_min=min(hot) if hot else None,
        growth_calm_max=max(calm) if calm else None,
    )


def _ratio(now: float, healthy: float) -> float:
    if healthy > 0:
        return now / healthy
    return math.inf if now > 0 else 1.0


def _block_order(name: str) -> tuple[int, str]:
    index = block_index(name)
    return (-1 if name == "embedding" else 1 << 30 if index is None else index, name)
