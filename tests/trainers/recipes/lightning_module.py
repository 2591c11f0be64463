"""Lightning with torch.optim.Muon: one optimizer from configure_optimizers, stepped with a closure."""

import tempfile

import lightning
import torch
from torch import nn


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32, bias=False), nn.GELU(), nn.Linear(32, 8, bias=False))
        self.losses = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        loss = nn.functional.mse_loss(self.layers(x), y)
        self.losses.append(loss.item())
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.Muon(self.parameters(), lr=0.02, weight_decay=0.1)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def train(folder, resume_from=None):
    lightning.seed_everything(0)
    model = Regression()
    x = torch.randn(32, 16)
    data = torch.utils.data.TensorDataset(x, torch.sin(x @ torch.randn(16, 8)))
    trainer = lightning.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[lightning.pytorch.callbacks.ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1)],
    )
    trainer.fit(model, torch.utils.data.DataLoader(data, batch_size=8), ckpt_path=resume_from)
    return model.losses


def main():
    with tempfile.TemporaryDirectory() as folder:
        return {"losses": train(folder), "resumed": train(folder, f"{folder}/epoch=0.ckpt")}
