"""What the ranks of the Megatron tests import, for the fork server to import once."""

import warnings

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it tells at length that there is no GPU
    import megatron.core.distributed
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.models.gpt.gpt_model
    import megatron.core.optimizer
    import megatron.core.pipeline_parallel
    import megatron.core.transformer.moe.moe_layer  # noqa: F401
