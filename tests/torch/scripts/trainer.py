"""Hugging Face's Trainer, with rotation: FOLDER STEPS [RESUME]. Prints each step's loss."""

import sys

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

background = []
if "--callback" in sys.argv:
    from lmstorfs.torch.transformers import BackgroundSaves

    sys.argv.remove("--callback")
    background = [BackgroundSaves()]
folder, steps = sys.argv[1], int(sys.argv[2])


class Tokens(Dataset):
    """The same random tokens for all."""

    def __init__(self) -> None:
        self.tokens = torch.randint(0, 100, (64, 12), generator=torch.Generator().manual_seed(1))

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.tokens[index], "labels": self.tokens[index]}


class Losses(TrainerCallback):
    """Prints losses with all their bits."""

    def on_log(self, args, state, control, logs=None, **more):
        if "loss" in (logs or {}):
            print(state.global_step, float(logs["loss"]).hex())


config = GPT2Config(vocab_size=100, n_positions=16, n_embd=64, n_layer=2, n_head=2)
torch.manual_seed(0)
arguments = TrainingArguments(
    output_dir=folder, max_steps=steps, per_device_train_batch_size=4, save_steps=2,
    save_total_limit=2, logging_steps=1, report_to=[], disable_tqdm=True, seed=3, use_cpu=True,
)  # fmt: skip
callbacks = [Losses(), *background]
trainer = Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Tokens(), callbacks=callbacks)
trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
