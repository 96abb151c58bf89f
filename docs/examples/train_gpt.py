"""Train a small character model as many research scripts do, without any code of bench.

One file without epochs: a loop over random crops of a text, gradient accumulation that synchronises
in the last micro-step only, and a line per iteration with its time.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

TEXT = "the quick brown fox jumps over the lazy dog. " * 200


class Characters(nn.Module):
    """A transformer that predicts the next character."""

    def __init__(self, symbols: int, *, width: int, layers: int, block: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(symbols, width)
        self.place = nn.Embedding(block, width)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, symbols)

    def forward(self, tokens: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return logits and loss."""
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        hidden = self.embed(tokens) + self.place(torch.arange(length, device=tokens.device))
        logits = self.head(self.blocks(hidden, mask=mask, is_causal=True))
        return logits, cross_entropy(logits.flatten(0, 1), targets.flatten())


parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int, default=8, help="per micro-step and rank")
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--max_iters", type=int, default=30)
parser.add_argument("--block_size", type=int, default=32)
parser.add_argument("--n_embd", type=int, default=64)
parser.add_argument("--n_layer", type=int, default=2)
config = parser.parse_args()

ddp = int(os.environ.get("RANK", -1)) != -1
if ddp:
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, local_rank = int(os.environ["RANK"]), int(os.environ["LOCAL_RANK"])
else:
    rank, local_rank = 0, 0
device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
torch.manual_seed(1337 + rank)

symbols = sorted(set(TEXT))
data = torch.tensor([symbols.index(symbol) for symbol in TEXT])


def get_batch() -> tuple[Tensor, Tensor]:
    """Return random crops, and the same crops one character later."""
    starts = torch.randint(len(data) - config.block_size - 1, (config.batch_size,))
    x = torch.stack([data[i : i + config.block_size] for i in starts])
    y = torch.stack([data[i + 1 : i + 1 + config.block_size] for i in starts])
    return x.to(device), y.to(device)


model: nn.Module = Characters(
    len(symbols), width=config.n_embd, layers=config.n_layer, block=config.block_size
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
if ddp:
    model = DistributedDataParallel(model)

x, y = get_batch()
t0 = time.time()
for iter_num in range(config.max_iters):
    for micro_step in range(config.gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == config.gradient_accumulation_steps - 1
        logits, loss = model(x, y)
        loss = loss / config.gradient_accumulation_steps
        x, y = get_batch()
        loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    t1 = time.time()
    dt, t0 = t1 - t0, t1
    if rank == 0:
        lossf = loss.item() * config.gradient_accumulation_steps
        print(f"iter {iter_num}: loss {lossf:.4f}, time {dt * 1000:.2f}ms")
if ddp:
    # DDP and the last graph hold references to the group; without them, the group's threads end here and not
    # at Python's exit.
    dist.barrier()
    del model, logits, loss
    dist.destroy_process_group()
