"""TrainStep, which turns microbatches into optimizer steps on all ranks, and the evaluation of a model."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.rendezvous import rendezvous
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DistributedSampler

from shardio.device import BatchRandomErasing, CutMix, DevicePrefetcher, MixUp, OneOf, choose_device
from shardio.device.mixing import BatchTransform
from shardio.epochs import Count, find_held, hand_over, held_back, restore_held
from shardio.sample import count_classes
from shardio.train.config import Precision, TrainConfig
from shardio.values import count
from shardio.world import World, find_local_rank, find_world

Value = TypeVar("Value")

_joins = itertools.count()
"""Numbers for process groups. Each group needs a new number, because the store keeps addresses under earlier
numbers."""


def use_device(name: str | None) -> torch.device:
    """Return this rank's device, by default its own GPU, and make this device current in torch."""
    device = choose_device(name, num_ranks=find_world().world_size)
    if device.type == "cuda":
        if str(device) == "cuda":
            local_rank = find_local_rank()
            # A launcher may show each rank only its own GPU. Without torchrun, the user's script has chosen a GPU.
            own = torch.cuda.current_device() if local_rank is None else local_rank % torch.cuda.device_count()
            device = torch.device("cuda", own)
        torch.cuda.set_device(device)  # NCCL and code that names no device use the current device.
    return device


@contextlib.contextmanager
def joined_ranks(device: torch.device) -> Iterator[World]:
    """Join the other ranks, if a launcher such as torchrun started several ranks that have not joined yet."""
    world = find_world()
    if world.world_size == 1 or dist.is_initialized():
        yield world
        return
    store, rank, world_size = next(iter(rendezvous("env://")))
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=dist.PrefixStore(f"shardio/{next(_joins)}", store),  # type: ignore[attr-defined]  # torch's __all__ lacks it
        rank=rank,
        world_size=world_size,
    )
    yield world
    # After an error, this code does not run: the process ends without waiting, and the launcher and the other ranks
    # detect its end. The last owner of the group waits for the group's threads. The call below waits without the GIL,
    # which the threads may need. If DistributedDataParallel is the last owner, the process deadlocks
    # (pytorch/pytorch#154976), so free that object first.
    gc.collect()
    dist.destroy_process_group()


@contextlib.contextmanager
def reported_failures() -> Iterator[None]:
    """Report this rank's error to torchrun, whose summary names the first failure on any rank."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if find_world().world_size == 1:
        yield
        return
    handler = get_error_handler()
    handler.initialize()
    try:
        yield
    except Exception as error:
        # A failure of another rank may cause a communication error on this one. Gloo's errors have no special type.
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "/gloo/" in str(error)):
            time.sleep(1)  # torchrun compares times in whole seconds, and names the lowest rank if they are equal.
        handler.record_exception(error)
        raise


def share_gradients(model: nn.Module, device: torch.device, *, deterministic: bool) -> nn.Module:
    """Return a model whose gradients are the mean over all ranks; with one rank, the model itself."""
    if not dist.is_initialized():
        return model
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        # By default, DistributedDataParallel regroups gradients after the first step. With three or more ranks, the
        # first step of a resumed run would then add the gradients in a different order.
        find_unused_parameters=deterministic,
    )


def unwrap(model: nn.Module) -> nn.Module:
    """Return the model without the wrapper that :func:`share_gradients` adds."""
    return model.module if isinstance(model, DistributedDataParallel) else model


def gather(value: Value) -> list[Value]:
    """Return the values of all ranks, in rank order."""
    if not dist.is_initialized():
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def sum_over_ranks(tensor: torch.Tensor) -> torch.Tensor:
    """Sum a small tensor over all ranks, in rank order, and return the sum on the CPU."""
    return torch.stack(gather(tensor.cpu())).sum(0)


def on_rank_0(function: Callable[[], Value]) -> Value:
    """Call a function on rank 0 only. Return its result, or raise its error, on all ranks."""
    outcome: list[Value] | Exception = []
    if find_world().rank == 0:
        try:
            outcome = [function()]
        except Exception as error:
            outcome = error
    outcome = gather(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome[0]


DTYPES: dict[Precision, torch.dtype] = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}

LossFunction = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class LrScheduler(Protocol):
    """A learning rate schedule, like torch's, that is stepped after each step of the optimizer."""

    def step(self) -> None: ...

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any], /) -> None: ...


class LossHook(Protocol):
    """A function that takes a microbatch's loss and returns the loss to compute gradients from."""

    def __call__(self, loss: torch.Tensor, step: TrainStep, /) -> torch.Tensor: ...


class TrainStep:
    """A callable that takes optimizer steps on groups of microbatches, with the gradients of one large batch.

    >>> model = nn.Linear(2, 3)
    >>> step = TrainStep(model, torch.optim.SGD(model.parameters(), 0.1), accumulate=2)
    >>> batches = [(torch.zeros(4, 2), torch.tensor([0, 1, 2, 0]))] * 5
    >>> for (inputs, labels), ends_step in in_groups(batches, 2):
    ...     outputs, loss = step(inputs, labels, ends_step=ends_step)
    >>> step.num_steps
    3

    Args:
        model: A module that maps inputs to outputs. The module may be compiled, scripted or wrapped in
            DistributedDataParallel.
        optimizer: The optimizer for the model's parameters.
        schedule: The learning rate schedule, stepped after each step that is not skipped.
        precision: ``bf16`` and ``fp16`` use autocast. ``fp16`` also uses a GradScaler.
        accumulate: Microbatches per full step. This number does not decide where a step ends (``ends_step`` does) and
            does not change the result: it only keeps gradients in fp16's range while they accumulate.
        loss_fn: A function that maps outputs and labels to the mean loss of the samples.
        clip_norm: The total norm that the gradients are clipped to, or None.
        clip_value: The magnitude that each gradient element is clipped to, or None.
        hooks: Functions applied to the loss, in order, before gradients are computed.

    Attributes:
        num_taken: Steps taken.
        num_skipped: Steps that the GradScaler skipped because a gradient was not finite.
        lr: The learning rate of the last step.
        grad_norm: With ``clip_norm``, the norm of the last step's gradients before they were clipped.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        schedule: LrScheduler | None = None,
        precision: Precision = "fp32",
        accumulate: int = 1,
        loss_fn: LossFunction = nn.functional.cross_entropy,
        clip_norm: float | None = None,
        clip_value: float | None = None,
        hooks: Sequence[LossHook] = (),
    ) -> None:
        self.model, self.optimizer, self.schedule = model, optimizer, schedule
        self.precision, self.accumulate, self.loss_fn = precision, accumulate, loss_fn
        self.clip_norm, self.clip_value, self.hooks = clip_norm, clip_value, hooks
        self.parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
        self.device = self.parameters[0].device
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=precision == "fp16")
        self.num_taken = self.num_skipped = 0
        self.lr = float(optimizer.param_groups[0]["lr"])
        self.grad_norm: torch.Tensor | None = None
        self._first_size = self._num_samples = 0

    def __call__(
        self, inputs: torch.Tensor, labels: torch.Tensor, *, ends_step: bool = True
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Compute the gradients of a microbatch, and take a step after the last microbatch of a group.

        Returns:
            The outputs [N, …] and the mean loss of the samples, both detached.
        """
        self._first_size = self._first_size or len(labels)
        self._num_samples += len(labels)
        if ends_step:
            self._weight_by_samples()
        # Ranks exchange gradients once per step, during the step's last microbatch.
        exchange: AbstractContextManager[Any] = nullcontext()
        if isinstance(self.model, DistributedDataParallel) and not ends_step:
            exchange = self.model.no_sync()
        with exchange:
            with autocast(self.device, self.precision):
                outputs = self.model(inputs)
                loss = self.loss_fn(outputs, labels)
            total = loss
            for hook in self.hooks:
                total = hook(total, self)
            num_in_step = self._num_samples if ends_step else self._first_size * self.accumulate
            self.scaler.scale(total * (len(labels) / num_in_step)).backward()
        if ends_step:
            self._take_step()
        return outputs.detach(), loss.detach()

    @property
    def scale(self) -> float:
        """The factor by which fp16 scales the loss; 1 otherwise. With fp16, reading the factor waits for the device."""
        return float(self.scaler.get_scale())

    @property
    def num_steps(self) -> int:
        """The number of steps so far, taken and skipped."""
        return self.num_taken + self.num_skipped

    def state_dict(self) -> dict[str, Any]:
        """Return the state that later steps depend on, except the model's state.

        Call this method between two groups of microbatches.
        """
        return {
            "optimizer": self.optimizer.state_dict(),
            "schedule": None if self.schedule is None else self.schedule.state_dict(),
            "scaler": self.scaler.state_dict(),
            "num_taken": self.num_taken,
            "num_skipped": self.num_skipped,
            "lr": self.lr,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a state that :meth:`state_dict` returned."""
        own, saved = self.optimizer.param_groups, state["optimizer"]
        # This device, not the one that the state was saved on, decides whether the optimizer is fused.
        groups = [
            {**group, "fused": mine["fused"]} if "fused" in mine else group
            for group, mine in zip(saved["param_groups"], own, strict=False)
        ]
        is_same = len(groups) == len(saved["param_groups"]) == len(own)
        self.optimizer.load_state_dict({**saved, "param_groups": groups} if is_same else saved)
        if self.schedule is not None and state["schedule"] is not None:
            self.schedule.load_state_dict(state["schedule"])
        if self.scaler.is_enabled():
            self.scaler.load_state_dict(state["scaler"])
        self.num_taken, self.num_skipped, self.lr = state["num_taken"], state["num_skipped"], state["lr"]

    def _take_step(self) -> None:
        self._first_size = self._num_samples = 0
        self.scaler.unscale_(self.optimizer)
        if self.clip_norm is not None:
            self.grad_norm = nn.utils.clip_grad_norm_(self.parameters, self.clip_norm)
        if self.clip_value is not None:
            nn.utils.clip_grad_value_(self.parameters, self.clip_value)
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        is_taken = self._step_optimizer()
        self.optimizer.zero_grad(set_to_none=True)
        if not is_taken:
            self.num_skipped += 1
            return
        self.num_taken += 1
        if self.schedule is not None:
            self.schedule.step()

    def _step_optimizer(self) -> bool:
        """Step the optimizer through the scaler, unless a gradient is not finite; return whether it was stepped."""
        # The scaler always calls a fused optimizer, which skips the step on the device. After a skipped step, the
        # scaler lowers its scale. Reading the scale waits for the device.
        is_fused = self.scaler.is_enabled() and getattr(self.optimizer, "_step_supports_amp_scaling", False)
        calls, scale = list[bool](), self.scale if is_fused else 0.0
        hook = self.optimizer.register_step_post_hook(lambda *_: calls.append(True))
        try:
            self.scaler.step(self.optimizer)
        finally:
            hook.remove()
        self.scaler.update()
        return self.scale >= scale if is_fused else bool(calls)

    def _weight_by_samples(self) -> None:
        """Weight the group's gradients by its number of samples, before ranks exchange them.

        Until the last microbatch, the weight assumes a full group of microbatches as large as the first.
        """
        num_planned = self._first_size * self.accumulate
        if self._num_samples != num_planned:
            for weight in self.parameters:
                if weight.grad is not None:
                    weight.grad.mul_(num_planned / self._num_samples)


def autocast(device: torch.device, precision: Precision) -> torch.autocast:
    """Return the context in which a model computes in this precision."""
    return torch.autocast(device.type, DTYPES[precision], enabled=precision != "fp32")


def in_groups(batches: Iterable[Any], size: int) -> Iterator[tuple[Any, bool]]:
    """Yield each batch, and whether it ends its group of ``size`` batches. The last group may be shorter.

    The iterator looks one batch ahead within a group, but not past a full group. The state of a shardio loader, or of a
    :class:`shardio.DevicePrefetcher` around any loader, always reflects the last batch that was yielded. This state
    does not reflect the next batch or the end of the epoch until you receive them.
    """
    iterator, nothing = iter(batches), object()

    def take() -> tuple[Any, list[Count]]:
        held = find_held()
        try:
            with held_back() if size > 1 else nullcontext(list[Count]()) as counts:
                return next(iterator, nothing), counts
        except BaseException:
            restore_held(held)
            raise

    (batch, counts), num_in_group = take(), 1
    while batch is not nothing:
        if num_in_group == size:
            hand_over(counts)
            yield batch, True
            (batch, counts), num_in_group = take(), 1
        else:
            following, later_counts = take()
            hand_over(counts)
            yield batch, following is nothing
            batch, counts, num_in_group = following, later_counts, num_in_group + 1
    hand_over(counts)


def make_transforms(loader: Any, config: TrainConfig) -> list[BatchTransform]:
    """Return the transforms of training batches on the device, in the order of torchvision's reference training script.

    Raises:
        ValueError: If batches are to be mixed and the number of classes is unknown.
    """
    transforms = list[BatchTransform]()
    if config.random_erasing:
        transforms.append(BatchRandomErasing(config.random_erasing))
    rates: dict[type[MixUp | CutMix], float] = {MixUp: config.mixup, CutMix: config.cutmix}
    if not any(rates.values()):
        return transforms
    if (num_classes := config.num_classes or count_classes(loader)) is None:
        raise ValueError(
            f"mixup and cutmix need the number of classes, which the dataset of this {type(loader).__name__} does not "
            "have: set num_classes"
        )
    mixing = [mix(alpha=alpha, num_classes=num_classes) for mix, alpha in rates.items() if alpha]
    return [*transforms, OneOf(mixing)]


def make_loss(config: TrainConfig) -> LossFunction:
    """Return the training loss, for class numbers [N] and for soft labels [N, classes]."""

    def compute_loss(outputs: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if labels.is_floating_point() and labels.shape != outputs.shape:
            raise ValueError(
                f"soft labels {list(labels.shape)} must have the shape of the model's outputs, {list(outputs.shape)}: "
                "if mixup or cutmix made them, set num_classes to the number of outputs"
            )
        return nn.functional.cross_entropy(outputs, labels, label_smoothing=config.label_smoothing)

    return compute_loss


class Score:
    """The sums of losses and correct predictions, on the device. Only reading a property waits for the device."""

    def __init__(self, device: torch.device) -> None:
        # MPS has no float64.
        self.sums = torch.zeros(3, dtype=torch.float64, device="cpu" if device.type == "mps" else device)

    def add(
        self, losses: torch.Tensor, outputs: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor | None = None
    ) -> None:
        """Add losses [N], outputs [N, classes] and labels, [N] or [N, classes], where ``valid`` [N] is True.

        The correct class of a soft label is the one with the largest share.
        """
        classes = labels.argmax(1) if labels.is_floating_point() else labels
        valid = torch.ones_like(classes, dtype=torch.bool) if valid is None else valid
        correct = (outputs.argmax(1) == classes) & valid
        loss = losses.to(self.sums).masked_fill(~valid.to(self.sums.device), 0).sum()
        self.sums += torch.stack([loss, correct.sum().to(self.sums), valid.sum().to(self.sums)])

    def over_ranks(self) -> Score:
        """Return the score over all ranks."""
        score = Score(self.sums.device)
        score.sums = sum_over_ranks(self.sums)
        return score

    @property
    def num_images(self) -> int:
        """The number of samples."""
        return int(self.sums[2].item())

    @property
    def loss(self) -> float:
        """The mean loss per sample."""
        return self.sums[0].item() / max(self.num_images, 1)

    @property
    def accuracy(self) -> float:
        """The share of correct predictions."""
        return self.sums[1].item() / max(self.num_images, 1)


def evaluate(model: nn.Module, loader: Iterable[Any], config: TrainConfig) -> Score:
    """Evaluate a model on the batches of all ranks. Every rank must call this function.

    The model does not change. Regardless of the settings, images are neither mixed nor erased, and labels are not
    smoothed. The score is exact if the loader yields each sample once, or marks repeats with False in an additional
    last field, bool [N], as shardio's loaders do with ``remainder="mask"``. If the loader pads without marking repeats,
    a RuntimeWarning is issued.

    Args:
        model: A module on the device that maps images to outputs [N, classes].
        loader: An iterable of batches that start with images and labels.
        config: The settings: device, precision, and the normalization of images.

    Returns:
        The score over all ranks.

    Raises:
        ValueError: If there are no samples.
    """
    device = use_device(config.device)
    with joined_ranks(device) as world:
        warn_of_repeats(loader, world, stacklevel=2)
        batches = loader if isinstance(loader, DevicePrefetcher) else prefetch(loader, config, device)
        return measure(model, batches, config)


def measure(model: nn.Module, batches: DevicePrefetcher, config: TrainConfig) -> Score:
    """Evaluate a model as :func:`evaluate` does, on ranks that have already joined."""
    was_training = model.training
    model.eval()
    score = Score(batches.device)
    with torch.no_grad():
        for buffer in model.buffers() if dist.is_initialized() else ():
            dist.broadcast(buffer, 0)  # All ranks use rank 0's buffers, such as BatchNorm's statistics.
        for batch in batches:
            images, labels = images_and_labels(batch)
            with autocast(batches.device, config.precision):
                outputs = model(images)
                losses = nn.functional.cross_entropy(outputs, labels, reduction="none")
            last = batch[-1]
            is_mask = isinstance(last, torch.Tensor) and last.dtype == torch.bool
            score.add(losses, outputs, labels, last if is_mask else None)
        score = score.over_ranks()
    model.train(was_training)
    if not score.num_images:
        raise ValueError("there is nothing to evaluate: the loader yielded no samples, or marked all as repeats")
    return score


def prefetch(
    loader: Iterable[Any], config: TrainConfig, device: torch.device, transforms: Sequence[BatchTransform] = ()
) -> DevicePrefetcher:
    """Return a loader whose images arrive on the device, normalized, in the dtype that the model computes in.

    The transforms are then applied to each batch.
    """
    return DevicePrefetcher(
        loader,
        device,
        normalize=(config.mean, config.std),
        dtype=DTYPES[config.precision],
        channels_last=config.channels_last,
        transform=transforms,
    )


def images_and_labels(batch: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the first two fields of a batch."""
    fields = batch if isinstance(batch, (tuple, list)) else ()
    if len(fields) < 2 or not all(isinstance(field, torch.Tensor) for field in fields[:2]):
        names = ", ".join(type(field).__name__ for field in fields)
        found = type(batch).__name__ + (f" of {names}" if names else "")
        raise TypeError(f"batches must start with a tensor of images and a tensor of labels, got {found}")
    return fields[0], fields[1]


def warn_of_repeats(loader: Any, world: World, *, stacklevel: int) -> None:
    """Warn, on rank 0, if a validation loader repeats samples without marking them.

    Args:
        loader: The loader, which may be wrapped, for example in a DevicePrefetcher.
        world: The rank and the world size.
        stacklevel: The caller that the warning names, as in ``warnings.warn``.
    """
    if world.rank != 0:
        return
    while not hasattr(loader, "dataset") and hasattr(loader, "loader"):
        loader = loader.loader
    num_samples, num_ranks, padded_by = _find_padding(loader)
    if num_samples % num_ranks:
        warnings.warn(
            f"the score on {count(num_samples, 'validation sample')} is not exact, because {padded_by} repeats "
            f"{-num_samples % num_ranks} of them so that all {num_ranks} ranks have the same number. Use "
            "shardio.DataLoader, and pass remainder='mask' to the ShardDataset, or to sampler=EpochSampler(dataset, "
            "shuffle=False)",
            RuntimeWarning,
            stacklevel=stacklevel + 1,
        )


def _find_padding(loader: Any) -> tuple[int, int, str]:
    """Return the numbers of samples and ranks, and a description of the padding order; 0, 1 and "" without padding."""
    dataset: Any = getattr(loader, "dataset", None)
    sampler: Any = getattr(loader, "sampler", None)
    if not isinstance(sampler, DistributedSampler):  # EpochSampler is one.
        sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    for order in (dataset, sampler):
        policy = getattr(order, "remainder_policy", None)
        if policy is None:
            continue
        if not policy.repeats or policy.marks_repeats or getattr(loader, "drop_last", False):
            return 0, 1, ""
        how = f"{type(order).__name__} with remainder={order.remainder!r}"
        return order.num_all_samples, order.world().world_size, how
    if isinstance(sampler, DistributedSampler) and not sampler.drop_last:
        return len(dataset), sampler.num_replicas, type(sampler).__name__
    return 0, 1, ""
