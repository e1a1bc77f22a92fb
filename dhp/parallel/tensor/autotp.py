"""DeepSpeed's automatic tensor parallelism (AutoTP), as slices.

What is cut how is transformers' tensor-parallel plan of the model, as with the tensor parallelism of
`dhp.models.load`; the layers that compute with the slices, and their collectives, are DeepSpeed's. The engine is
left out: gradients and the optimizer are those of `dhp.parallel.optim.replicated`, which knows the norm of both
parts."""

from typing import Any

import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from dhp.core.errors import ConfigError
from dhp.parallel.deepspeed import import_deepspeed
from dhp.parallel.tensor.slices import mark_cut

_OF_THE_VOCABULARY = ("embedding_rowwise", "colwise_gather_output")  # styles of embedding and head, which are cut below


def split_by_autotp(model: Any, mesh: DeviceMesh) -> None:
    """Cut a transformers model, which every rank holds whole, over the ranks of `mesh`, in place.

    The head keeps its rank's part of the vocabulary to itself (no logits are gathered), and the embedding is cut with
    it. Raises ConfigError where DeepSpeed has no layer for the plan, or would cut a matrix unevenly."""
    deepspeed = import_deepspeed()
    deepspeed.comm.init_distributed(dist.get_backend(), dist_init_required=False, verbose=False)
    from deepspeed.module_inject import set_autotp_mode
    from deepspeed.module_inject.auto_tp import AutoTP
    from deepspeed.module_inject.autotp_config import AutoTPConfig
    from deepspeed.module_inject.layers import VocabParallelEmbedding
    from deepspeed.module_inject.tp_plan_converter import TPPlanConverter

    set_autotp_mode(training=True)  # without it, slices do not require a gradient
    ranks, group = mesh.size(), mesh.get_group()
    plan = {name: style for name, style in model.tp_plan.items() if style not in _OF_THE_VOCABULARY}
    try:
        specs = TPPlanConverter.convert(plan)
    except ValueError as error:
        raise ConfigError(f"text.parallelism=autotp: {error} Set text.parallelism=tensor.") from error
    splitter = AutoTP(
        module=model,
        all_reduce_linears=(),
        prefix="",
        state_dict=None,
        linear_layer_setting=(nn.Linear, nn.Embedding),
        orig_layer_impl=None,
        partition_config=AutoTPConfig(tp_size=ranks, layer_specs=specs),
        vocab_parallel_lm_head=True,
        model_config=model.config,
        training_mode=True,
    )
    splitter.mp_size, splitter.mp_group = ranks, group  # its own setter takes the group of an engine
    splitter.update_linear_policies()
    splitter._resolve_vocab_parallel_lm_head()
    splitter._replace_module(model)
    if type(model.get_input_embeddings()) is nn.Embedding:  # a tied one was cut with the head
        model.set_input_embeddings(VocabParallelEmbedding(model.get_input_embeddings(), group, name="embed_tokens"))
    _mark(model, mesh)


def _mark(model: nn.Module, mesh: DeviceMesh) -> None:
    """Mark in each layer of DeepSpeed's which parameters are slices, and along which dimension."""
    from deepspeed.module_inject import layers

    for name, layer in model.named_modules():
        if not isinstance(layer, layers.TensorParallel_Layer):
            continue
        if len(set(layer._partition_sizes)) != 1:
            raise ConfigError(
                f"text.parallelism=autotp with text.tensor={mesh.size()}: DeepSpeed cuts {name} unevenly, into "
                f"{list(layer._partition_sizes)}. Set text.parallelism=tensor, which shares key and value heads, or a "
                "text.tensor that divides the heads, the vocabulary and the intermediate size."
            )
        by_input = isinstance(layer, layers.LinearAllreduce)
        for own in layer._parameters:
            if layer._parameters[own] is not None and not (by_input and own == "bias"):
                mark_cut(layer, own, mesh, dim=1 if by_input else 0)
