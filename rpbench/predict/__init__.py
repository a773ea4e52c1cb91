"""Predictions: tokens per second, memory verdicts and longest sequences of whole training systems on a machine."""

from rpbench.predict.prediction import Prediction, predict
from rpbench.predict.systems import SYSTEMS

__all__ = ["SYSTEMS", "Prediction", "predict"]
