"""A loop with accelerate and Moonlight's optimizer: gradient accumulation, a prepared optimizer and scheduler."""

import tempfile

import torch
from accelerate import Accelerator
from torch import nn
from toy_train import Muon


def train(folder, resume=False):
    torch.manual_seed(0)
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    x = torch.randn(64, 16)
    data = torch.utils.data.TensorDataset(x, torch.sin(x @ torch.randn(16, 8)))
    matrices = [p for p in model.parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if p.ndim < 2]
    optimizer = Muon(lr=0.02, wd=0.1, muon_params=matrices, adamw_params=others)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    loader = torch.utils.data.DataLoader(data, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    losses = []
    if resume:
        accelerator.load_state(folder)
    for epoch in range(1 if resume else 0, 2):
        for inputs, targets in loader:
            with accelerator.accumulate(model):
                loss = nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        if epoch == 0:
            accelerator.save_state(folder)
    return losses


def main():
    with tempfile.TemporaryDirectory() as folder:
        return {"losses": train(folder), "resumed": train(folder, resume=True)}
