"""Lightning's DeepSpeedStrategy with ZenFlow, on GPUs: torchrun --nproc-per-node 2
examples/lightning_trainer.py"""

from pathlib import Path
from typing import Any

import torch
from hf_trainer import ROOT, ByteWindows, standard_library_text
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DeepSpeedStrategy
from tiny import llama
from torch.utils.data import DataLoader, Subset

import deepspeed_ext


class TinyLlama(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.model = llama()

    def training_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        return self.model(**batch).loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.model.parameters(), lr=1e-2)


def train(
    output: Path, strategy: DeepSpeedStrategy, resume: bool = False, **changes: Any
) -> Trainer:
    deepspeed_ext.enable()  # before fit, which reads the DeepSpeed config
    settings = {
        "max_epochs": 4,
        "accumulate_grad_batches": 2,
        "gradient_clip_val": 1.0,
        "precision": "bf16-true",
    }
    saving = ModelCheckpoint(output, save_last=True, save_top_k=0)
    trainer = Trainer(strategy=strategy, callbacks=[saving], logger=False, **(settings | changes))
    data = Subset(ByteWindows(standard_library_text().train, 64), range(48))
    trainer.fit(
        TinyLlama(),
        DataLoader(data, batch_size=4),
        ckpt_path=output / "last.ckpt" if resume else None,
    )
    return trainer


if __name__ == "__main__":
    zero = {"stage": 2, "zenflow": {"update_rule": "predictive"}}
    train(ROOT / "outputs" / "lightning", DeepSpeedStrategy(config={"zero_optimization": zero}))
