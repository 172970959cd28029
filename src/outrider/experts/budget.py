"""How many slots each layer gets under a budget.

Slots are partitioned per layer: a global cache smaller than one token's working set (layers x experts per token) hits
nothing at all, since each layer's experts are evicted before the next token returns to them. The floor is therefore
one token's working set in every layer.
"""

from outrider.config import ModelConfig, SlotBudget, format_bytes
from outrider.errors import ConfigError


def slots_per_layer(config: ModelConfig, budget: SlotBudget, record_nbytes: int) -> dict[int, int]:
    """Slots of every MoE layer, at most the number of experts.

    A byte budget counts whole records (`record_nbytes` each); what does not divide evenly goes to the first layers.

    Raises: ConfigError if a layer would get fewer slots than one token needs, with the smallest budget that works.
    """
    layers, experts, floor = config.moe_layers, config.num_experts, config.experts_per_token
    if budget.fraction is not None:
        slots = dict.fromkeys(layers, int(budget.fraction * experts + 1e-9))
    elif budget.slots is not None:
        slots = dict.fromkeys(layers, min(budget.slots, experts))
    else:
        each, more = divmod((budget.nbytes or 0) // record_nbytes, len(layers))
        slots = {layer: min(each + (i < more), experts) for i, layer in enumerate(layers)}
    if min(slots.values()) < floor:
        least = format_bytes(floor * len(layers) * record_nbytes)
        raise ConfigError(
            f"the expert slots hold {min(slots.values())} experts a layer, below the floor of {floor} that one token "
            f"needs; give at least {floor} slots, {100 * floor / experts:.4g}% or {least}"
        )
    return slots
