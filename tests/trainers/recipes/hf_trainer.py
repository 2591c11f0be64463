"""Hugging Face Trainer with KellerJordan's optimizer: Muon for matrices and Adam for the rest in one object."""

import tempfile

import torch
from muon import SingleDeviceMuonWithAuxAdam
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments, set_seed

CONFIG = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


class Losses(TrainerCallback):
    def __init__(self):
        self.values = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        if "loss" in logs:
            self.values.append(logs["loss"])


def train(folder, resume_from=None):
    set_seed(0)
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **CONFIG))
    tokens = (torch.arange(32)[:, None] + torch.arange(16)) % 64  # every row counts on from another number
    matrices = [p for name, p in model.model.layers.named_parameters() if p.ndim == 2]
    others = [p for p in model.parameters() if not any(p is q for q in matrices)]
    optimizer = SingleDeviceMuonWithAuxAdam(
        [
            {"params": matrices, "use_muon": True, "lr": 0.02, "weight_decay": 0.1},
            {"params": others, "use_muon": False, "lr": 3e-3},
        ]
    )
    losses = Losses()
    trainer = Trainer(
        model=model,
        args=TrainingArguments(
            output_dir=folder,
            max_steps=8,
            per_device_train_batch_size=4,
            logging_steps=1,
            save_steps=4,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
        ),
        train_dataset=[{"input_ids": row, "labels": row} for row in tokens],
        optimizers=(optimizer, None),
        callbacks=[losses],
    )
    trainer.train(resume_from_checkpoint=resume_from)
    return losses.values


def main():
    with tempfile.TemporaryDirectory() as folder:
        return {"losses": train(folder), "resumed": train(folder, f"{folder}/checkpoint-4")}
