"""Cuts of a model's layers that another program does not make, although its options have the words."""

from rpbench.workload.architecture import Architecture


def torchtitan_refuses(model: Architecture, tensor: int, expert: int, expert_tensor: int, sharing: int) -> str:
    """Why torchtitan does not cut the layers of a model like this; empty if it does.

    It deals experts among the devices that are `sharing` parameters, tensor shards included.

    Source: torchtitan 0.3, `Decoder.Config.update_from_config`, `ParallelismConfig` and `moe_sharding.py`.
    """
    if model.key_value_heads % tensor:
        return (
            f"tensor={tensor} of {model.key_value_heads} heads of keys: torchtitan copies none; take a divisor of "
            f"{model.key_value_heads}"
        )
    if model.experts is None:
        return ""
    if sharing % expert:
        return (
            f"expert={expert} on {sharing} devices that share parameters: torchtitan deals experts among these alone; "
            "take mesh.shard=parameters, or a divisor of them"
        )
    if expert_tensor != (takes := 1 if expert > 1 else tensor):
        return (
            f"expert_tensor={expert_tensor} with expert={expert} and tensor={tensor}: torchtitan cuts experts that are "
            f"dealt into 1 and others as other matrices; take mesh.expert_tensor={takes}"
        )
    return ""
