"""Lightning with `last.ckpt`: FOLDER STEPS [RESUME]. Prints each step's loss."""

import sys

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

plugins = []
if "--plugin" in sys.argv:
    from lmstorfs.torch.lightning import MountCheckpointIO

    sys.argv.remove("--plugin")
    plugins = [MountCheckpointIO()]
folder, steps = sys.argv[1], int(sys.argv[2])


class Module(LightningModule):
    """A small network."""

    def __init__(self) -> None:
        super().__init__()
        self.network = torch.nn.Sequential(torch.nn.Linear(40, 300), torch.nn.Linear(300, 3))

    def training_step(self, batch, number):
        loss = self.network(batch[0]).square().mean()
        print(self.global_step + 1, loss.item().hex())
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


seed_everything(0, verbose=False)
data = TensorDataset(torch.randn(64, 40, generator=torch.Generator().manual_seed(1)))
keep = ModelCheckpoint(
    folder, "step-{step}", every_n_train_steps=2, save_top_k=2, monitor="step", mode="max",
    save_last=True, auto_insert_metric_name=False,
)  # fmt: skip
trainer = Trainer(
    accelerator="cpu", max_steps=steps, callbacks=[keep], logger=False, plugins=plugins,
    enable_progress_bar=False, enable_model_summary=False, default_root_dir=folder,
)  # fmt: skip
resume = sys.argv[3] if len(sys.argv) > 3 else None
trainer.fit(Module(), DataLoader(data, batch_size=4), ckpt_path=resume)
