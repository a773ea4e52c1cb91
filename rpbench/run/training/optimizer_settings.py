"""The optimizer that the engine is given, of what a request says about it."""

from rpbench.config.choices import OptimizerConfig
from rpbench.engine.state.updates.loss_scale import LossScaling
from rpbench.engine.state.updates.optimizer import OptimizerSettings


def optimizer_settings(asked: OptimizerConfig, loss_scaling: LossScaling | None = None) -> OptimizerSettings:
    """Rate, decay, warm-up, clipping and the optimizer's own constants."""
    return OptimizerSettings(
        asked.learning_rate,
        asked.weight_decay,
        asked.num_warmup_steps,
        asked.clip_norm,
        name=asked.name,
        momentum=asked.momentum,
        loss_scaling=loss_scaling,
    )
