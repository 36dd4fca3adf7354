"""A training loop of one's own on accelerate; its only output is a progress bar.

accelerate launch --mixed_precision bf16 loop.py --batch 16
"""

import argparse

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from tqdm import tqdm


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=1)
    parser.add_argument("--workers", type=int, default=0)
    options = parser.parse_args()
    accelerator = Accelerator(gradient_accumulation_steps=options.accumulate, cpu=not torch.cuda.is_available())
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True, norm_first=True)
    model = nn.Sequential(nn.Embedding(256, 128), nn.TransformerEncoder(layer, 4, enable_nested_tensor=False))
    head = nn.Linear(128, 256)
    data = TensorDataset(torch.randint(256, (4096, 128)))
    loader = DataLoader(data, batch_size=options.batch, shuffle=True, num_workers=options.workers)
    whole = nn.Sequential(model, head)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    whole, optimizer, loader = accelerator.prepare(whole, optimizer, loader)
    for (tokens,) in tqdm(loader, disable=not accelerator.is_main_process):
        with accelerator.accumulate(whole):
            loss = nn.functional.cross_entropy(whole(tokens).flatten(0, 1).float(), tokens.flatten())
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()


if __name__ == "__main__":
    main()
