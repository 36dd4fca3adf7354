"""A training on DeepSpeed, as its documentation begins; `ds.json` has its settings.

torchrun --nproc-per-node 2 zero.py --deepspeed_config ds.json
"""

import argparse
import os

import deepspeed
import torch
from torch import nn
from tqdm import tqdm


def main() -> None:
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--local_rank", type=int, default=int(os.environ.get("LOCAL_RANK", 0)))
    options = parser.parse_args()
    deepspeed.init_distributed()
    layer = nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True, norm_first=True)
    model = nn.Sequential(
        nn.Embedding(256, 256), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(256, 256)
    )
    engine, *_ = deepspeed.initialize(args=options, model=model, model_parameters=model.parameters())
    micro = engine.train_micro_batch_size_per_gpu()
    for _ in tqdm(range(options.steps), disable=torch.distributed.get_rank() != 0):
        for _ in range(engine.gradient_accumulation_steps()):
            tokens = torch.randint(256, (micro, 128), device=engine.device)
            output = engine(tokens)
            loss = nn.functional.cross_entropy(output.flatten(0, 1).float(), tokens.flatten())
            engine.backward(loss)
            engine.step()


if __name__ == "__main__":
    main()
