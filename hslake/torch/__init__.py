"""Stream hidden states from a lake to a trainer: dataset, loader and batch layouts."""

from hslake.torch.collate import collate_batch, zero_last_loss
from hslake.torch.dataset import HiddenStateDataset
from hslake.torch.loader import Damage, HiddenStateLoader

__all__ = ["Damage", "HiddenStateDataset", "HiddenStateLoader", "collate_batch", "zero_last_loss"]
