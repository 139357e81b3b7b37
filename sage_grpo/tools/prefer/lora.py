"""Fits an adapter of VideoAlign's language model, with its reward heads, to comparisons.

Heads can only weigh features that the base has; an adapter makes new ones. Training starts from fitted heads
(`heads.py`): gradients through a head that knows nothing of the answers would first spoil the features (Kumar et al.,
2022). A fifth of the prompts to learn from decides after how many epochs to stop; after none, if an adapter does not
help. The written reward is then trained on all answers for that many epochs. Scores of dimensions that no question
asked about are held at the values of the base: an adapter changes the features of all three.

Shapes: P comparisons, N clips, D hidden features.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from tqdm import tqdm

from sage_grpo.algo.preference import tie_losses
from sage_grpo.files.json_files import read_object, write_json
from sage_grpo.rewards.videoalign import training
from sage_grpo.rewards.videoalign.adapter import add_adapter, merge_adapter
from sage_grpo.rewards.videoalign.reward import VideoAlign
from sage_grpo.rng import permutation
from sage_grpo.tools.prefer.heads import (
    FOLDS,
    Comparisons,
    prompt_folds,
    raw_scores,
)
from sage_grpo.tools.prefer.study_clips import BATCH, StudyClips, write_at_once

HEAD = "head"
PATIENCE = 2  # epochs without a lower loss on left-out prompts, then training stops
# parameters; larger models process one pair per backward, and recompute layers
LARGE = 1e9


@dataclass(frozen=True)
class Recipe:
    """How an adapter is trained."""

    rank: int = 16
    epochs: int = 8  # at most
    lr: float = 2e-4
    batch: int = 16  # pairs per step
    seed: int = 0


class AdapterFit:
    """One training of a new adapter and a head on comparisons."""

    def __init__(
        self,
        reward: VideoAlign,
        clips: StudyClips,
        comparisons: Comparisons,
        head: Tensor,
        base_scores: Tensor,
        recipe: Recipe,
    ) -> None:
        """head: (3, D) to start from. base_scores: (N, 3) raw, of the base."""
        self.reward = reward
        self.clips = clips
        self.comparisons = comparisons
        self.recipe = recipe
        self.head = nn.Parameter(head.float().to(reward.device))
        self.parameters = add_adapter(reward.model, recipe.rank, recipe.seed)
        self.parameters[HEAD] = self.head
        self.base_scores = base_scores.float().to(reward.device)
        self.spread = self.base_scores.std(0).clamp(min=1e-6)
        asked = (comparisons.shares != 0).any(0)
        self.unasked = (~asked).nonzero()[:, 0].to(reward.device)  # dimensions
        self.steps_per_epoch = -(-len(comparisons) // recipe.batch)

        self.is_large = sum(p.numel() for p in reward.model.parameters()) >= LARGE
        self.pairs_per_backward = 1 if self.is_large else recipe.batch
        if self.is_large:
            self.recompute_layers()

    def recompute_layers(self) -> None:
        """Keep the inputs of layers alone, and recompute the rest in the backward pass: half as fast, far smaller."""
        self.reward.model.language_model.gradient_checkpointing_enable({"use_reentrant": False})

    # scores

    def raw(self, numbers: Sequence[int]) -> Tensor:
        """Raw scores (n, 3) of clips; with gradients, if they are enabled."""
        is_cuda = self.reward.device.type == "cuda"
        precision = torch.autocast("cuda", torch.bfloat16) if is_cuda else nullcontext()
        with precision:
            hidden = self.reward.hidden(self.clips.inputs(numbers, keeps=True))
        return raw_scores(hidden.float(), self.head)

    @torch.no_grad()
    def loss(self, comparisons: Comparisons) -> float:
        """Mean loss of the model as it is."""
        self.reward.model.eval()
        raw = scores_of(comparisons, self.raw, 2 if self.is_large else BATCH)
        return tie_losses(comparisons.differences(raw), comparisons.labels).mean().item()

    # training

    def draw(self, number: int) -> training.Batch:
        """Comparisons (at most `batch`,) of step 1, 2, ...: each once per epoch."""
        epoch, place = divmod(max(number, 1) - 1, self.steps_per_epoch)
        order = permutation(len(self.comparisons), self.recipe.seed, "permutation", step=epoch)
        start = place * self.recipe.batch
        return (order[start : start + self.recipe.batch],)

    def gradients(self, rows: Tensor) -> Tensor:
        """Add the gradients of the mean loss of these comparisons and of the drift; returns their sum."""
        self.reward.model.train()  # layers are recomputed in training alone; there is no dropout
        total = torch.zeros((), device=self.reward.device)
        for part in rows.split(self.pairs_per_backward):
            comparisons = self.comparisons[part.tolist()]
            numbers = torch.cat([comparisons.first, comparisons.second])  # (2 pairs,)
            different, places = numbers.unique(return_inverse=True)  # a clip is in several pairs
            raw = self.raw(different.tolist())[places.to(self.reward.device)]
            first, second = raw.chunk(2)
            shares = comparisons.shares.to(raw)
            differences = ((first - second) * shares).sum(1)
            losses = tie_losses(differences, comparisons.labels.to(raw))
            loss = (losses.mean() + self.drift(raw, numbers)) * len(part) / len(rows)
            loss.backward()
            total += loss.detach()
        return total

    def drift(self, raw: Tensor, numbers: Tensor) -> Tensor:
        """Mean squared change of scores that no question asked about, in standard deviations; raw: (n, 3)."""
        if not len(self.unasked):
            return raw.new_zeros(())
        change = (raw - self.base_scores[numbers.to(raw.device)]) / self.spread
        return change[:, self.unasked].square().mean()

    def run(
        self,
        file: Path,
        key: str,
        epochs: int,
        after_epoch: Callable[[int], bool] = lambda epoch: False,
    ) -> None:
        """Train for some epochs of the schedule, or until `after_epoch` says so.

        after_epoch: called with the number of an epoch that is over. file: for the state after each epoch, to continue
        from; `key` says what it depends on.
        """

        def after_step(number: int, loss: Tensor) -> bool:
            epoch, rest = divmod(number, self.steps_per_epoch)
            return rest == 0 and after_epoch(epoch)

        training.train(
            self.parameters,
            steps=self.recipe.epochs * self.steps_per_epoch,
            until=epochs * self.steps_per_epoch,
            lr=self.recipe.lr,
            draw=self.draw,
            gradients=self.gradients,
            name="adapter",
            after_step=after_step,
            state=training.StateFile(file, key, self.steps_per_epoch),
        )

    def merged(self, dtype: torch.dtype) -> Tensor:
        """Merge the adapter into the reward's model, rounded to the precision of files; returns the head (3, D)."""
        merge_adapter(self.reward.model, dtype)
        self.reward.model.eval()
        return self.head.detach().cpu()


def scores_of(
    comparisons: Comparisons, raw: Callable[[Sequence[int]], Tensor], batch: int
) -> Tensor:
    """Raw scores (N, 3) of the clips that are compared, fp64 on the CPU; rows of other clips are 0."""
    used = torch.cat([comparisons.first, comparisons.second]).unique()
    scores = torch.zeros(int(used.max()) + 1, 3, dtype=torch.float64)
    for numbers in used.split(batch):
        scores[numbers] = raw(numbers.tolist()).double().cpu()
    return scores


class EarlyStop:
    """Loss on left-out prompts by epoch, and the parameters of the best one; both are stored."""

    def __init__(self, fit: AdapterFit, left_out: Comparisons, folder: Path, key: str) -> None:
        self.fit = fit
        self.left_out = left_out
        self.best_file = folder / "best.safetensors"
        self.losses_file = folder / "losses.json"
        self.key = key
        self.losses: dict[int, float] = {}  # by epoch; 0 is before training
        if self.losses_file.is_file():
            stored = read_object(self.losses_file)
            if stored["key"] == key:
                self.losses = {int(epoch): loss for epoch, loss in stored["losses"].items()}

    @property
    def best_epoch(self) -> int:
        return min(self.losses, key=self.losses.__getitem__)

    @property
    def is_over(self) -> bool:
        """Whether the last epochs brought no improvement."""
        return bool(self.losses) and max(self.losses) - self.best_epoch >= PATIENCE

    def __call__(self, epoch: int) -> bool:
        """Judge the parameters after an epoch; True: stop."""
        self.losses[epoch] = self.fit.loss(self.left_out)
        tqdm.write(f"epoch {epoch}: loss {self.losses[epoch]:.4f} on prompts left out of training")
        if self.best_epoch == epoch:
            values = self.fit.parameters.items()
            write_at_once(
                self.best_file,
                {name: value.detach().cpu().contiguous() for name, value in values},
            )
        write_json(self.losses_file, {"key": self.key, "losses": self.losses})
        return self.is_over

    @torch.no_grad()
    def restore_best(self) -> None:
        for name, value in load_file(self.best_file).items():
            self.fit.parameters[name].copy_(value)


class LoraLearner:
    """Learns adapter and heads: `judge` from some answers, to score the clips of others; `final` from all."""

    def __init__(
        self,
        open_reward: Callable[[], VideoAlign],
        clips: StudyClips,
        first_head: Callable[[Comparisons], Tensor],
        base_scores: Tensor,
        recipe: Recipe,
        dtype: torch.dtype,
        key: str,
    ) -> None:
        """open_reward: loads the base. first_head: heads (3, D) fitted to comparisons. base_scores: (N, 3) raw.

        dtype: of the files. key: of what the training depends on; a stored state with another key is not used.
        """
        self.open_reward = open_reward
        self.clips = clips
        self.first_head = first_head
        self.base_scores = base_scores
        self.recipe = recipe
        self.dtype = dtype
        self.key = key
        self.epochs = 0  # the best number of them
        self.losses: dict[int, float] = {}  # on left-out prompts, by epoch

    def new_fit(self, comparisons: Comparisons) -> AdapterFit:
        """A new fit on a freshly loaded base: each fit ends by merging its adapter into the weights."""
        del self.clips.reward  # first, or two models would be in memory
        self.clips.reward = self.open_reward()
        head = self.first_head(comparisons)
        return AdapterFit(
            reward=self.clips.reward,
            clips=self.clips,
            comparisons=comparisons,
            head=head,
            base_scores=self.base_scores,
            recipe=self.recipe,
        )

    def judge(self, comparisons: Comparisons, held_out: Comparisons) -> Tensor:
        """Learn from comparisons; raw scores (N, 3) of the clips of held-out ones, by the merged model."""
        folds = prompt_folds(comparisons.prompts, FOLDS, self.recipe.seed + 1)
        inside = [row for row, fold in enumerate(folds) if fold != 0]
        left_out = [row for row, fold in enumerate(folds) if fold == 0]
        fit = self.new_fit(comparisons[inside])
        store = self.clips.store
        stop = EarlyStop(fit, comparisons[left_out], store, self.key)
        if 0 not in stop.losses:
            stop(0)
        if not stop.is_over:
            fit.run(store / "judged.safetensors", self.key, self.recipe.epochs, stop)
        stop.restore_best()
        self.epochs = stop.best_epoch
        self.losses = stop.losses
        head = fit.merged(self.dtype)

        @torch.no_grad()
        def raw(numbers: Sequence[int]) -> Tensor:
            hidden = fit.reward.hidden(self.clips.inputs(numbers, keeps=True))
            return raw_scores(hidden.float().cpu(), head)

        return scores_of(held_out, raw, 2 if fit.is_large else BATCH)

    def final(self, comparisons: Comparisons) -> tuple[nn.Module, Tensor]:
        """Model and head (3, D), trained on all comparisons for the chosen number of epochs."""
        fit = self.new_fit(comparisons)
        fit.run(self.clips.store / "final.safetensors", self.key, self.epochs)
        head = fit.merged(self.dtype)
        return fit.reward.model, head
