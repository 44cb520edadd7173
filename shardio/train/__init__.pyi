from .callbacks import (
    Callback as Callback,
    Compile as Compile,
    EpochResult as EpochResult,
    GradientPenalty as GradientPenalty,
    PrintEpochs as PrintEpochs,
    StepRecord as StepRecord,
)
from .checkpoint import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
    seed_everything as seed_everything,
)
from .config import TrainConfig as TrainConfig
from .loop import count_steps as count_steps, memory_difference as memory_difference, train as train
from .models import make_model as make_model, small_resnet as small_resnet
from .report import RatePlot as RatePlot, plot_rates as plot_rates, write_report as write_report
from .step import Score as Score, TrainStep as TrainStep, evaluate as evaluate, in_groups as in_groups

__all__: list[str]
