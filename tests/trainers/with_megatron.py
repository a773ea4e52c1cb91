"""Megatron-Core's GPT cut by our layout: each rank's layers, then a step of its pipeline, which wants a GPU."""

import json
import os

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.transformer.transformer_config import TransformerConfig

from tests.trainers import parity


def main() -> None:
    asked = parity.asked()
    dist.init_process_group("gloo")
    layout, size = asked["options"], dist.get_world_size()
    chunks = (layout.count("|") + 1) // size
    parallel_state.initialize_model_parallel(1, size, chunks if chunks > 1 else None)
    config = TransformerConfig(
        num_layers=asked["num_layers"],
        hidden_size=asked["hidden"],
        num_attention_heads=asked["heads"],
        pipeline_model_parallel_size=size,
        virtual_pipeline_model_parallel_size=chunks if chunks > 1 else None,
        pipeline_model_parallel_layout=layout,
        pipeline_dtype=torch.float32,
        use_cpu_initialization=True,
    )
    models = [
        GPTModel(
            config,
            get_gpt_layer_local_spec(),
            asked["vocab"],
            asked["seq_len"],
            pre_process=dist.get_rank() == 0 and chunk == 0,
            post_process=dist.get_rank() == size - 1 and chunk == chunks - 1,
            vp_stage=chunk if chunks > 1 else None,
        )
        for chunk in range(chunks)
    ]
    own = [[layer.layer_number - 1 for layer in model.decoder.layers] for model in models]
    gathered: list[object] = [None] * size
    dist.all_gather_object(gathered, own)
    said = "a step ran"
    try:
        get_forward_backward_func()(
            forward_step_func=lambda batches, model: (None, None),
            data_iterator=[iter([])] * chunks if chunks > 1 else iter([]),
            model=models if chunks > 1 else models[0],
            num_microbatches=asked["num_microbatches"],
            seq_length=asked["seq_len"],
            micro_batch_size=asked["microbatch_sequences"],
            forward_only=False,
        )
    except BaseException as error:
        said = f"{type(error).__name__}: {error}".splitlines()[0]
    if dist.get_rank() == 0:
        print("ANSWER " + json.dumps({"layers": gathered, "said": said, "torch": torch.__version__}), flush=True)
    os._exit(0)  # the other rank may wait for a message of the step that never was


if __name__ == "__main__":
    main()
