"""Modules of the models: Qwen3, Llama, GPT-OSS and a small GPT, with random weights; and the tokens they train on."""

from rpbench.models.build import build_layer, build_model, shared_parameters
from rpbench.models.data import Batch, Data, SyntheticTokens, TextTokens
from rpbench.models.layers import DecoderLayer, Embedding, Head
from rpbench.models.loss import linear_cross_entropy
