"""Train a draft on a Megatron-Core pipeline's own hidden states.

    torchrun --nproc-per-node 2 examples/megatron_draft.py

Each rank is a stage. The draft sits on the last one and learns to say what the policy will say
from the outputs of the layers in LAYERS, one of which another stage computes.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.pipeline_parallel import get_forward_backward_func
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer import TransformerConfig
from torch.nn import functional

from tapchannel.integrations.megatron import attach

CUDA = torch.cuda.is_available()
LAYERS = [1, 2, 4]
VOCABULARY, WIDTH, LENGTH, BATCH, MICROBATCHES, STEPS = 64, 32, 16, 4, 4, 30


def build_policy():
    config = TransformerConfig(
        num_layers=4,
        hidden_size=WIDTH,
        num_attention_heads=4,
        pipeline_model_parallel_size=dist.get_world_size(),
        pipeline_dtype=torch.float32,
        use_cpu_initialization=not CUDA,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    model = GPTModel(
        config,
        get_gpt_layer_local_spec(),
        VOCABULARY,
        LENGTH,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
    )
    return model.cuda() if CUDA else model


def draft_loss(session, draft, logits):
    with session.take() as taps:  # those of the microbatch that was just forwarded
        guess = draft(taps["features"])
    target = logits.detach().transpose(0, 1).flatten(0, 1).softmax(-1)  # rows as the taps': [s, b]
    return functional.cross_entropy(guess, target)


def train(model, session, draft):
    parameters = [*model.parameters(), *(draft.parameters() if draft else [])]
    optimizer = torch.optim.AdamW(parameters, lr=1e-2)
    run = get_forward_backward_func()
    losses = []

    def forward_step(batches, model):
        tokens = next(batches)
        places = torch.arange(LENGTH, device=tokens.device).expand_as(tokens)
        later = torch.ones(LENGTH, LENGTH, dtype=torch.bool, device=tokens.device).triu(1)
        logits = model(tokens, places, later[None, None])

        def loss(logits):
            policy = functional.cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
            losses.append(draft_loss(session, draft, logits))
            return policy + losses[-1], {"policy": policy.detach()}

        return logits, loss

    for step in range(STEPS):
        torch.manual_seed(step)  # so that all stages draw the same tokens: they count upwards
        tokens = torch.randint(VOCABULARY, (MICROBATCHES, BATCH, 1)) + torch.arange(LENGTH)
        tokens %= VOCABULARY
        optimizer.zero_grad()
        with session.step():
            run(
                forward_step_func=forward_step,
                data_iterator=iter(tokens.cuda() if CUDA else tokens),
                model=model,
                num_microbatches=MICROBATCHES,
                seq_length=LENGTH,
                micro_batch_size=BATCH,
            )
        optimizer.step()
    return losses


def main():
    dist.init_process_group("nccl" if CUDA else "gloo")
    if CUDA:
        torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=dist.get_world_size())
    if CUDA:
        model_parallel_cuda_manual_seed(1)
    torch.manual_seed(dist.get_rank())
    model = build_policy()
    with attach(model, LAYERS, max_rows=LENGTH * BATCH, microbatches=MICROBATCHES) as session:
        draft = torch.nn.Linear(len(LAYERS) * WIDTH, VOCABULARY) if session.is_consumer else None
        losses = train(model, session, draft.cuda() if CUDA and draft else draft)
        if draft:
            print(
                f"draft loss {losses[0]:.3f} in the first microbatch, {losses[-1]:.3f} in the last"
            )
        dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
