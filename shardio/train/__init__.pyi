from .callbacks import (
    Callback as Callback,
    Compile as Compile,
    GradientPenalty as GradientPenalty,
    PrintEpochs as PrintEpochs,
    RatePlot as RatePlot,
    plot_rates as plot_rates,
    write_report as write_report,
)
from .checkpoint import (
    load_checkpoint as load_checkpoint,
    save_checkpoint as save_checkpoint,
    seed_everything as seed_everything,
)
from .config import TrainConfig as TrainConfig
from .loop import count_steps as count_steps, train as train
from .meters import (
    EpochResult as EpochResult,
    Score as Score,
    StepRecord as StepRecord,
    memory_difference as memory_difference,
)
from .models import make_model as make_model, small_resnet as small_resnet
from .step import TrainStep as TrainStep, evaluate as evaluate, in_groups as in_groups

__all__: list[str]
